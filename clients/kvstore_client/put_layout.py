"""Where the parts of a put lie in the caller's buffer, and how they are cut into commits and frames. Pure."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import MAX_BULK_PAYLOAD, BadRequest, KVSpec, PartRange


@dataclass(frozen=True, slots=True)
class SliceFrame:
    """Consecutive slices of one part of one page, each as (offset, size) in the caller's buffer."""

    page: int
    part: int
    first_slice: int
    slices: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(size for _, size in self.slices)


class Wanted:
    """What a daemon wants of a put: (part, first page, last page) of each run, pages half-open."""

    def __init__(self, runs: Iterable[tuple[int, int, int]]) -> None:
        self._runs = list(runs)

    def has(self, frame: SliceFrame) -> bool:
        """Whether a frame is of a part that is wanted."""
        return any(part == frame.part and first <= frame.page < last for part, first, last in self._runs)


class PutLayout:
    """Pages [first, total), each as those of its parts that it carries, in order, one after the other in one buffer."""

    def __init__(
        self, spec: KVSpec, parts: tuple[PartRange, ...], first_page: int, total: int, spans: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        if spans is not None and len(spans) != len(parts):
            raise BadRequest(f"{len(spans)} page spans for {len(parts)} parts")
        if not 0 <= first_page < total:
            raise BadRequest(f"there is no page to put: it begins at page {first_page}, and the prefix has {total} whole pages")
        for part in parts:
            spec.check_range(part)
        self.spec = spec
        self.parts = parts
        self.first_page = first_page
        self.total = total
        self.spans = spans or ((first_page, total),) * len(parts)
        sizes = [spec.part_bytes(p) for p in parts]
        self._page_bytes = sum(sizes)
        """Bytes of a page that carries all parts."""
        self._offsets = list(accumulate(sizes, initial=0))
        self._starts: npt.NDArray[np.int64] | None = None
        """(pages, parts): where each lies, if not every page is like the first."""
        self._page_ends: npt.NDArray[np.int64]
        if spans is not None:
            pages, bounds = np.arange(first_page, total)[:, np.newaxis], np.array(spans).reshape(-1, 2)
            carried = ((pages >= bounds[:, 0]) & (pages < bounds[:, 1])) * np.array(sizes, np.int64)
            ends = carried.cumsum().reshape(carried.shape)
            self._starts, self._page_ends = ends - carried, ends[:, -1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return (self.total - self.first_page) * self._page_bytes if self._starts is None else int(self._page_ends[-1])

    def commits(self, max_pages: int, max_bytes: int) -> Iterator[tuple[int, int]]:
        """The pages [first, last) of each commit, of at most so many pages and about so many bytes."""
        first, pages = 0, self.total - self.first_page
        while first < pages:
            if self._starts is None:
                last = first + max_bytes // self._page_bytes
            else:
                before = int(self._page_ends[first - 1]) if first else 0
                last = int(np.searchsorted(self._page_ends, before + max_bytes, side="right"))
            last = min(max(last, first + 1), first + max_pages, pages)
            yield self.first_page + first, self.first_page + last
            first = last

    def between(self, first: int, last: int) -> tuple[list[PartRange], list[tuple[int, int]]]:
        """The parts that the pages [first, last) carry, and on which of them; no spans if all carry all of these parts."""
        clipped = [(part, max(lo, first), min(hi, last)) for part, (lo, hi) in zip(self.parts, self.spans, strict=True)]
        found = [(part, (lo, hi)) for part, lo, hi in clipped if lo < hi]
        spans = [span for _, span in found]
        return [part for part, _ in found], [] if spans == [(first, last)] * len(spans) else spans

    def frames(self, wanted: list[tuple[int, int, int]], parts: list[PartRange], max_bytes: int = MAX_BULK_PAYLOAD) -> list[SliceFrame]:
        """What to send, page after page: `wanted` names (index into `parts`, first page, last page)."""
        cells = [(page, part) for part, first, last in wanted for page in range(first, last)]
        return [frame for page, part in sorted(cells) for frame in self._frames_of(page, part, parts[part], max_bytes)]

    def _start(self, row: int, part: int) -> int:
        return row * self._page_bytes + self._offsets[part] if self._starts is None else int(self._starts[row, part])

    def _frames_of(self, page: int, part: int, part_range: PartRange, max_bytes: int) -> Iterator[SliceFrame]:
        at = self._start(page - self.first_page, self.parts.index(part_range))
        group: list[tuple[int, int]] = []
        first, size = 0, 0
        for index, slice_bytes in enumerate(self.spec.slice_layout(part_range).sizes):
            if group and size + slice_bytes > max_bytes:
                yield SliceFrame(page, part, first, tuple(group))
                group, first, size = [], index, 0
            group.append((at, slice_bytes))
            at, size = at + slice_bytes, size + slice_bytes
        yield SliceFrame(page, part, first, tuple(group))


def by_default(
    spec: KVSpec, parts: tuple[PartRange, ...] | None, put_id: bytes | None, *, wrapped: int = 0
) -> tuple[PartRange, ...] | None:  # fmt: skip
    """The parts of a put: component 0, if none are named. Warns of pages that nothing can use: without a put id, and others left out.

    The warning is about the line that calls the caller of this, with so many frames of ours between.
    """
    if parts is not None or put_id is not None:
        return parts
    if len(spec.components) > 1:
        rest = ", ".join(f"{n} ({c.kind})" for n, c in enumerate(spec.components) if n)
        every = ", ".join(f"spec.whole({n})" for n in range(len(spec.components)))
        warnings.warn(
            f"without `parts` a put is of component 0 only: a prefix is usable once component {rest} is there too, where its boundary "
            f"needs it. Put them together with parts=({every}), or name what you put: parts=(spec.whole(0),)",
            stacklevel=3 + wrapped,
        )
    return (spec.whole(),)


def check_alone(spec: KVSpec, parts: tuple[PartRange, ...]) -> None:
    """Raise BadRequest for a put that only others could complete: it has no put id."""
    for number in {part.component for part in parts}:
        spec.check_component(number)
        c = spec.components[number]
        mine = [part for part in parts if part.component == number]
        if sum((p.layer_hi - p.layer_lo) * (p.head_hi - p.head_lo) for p in mine) < c.layers * c.kv_heads:
            what = "; ".join(f"layers [{p.layer_lo}, {p.layer_hi}), heads [{p.head_lo}, {p.head_hi})" for p in mine)
            raise BadRequest(
                f"this put is of {what} of component {number}, which has {c.layers} layers and {c.kv_heads} heads: the rest comes from "
                "other shards, and only under the same put_id. Give one, or put all layers and heads at once"
            )
