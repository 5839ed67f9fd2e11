"""The answer to a COMMIT that brings the digests of what was copied, or that waited: what can't fail any more is taken in behind it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.replies import Context, Reply
from kvstore.api.request_tables import SLOW
from kvstore.api.same_host import SameHostPeer
from kvstore.api.sessions import Session
from kvstore.api.wire.frames import FrameType
from kvstore.api.wire.put_messages import Commit, Committed
from kvstore.digests import slice_digest
from kvstore.errors import BadDigest
from kvstore.store import Ack, Put, PutRequest, Space, Store
from kvstore.store.checking.check import check
from tests.store.test_store import OWNER, PARTS, SPEC, Prefix, config, page_bytes, settings_named, tokens_of


@dataclass(slots=True)
class Asking:
    """Who asks, as far as a COMMIT looks."""

    store: Store
    session: Session
    endpoint: str = ""
    same_host: SameHostPeer | None = None
    number: int = 1


async def copied(store: Store, space: Space, prefix: Prefix, ack: Ack = Ack.MEMORY) -> tuple[Put, bytes]:
    """A put of which all was copied without digests, and those digests."""
    under_way = await store.begin_put(OWNER, space, PutRequest(b"v" * 16, tokens_of(prefix), {}, 0, PARTS, ack))
    digests = []
    for page, part in under_way.wanted_cells():
        data = page_bytes(prefix[: page + 1], b"v" * 16, part)
        sizes = SPEC.slice_layout(PARTS[part]).sizes
        under_way.expect(page, part, 0, len(sizes))
        view, _ = under_way.locate(page, part, 0, len(data), len(sizes))
        np.frombuffer(view, np.uint8)[:] = np.frombuffer(data, np.uint8)
        ends = np.cumsum(sizes).tolist()
        found = [slice_digest(view[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        under_way.received(page, part, 0, found, None)
        digests += found
    return under_way, b"".join(digests)


async def committed(context: Context, put: Put, digests: bytes) -> Reply:
    reply = await SLOW[FrameType.COMMIT][1](context, Commit(handle=put.handle, wait_ms=1000), digests)
    assert reply is not None
    return reply


@pytest.fixture
def session() -> Session:
    return Session(b"s" * 16, OWNER, "default", "test")


async def test_what_can_not_fail_is_answered_and_then_taken_in(tmp_path: Path, session: Session) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        put, digests = await copied(store, space, (1, 2, 3))
        reply = await committed(Asking(store, session), put, digests)
        assert reply.message == Committed(new_pages=3, existing_pages=0)
        assert reply.after is not None
        assert not space.tree.page_count, "the answer was to come first"
        reply.after()
        assert space.tree.match(tokens_of((1, 2, 3))).pages == 3
        check(store)


async def test_what_is_to_be_durable_is_answered_when_it_is(tmp_path: Path, session: Session) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        put, digests = await copied(store, space, (1, 2), Ack.DURABLE)
        reply = await committed(Asking(store, session), put, digests)
        assert reply.after is None
        assert space.tree.match(tokens_of((1, 2))).pages == 2
        check(store)


async def test_what_does_not_verify_is_nowhere(tmp_path: Path, session: Session) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        put, digests = await copied(store, space, (1, 2))
        with pytest.raises(BadDigest):
            await committed(Asking(store, session), put, bytes(16) + digests[16:])
        assert not space.tree.page_count
        assert put.closed
        check(store)
