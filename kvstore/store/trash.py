"""What is gone from memory and still has to be deleted on disk."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.store.space import Space


@dataclass(slots=True)
class Trash:
    """What is gone from memory and still has to be deleted on disk: record keys, and blobs as (number, id, stored bytes).

    `outdated` are records that name blobs (by row, each pinned and counted as durable once) which their pages no longer have:
    they are written anew before the blobs are deleted. `namespaces` are the numbers of dropped ones, of which all is to go.
    """

    records: list[tuple[int, bytes]] = field(default_factory=list)
    blobs: list[tuple[int, bytes, int]] = field(default_factory=list)
    outdated: list["tuple[Space, bytes, list[int]]"] = field(default_factory=list)
    namespaces: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.records or self.blobs or self.outdated or self.namespaces)
