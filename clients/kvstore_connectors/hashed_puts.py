"""Puts of pages that each stand alone, many at a time: what can't be stored is left out, and the rest gets there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore_client import BadDigest, KVStoreError, NoSpace, Scattered
from kvstore_client.namespace import Namespace
from kvstore_connectors.hashed_pages import labels

_BATCH_PAGES = 256
_BATCH_BYTES = 16 << 20
"""So many pages, and about so many bytes, go in one put: others go beside it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """For each page whether it is new in the store, None if it is not there; and why the first of those is not."""

    new: list[bool | None]
    error: KVStoreError | None = None


def batches(pages: int, page_bytes: int) -> Iterator[slice]:
    """How many pages are put, as the slices of each put."""
    each = min(max(_BATCH_BYTES // page_bytes, 1), _BATCH_PAGES)
    return (slice(first, min(first + each, pages)) for first in range(0, pages, each))


async def put_pages(
    namespace: Namespace, names: Sequence[bytes], data: Scattered, *, durable: bool, timeout: float | None = None
) -> Outcome:
    """Put pages of a flat namespace. A label that is named twice is put once, with the first page.

    One that does not fit, or changes while it is put, is left out: pages are tried apart until those are found. Raises the error if none
    got there, and what says nothing of single pages: Busy, ConnectionLost, DeadlineExceeded. `timeout` is that of each put.
    """
    first: dict[bytes, int] = {}
    for page, name in enumerate(names):
        first.setdefault(name, page)
    chosen = list(first.values())
    found = await _put(namespace, list(first), Scattered(data.memory, [data.places[page] for page in chosen]), durable, timeout)
    if found.error is not None and all(new is None for new in found.new):
        raise found.error
    if len(chosen) == len(names):
        return found
    place = {name: at for at, name in enumerate(first)}
    new = [found.new[place[name]] if first[name] == page or found.new[place[name]] is None else False for page, name in enumerate(names)]
    return Outcome(new, found.error)


async def _put(namespace: Namespace, names: list[bytes], data: Scattered, durable: bool, timeout: float | None) -> Outcome:
    try:
        done = await namespace.put(labels(names), data, durable=durable, timeout=timeout)
    except (NoSpace, BadDigest) as error:
        if len(names) == 1:
            return Outcome([None], error)
        half = len(names) // 2
        one = await _put(namespace, names[:half], data.pages(0, half), durable, timeout)
        other = await _put(namespace, names[half:], data.pages(half, len(names)), durable, timeout)
        return Outcome(one.new + other.new, one.error or other.error)
    old = {page for low, high in done.existing for page in range(low, high)}
    return Outcome([page not in old for page in range(len(names))])
