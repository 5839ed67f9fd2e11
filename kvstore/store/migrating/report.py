"""What a migration did, in values."""

from dataclasses import dataclass, field

MAX_LOSSES = 1000
"""Beyond so many they are counted, not listed."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A blob that could not be brought along. `namespace` is an id."""

    namespace: str
    what: str


@dataclass(slots=True)
class NamespaceMigrated:
    """A namespace. `lost_pages` can't be served any more: they need a blob that was lost, or are below one that does."""

    id: str
    name: str
    blobs: int = 0
    lost_blobs: int = 0
    lost_pages: int = 0


@dataclass(slots=True)
class MigrationReport:
    """`moved_bytes` are those of stored forms. `kept` is the old folder of blobs, if some of it could not be read; else it is deleted."""

    from_format: int
    to_format: int
    namespaces: list[NamespaceMigrated] = field(default_factory=list)
    moved_blobs: int = 0
    moved_bytes: int = 0
    losses: list[Loss] = field(default_factory=list)
    kept: str | None = None
    seconds: float = 0.0

    @property
    def lost_blobs(self) -> int:
        """Blobs that could not be brought along."""
        return sum(space.lost_blobs for space in self.namespaces)

    @property
    def lost_pages(self) -> int:
        """Pages that this costs."""
        return sum(space.lost_pages for space in self.namespaces)
