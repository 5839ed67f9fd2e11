"""Puts of a prefix, or of its end: pages one after the other, in commits from the front."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.api.wire import BadRequest, KVSpec, KVStoreError, MissingParent, NoSpace, PartRange
from kvstore.api.wire.put_messages import Committed, PutStart
from kvstore_client.convert import part_list
from kvstore_client.put import PUT_BYTES, PUT_PAGES, PutResult, commit_bytes, in_all, put_once
from kvstore_client.put_layout import PutLayout
from kvstore_client.scattered import laid_out
from kvstore_client.text import Given
from kvstore_client.tokens import Extras, with_extras
from kvstore_client.transfer import Progress
from kvstore_client.whole import Whole

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient


@dataclass(frozen=True, slots=True)
class PrefixPut:
    """The pages that are put, and where their bytes are. Labels, and the pages of extras, are those from page `start` on."""

    start: int
    labels: memoryview
    extras: Extras | None
    recipe: Given | None
    layout: PutLayout
    source: memoryview

    def part_of(self, message: PutStart, first: int, last: int) -> tuple[PutStart, bytes | memoryview] | None:
        """What one commit, of the pages [first, last), begins with; None if nothing of them is put."""
        ranges, spans = self.layout.between(first, last)
        if not ranges:
            return None
        before, total = self.layout.first_page, self.layout.total
        labels = self.labels if last == total else self.labels[: (last - self.start) * self.layout.spec.label_words * 4]
        extra_pages, payload = with_extras(labels, self.extras, last - self.start)
        recipes = self.recipe.of(first - before, last - before, total - before) if self.recipe is not None else []
        start = msgspec.structs.replace(
            message, first_page=first, parts=part_list(ranges), spans=spans, extra_pages=extra_pages, recipes=recipes,
            recipe_kind=self.recipe.kind if self.recipe is not None else "",
        )  # fmt: skip
        return start, payload


def prefix_put(
    spec: KVSpec, parts: tuple[PartRange, ...], labels: memoryview, start: int, first_page: int, data: Any,
    spans: tuple[tuple[int, int], ...] | None, extras: Extras | None, recipe: Given | None,
) -> PrefixPut:  # fmt: skip
    """How pages are put that come after `start` others. Raises BadRequest if bytes and pages don't go together."""
    if first_page < 0:
        raise BadRequest(f"a put from page {first_page} on")
    layout, source = laid_out(spec, parts, max(first_page, start), start + len(labels) // 4 // spec.label_words, spans, data)
    return PrefixPut(start, labels, extras, recipe, layout, source)


@contextmanager
def _saying_what_is_there(ack: str) -> Iterator[None]:
    try:
        yield
    except KVStoreError as error:
        if error.done_pages:
            error.message += f" (of the prefix the first {error.done_pages} pages are {'durable' if ack == 'durable' else 'there'})"
            error.args = (error.message,)
        raise


async def put_prefix(
    client: "AsyncClient", asked: PrefixPut, message: PutStart, whole: Whole, progress: Progress | None, timeout: float | None
) -> PutResult:
    """Put pages, one commit after the other. `message` says of all of them what is the same."""
    done: list[Committed] = []
    layout = asked.layout
    async with client.deadline(timeout):
        cut = list(layout.commits(PUT_PAGES, commit_bytes(client.pool, layout.spec, layout.parts, PUT_BYTES)))
        for first, last in cut:
            if (part := asked.part_of(message, first, last)) is None:
                continue
            try:
                with _saying_what_is_there(message.ack):
                    done.append(await put_once(client, *part, asked.source, layout, whole, progress, alone=len(cut) == 1))
            except MissingParent as error:
                if not done:
                    raise
                raise NoSpace(
                    f"the first {first - layout.first_page} pages of this put are gone again before it was whole: to make room, if nobody "
                    f"deleted them. Put it again when others need less, or give the daemon a larger --dram or --ssd ({error.message})"
                ) from error
    return in_all(done)
