"""Which blobs a client that fetches a prefix piece by piece will ask for next, so that the daemon can read them meanwhile. Pure."""

from typing import TYPE_CHECKING

from kvstore.api.wire import DIGEST_BYTES, PartRange

if TYPE_CHECKING:
    from kvstore_client.match import Match

_WINDOW_BYTES = 32 << 20
"""So much of a prefix is read ahead at most: two pages of 16 MiB keep a disk busy between requests."""
_WINDOW_BLOBS = 64
_GROWTH = 2
"""Twice as much as was asked for: who takes little at a time is soon back for more, and it is little to read in vain."""


class InOrder:
    """Notices that the pages of a match are fetched one after the other."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: tuple[PartRange, int] | None = None

    def after(self, match: "Match", first: int, last: int, wanted: PartRange) -> bytes:
        """The ids (16 bytes each) of what will probably follow `wanted` of the pages [first, last); none if there is no order."""
        expected = self._next or (wanted, match.pages_of(wanted.component)[0])
        self._next = wanted, last
        if expected != (wanted, first) or last >= match.pages or match.dram_pages >= match.pages:
            return b""
        window = _WINDOW_BYTES // max(match.namespace.spec.part_bytes(wanted), 1)
        upto = min(last + max(min(_GROWTH * (last - first), window), 1), match.pages)
        return match.ids_of(last, upto, wanted)[: DIGEST_BYTES * _WINDOW_BLOBS]
