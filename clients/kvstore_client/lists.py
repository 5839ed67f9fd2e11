"""Lists of pages that each stand alone: a long one travels in pieces, one after the other, and an error says how far it got."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstore.api.wire import KVSpec, KVStoreError
from kvstore_client.tokens import Extras, with_extras

LIST_PAGES = 256
"""The most that a daemon takes at once."""


class OfList(Protocol):
    """Pages [first, last) of a list."""

    @property
    def first(self) -> int: ...  # noqa: D102
    @property
    def last(self) -> int: ...  # noqa: D102


P = TypeVar("P", bound=OfList)


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [first, last) of a list, or a prefix that is no list, as a request carries them; `first_page` counts in the piece."""

    first: int
    last: int
    first_page: int
    last_page: int
    extra_pages: list[int]
    payload: bytes | memoryview


def pieces(spec: KVSpec, labels: memoryview, extras: Extras | None, first: int = 0, last: int = -1) -> list[Piece]:
    """What is told of the pages [first, last) of a list, or of a prefix (to the end for -1); several only for a long list."""
    width = spec.hash_bytes
    pages = len(labels) // width if spec.flat else 0
    if pages <= LIST_PAGES:
        return [Piece(0, pages, first, last, *with_extras(labels, extras))]
    end = pages if last < 0 else min(last, pages)
    first = max(first, 0)
    starts = range(first, end, LIST_PAGES) if first < end else (end,)  # of nothing the daemon is asked, too
    found = []
    for low in starts:
        high = min(low + LIST_PAGES, end)
        own = {page - low: extra for page, extra in (extras or {}).items() if low <= page < high}
        found.append(Piece(low, high, 0, -1, *with_extras(labels[low * width : high * width], own)))
    return found


class HowFar:
    """`with HowFar() as far`, and `for piece in far.through(pieces)`: an error that ends the block says how far it got."""

    def __init__(self) -> None:
        self._all: Sequence[OfList] = ()
        self._now: OfList | None = None

    def __enter__(self) -> "HowFar":
        return self

    def through(self, cut: Sequence[P]) -> Iterator[P]:
        """The pieces, each of which is done when the next is asked for."""
        self._all = cut
        for piece in cut:
            self._now = piece
            yield piece
        self._now = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, KVStoreError) or (now := self._now) is None:
            return
        error.done_pages += now.first
        done = f"the first {error.done_pages} of the list are done" if error.done_pages else "none are done"
        if len(self._all) > 1:
            error.message += f" (about pages {now.first} to {now.last - 1} of the list, which count from 0 in this: {done})"
        elif error.done_pages:
            error.message += f" ({done})"
        error.args = (error.message,)
