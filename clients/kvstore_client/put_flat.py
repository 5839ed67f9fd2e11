"""Puts to flat namespaces: many pages that each stand alone, in few commits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.api.wire import BadRequest, KVSpec, PartRange
from kvstore.api.wire.put_messages import Committed, PutStart
from kvstore_client.convert import part_list
from kvstore_client.lists import LIST_PAGES, HowFar
from kvstore_client.pool import Pool
from kvstore_client.put import PutResult, commit_bytes, in_all, put_once
from kvstore_client.put_layout import PutLayout
from kvstore_client.scattered import Scattered, laid_out
from kvstore_client.tokens import Extras, with_extras
from kvstore_client.transfer import Progress
from kvstore_client.whole import Whole

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

FLAT_PAGES = LIST_PAGES
FLAT_PARTS = 4096
FLAT_BYTES = 16 << 20
"""A put is sent in commits of about so many bytes: enough that the journeys count for little, and room for it is soon found."""
_NO_EXTRA = bytes(32)


@dataclass(frozen=True, slots=True)
class FlatCommit:
    """One commit: the pages of the call from `first` on, which count from 0 in it, and where its bytes are."""

    first: int
    labels: memoryview
    extras: Extras
    layout: PutLayout
    source: memoryview

    @property
    def last(self) -> int:
        """The end of its pages."""
        return self.first + self.layout.total


def flat_commits(
    pool: Pool, spec: KVSpec, parts: tuple[PartRange, ...], labels: memoryview, data: Any, spans: tuple[tuple[int, int], ...] | None,
    extras: Extras | None,
) -> list[FlatCommit]:  # fmt: skip
    """How pages are put. Raises BadRequest if bytes and pages don't go together, or a page is named twice."""
    width = spec.hash_bytes
    pages, torn = divmod(len(labels), width)
    if torn or not pages:
        raise BadRequest(f"{len(labels)} bytes of digests: give some of {width} bytes each")
    _check_distinct(labels, width, extras or {})
    whole, source = laid_out(spec, parts, 0, pages, spans, data)
    return list(_commits(whole, labels, extras or {}, data, source, commit_bytes(pool, spec, parts, FLAT_BYTES)))


def _commits(whole: PutLayout, labels: memoryview, extras: Extras, data: Any, source: memoryview, most: int) -> Iterator[FlatCommit]:
    spec, width, at = whole.spec, whole.spec.hash_bytes, 0
    for first, last in whole.commits(max(1, min(FLAT_PAGES, FLAT_PARTS // len(whole.parts))), most):
        ranges, its_spans = whole.between(first, last)
        if not ranges:
            continue
        spans = tuple((low - first, high - first) for low, high in its_spans) or None
        its: Any
        if isinstance(data, Scattered):
            low, high = whole.spans[0]
            its = data.pages(max(first, low) - low, min(last, high) - low)
        else:
            nbytes = PutLayout(spec, tuple(ranges), 0, last - first, spans).nbytes
            its, at = source[at : at + nbytes], at + nbytes
        layout, memory = laid_out(spec, tuple(ranges), 0, last - first, spans, its)
        mine = {page - first: extra for page, extra in extras.items() if first <= page < last}
        yield FlatCommit(first, labels[first * width : last * width], mine, layout, memory)


def _check_distinct(labels: memoryview, width: int, extras: Extras) -> None:
    """The daemon sees only what is in one commit."""
    raw, first = bytes(labels), dict[bytes, int]()
    for page in range(len(raw) // width):
        label = raw[page * width : (page + 1) * width] + extras.get(page, _NO_EXTRA)
        if (other := first.setdefault(label, page)) != page:
            raise BadRequest(f"pages {other} and {page} of the put are the same: name each page once")


async def put_flat(
    client: "AsyncClient", commits: list[FlatCommit], message: PutStart, whole: Whole, progress: Progress | None, timeout: float | None
) -> PutResult:
    """Put pages that stand alone, one commit after the other. `message` says of all of them what is the same."""
    done: list[Committed] = []
    existing: list[tuple[int, int]] = []
    with HowFar() as far:
        async with client.deadline(timeout):
            for commit in far.through(commits):
                ranges, spans = commit.layout.between(0, commit.layout.total)
                extra_pages, payload = with_extras(commit.labels, commit.extras)
                start = msgspec.structs.replace(message, parts=part_list(ranges), spans=spans, extra_pages=extra_pages)
                done.append(await put_once(client, start, payload, commit.source, commit.layout, whole, progress))
                existing += [(first + commit.first, last + commit.first) for first, last in done[-1].existing]
    return replace(in_all(done), existing=_joined(existing))


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Half-open runs in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, last in runs:
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, last))
    return tuple(found)
