"""Pages that don't lie in one piece: their layers are put from, and fetched into, wherever an engine keeps them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.api.wire import BadRequest, KVSpec, PartRange
from kvstore_client.arguments import readable, wrong
from kvstore_client.blocks import Block
from kvstore_client.put_layout import PutLayout, SliceFrame

if TYPE_CHECKING:
    from kvstore_client.match import Match


@dataclass(frozen=True, slots=True)
class Scattered:
    """Where pages lie: page `p` of the call begins its row `r` at byte `places[p][r]` of `memory`.

    All pages have as many rows, and a row holds the next layers of the part: all of them if there is one row, one if there are as many
    rows as layers. Put or fetch one part at a time so, in place of a buffer. Rows must not overlap.
    """

    memory: memoryview
    places: Sequence[Sequence[int]]

    def pages(self, first: int, last: int) -> "Scattered":
        """Some of the pages."""
        return Scattered(self.memory, self.places[first:last])

    def rows(self, part: PartRange, pages: int) -> list[PartRange]:
        """The layers of each row. Raises BadRequest if they do not come out even."""
        try:
            counts, layers = {len(page) for page in self.places}, part.layer_hi - part.layer_lo
        except TypeError:
            raise self._wrong() from None
        if len(self.places) != pages or len(counts) != 1 or layers % max(count := counts.pop(), 1) or not count:
            raise BadRequest(f"{len(self.places)} pages in rows of {layers} layers for {pages} pages: they must all have as many rows")
        each = layers // count
        return [PartRange(part.component, low, low + each, part.head_lo, part.head_hi) for low in range(part.layer_lo, part.layer_hi, each)]

    def check(self, row_bytes: int) -> None:
        """Raise BadRequest if a row lies outside the memory."""
        nbytes = len(self.readable())
        end = nbytes - row_bytes
        try:
            outside = any(min(page) < 0 or max(page) > end for page in self.places)
        except TypeError:
            raise self._wrong() from None
        if outside:
            raise BadRequest(f"a row of {row_bytes} bytes lies outside the memory of {nbytes}")

    def readable(self) -> memoryview:
        """The memory, byte by byte. Raises BadRequest if it is none, or does not lie in one piece."""
        return readable(self.memory, "the memory of scattered pages")

    def writable(self) -> memoryview:
        """As `readable`, to fetch into."""
        memory = self.readable()
        if memory.readonly:
            raise BadRequest("the memory of scattered pages is read-only: it can't be fetched into")
        return memory

    def _wrong(self) -> BadRequest:
        return wrong("places", self.places, "a list of byte offsets for each page")

    def blocks(self, match: "Match", first: int, last: int, wanted: PartRange) -> list[Block]:
        """What to fetch of the pages [first, last), each with its place in `memory`. Raises NotFound and BadRequest."""
        rows = self.rows(wanted, last - first)
        self.check(match.namespace.spec.part_bytes(rows[0]))
        size = match.namespace.spec.part_bytes(wanted)
        found = match.blocks(first, last, wanted, rows)
        return [block._replace(targets=[self.places[target // size][block.group] for target in block.targets], group=0) for block in found]


class ScatteredLayout(PutLayout):
    """The layout of a put of one part whose rows lie anywhere."""

    def __init__(
        self, spec: KVSpec, part: PartRange, first_page: int, total: int, spans: tuple[tuple[int, int], ...] | None, data: Scattered
    ) -> None:
        super().__init__(spec, (part,), first_page, total, spans)
        self._carried = self.spans[0]
        self._rows = len(data.rows(part, self._carried[1] - self._carried[0]))
        self._row_bytes = spec.part_bytes(part) // self._rows
        self._places = data.places
        data.check(self._row_bytes)
        offsets = spec.slice_layout(part).offsets
        if any(row * self._row_bytes not in offsets for row in range(self._rows)):
            raise BadRequest("slices go across rows: give the spec a group_layers that divides the layers of a row")

    def _frames_of(self, page: int, part: int, part_range: PartRange, max_bytes: int) -> Iterator[SliceFrame]:
        places, at = self._places[page - self._carried[0]], 0
        group: list[tuple[int, int]] = []
        first, size = 0, 0
        for index, slice_bytes in enumerate(self.spec.slice_layout(part_range).sizes):
            row, inside = divmod(at, self._row_bytes)
            start = places[row] + inside
            if group and (size + slice_bytes > max_bytes or start != group[-1][0] + group[-1][1]):  # a frame is one piece of memory
                yield SliceFrame(page, part, first, tuple(group))
                group, first, size = [], index, 0
            group.append((start, slice_bytes))
            at, size = at + slice_bytes, size + slice_bytes
        yield SliceFrame(page, part, first, tuple(group))


def laid_out(
    spec: KVSpec, parts: tuple[PartRange, ...], first_page: int, total: int, spans: tuple[tuple[int, int], ...] | None, data: Any
) -> tuple[PutLayout, memoryview]:
    """How the pages [first_page, total) of a put lie in the caller's memory, and that memory. Raises BadRequest if they don't."""
    if isinstance(data, Scattered):
        if len(parts) != 1:
            raise BadRequest(f"{len(parts)} parts of scattered pages: put them one part at a time")
        return ScatteredLayout(spec, parts[0], first_page, total, spans, data), data.readable()
    layout, source = PutLayout(spec, parts, first_page, total, spans), readable(data)
    if len(source) != layout.nbytes:
        raise BadRequest(f"{len(source)} bytes of data for {total - first_page} pages of {layout.nbytes} in all")
    return layout, source
