"""Pages of a flat namespace, of which tests put several at once, in process: how they are named, put and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from kvstore.digests import page_key, slice_digest
from kvstore.errors import BadDigest
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store import Ack, NamespaceSettings, Put, PutRequest, PutResult, Space, Store

FULL, STATE = Component("full", 4, 2, 32), Component("state", 2, 2, 64, planes=1)
ONE = KVSpec(4, (FULL,), max_slice_bytes=4096, hash_bytes=16, flat=True)
TWO = KVSpec(4, (FULL, STATE), max_slice_bytes=4096, hash_bytes=16, flat=True)
EXTRA = bytes(range(32))
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@dataclass(frozen=True)
class Page:
    """What names a page: its digest, and perhaps extra keys."""

    number: int
    extra: bool = False

    @property
    def digest(self) -> bytes:
        return self.number.to_bytes(16, "big")


def pages_of(*numbers: int) -> tuple[Page, ...]:
    return tuple(Page(number) for number in numbers)


def key_of(space: Space, page: Page) -> bytes:
    return page_key(space.tree.root_key, page.digest + (EXTRA if page.extra else bytes(32)))


def labels(pages: Sequence[Page]) -> tuple[bytes, dict[int, bytes]]:
    return b"".join(page.digest for page in pages), {at: EXTRA for at, page in enumerate(pages) if page.extra}


def parts_of(spec: KVSpec, rank: int | None, with_state: bool = True) -> tuple[PartRange, ...]:
    """One rank's heads, `full` cut once more by layers; all of everything for None."""
    heads = (0, 2) if rank is None else (rank, rank + 1)
    full = (PartRange(0, 0, 3, *heads), PartRange(0, 3, 4, *heads))
    return (*full, PartRange(1, 0, 2, *heads)) if with_state and len(spec.components) > 1 else full


def data_of(spec: KVSpec, page: Page, version: bytes, part: PartRange) -> bytes:
    """What a computation gives for a part; some pages have the same bytes."""
    seed = blake2b(version + repr((page.number // 2 if page.number > 6 else page, part)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).bytes(spec.part_bytes(part))


async def begin(
    store: Store, space: Space, pages: Sequence[Page], version: bytes = A, rank: int | None = None, *, owner: int = 1,
    ack: Ack = Ack.MEMORY, with_state: bool = True,
) -> Put:  # fmt: skip
    tokens, extras = labels(pages)
    request = PutRequest(version, tokens, extras, 0, parts_of(space.spec, rank, with_state), ack)
    return await store.begin_put(owner, space, request)


def send(put: Put, pages: Sequence[Page], only: set[int] | None = None, bad: int = -1) -> None:
    """Send what is wanted (of `only` some pages); page `bad` with one byte wrong."""
    spec, ranges = put.space.spec, put.request.ranges
    for page, part in put.wanted_cells():
        if only is not None and page not in only:
            continue
        data = data_of(spec, pages[page], put.request.put_id, ranges[part])
        layout = spec.slice_layout(ranges[part])
        view, _ = put.locate(page, part, 0, len(data), layout.count)
        view[:] = data
        claimed = [slice_digest(data[at : at + size]) for at, size in zip(layout.offsets, layout.sizes, strict=False)]
        if page == bad:
            view[7] ^= 1
        arrived = [slice_digest(view[at : at + size]) for at, size in zip(layout.offsets, layout.sizes, strict=False)]
        try:
            put.received(page, part, 0, arrived, b"".join(claimed))
        except BadDigest as error:
            put.fail(error)  # as a connection does
            return


async def put_pages(
    store: Store, space: Space, pages: Sequence[Page], version: bytes = A, rank: int | None = None, **given: Any
) -> PutResult:
    put = await begin(store, space, pages, version, rank, **given)
    send(put, pages)
    return await store.commit_put(put)


def there(store: Store, space: Space, pages: Sequence[Page]) -> list[bool]:
    return [space.tree.pages.find_key(key_of(space, page)) >= 0 for page in pages]


async def read_page(store: Store, space: Space, page: Page) -> dict[PartRange, bytes]:
    """The parts of a page that is there, verified from wherever they are."""
    columns = space.tree.parts_of(np.array([space.tree.pages.find_key(key_of(space, page))], np.int32))
    found = {}
    for row, component, ranges in zip(columns.blob.tolist(), columns.component.tolist(), columns.ranges.tolist(), strict=True):
        part = PartRange(component, *ranges)
        held = await store.reading.hold(space, row)
        found[part] = bytes(held.view[: space.spec.part_bytes(part)])
        held.release()
    return found


def settings_of(spec: KVSpec, **changes: Any) -> NamespaceSettings:
    return NamespaceSettings(tenant="default", name="flat", fingerprint="model", spec=spec, **changes)
