"""Puts of many pages of a flat namespace to a real daemon: over TCP and through shared memory, cut short, and spoilt."""

import asyncio
import secrets
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import FrameType, encode, pack, slice_digest, unpack
from kvstore.api.wire.frames import SLICES_META, encode_bulk
from kvstore.api.wire.messages import ErrorReply
from kvstore.api.wire.put_messages import Commit, Committed, PutReady, PutStart
from kvstore_client import AsyncClient, BadRequest, Client, Component, KVSpec, NoSpace, PartRange, PutResult, Scattered
from kvstore_client.put_flat import FLAT_BYTES, FLAT_PAGES
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import RawClient, stat, wait_for_baseline

SMALL = KVSpec(4, (Component("full", 2, 2, 8),), hash_bytes=16, flat=True)
LARGE = KVSpec(4, (Component("full", 2, 2, 16384),), max_slice_bytes=1 << 18, hash_bytes=16, flat=True, group_layers=1)
"""Pages of 1 MiB, in slices of 256 KiB."""


def digests(numbers: "list[int] | range") -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def data_of(spec: KVSpec, pages: int, seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, (pages, spec.page_bytes), dtype=np.uint8)


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("connections", [1, 3])
async def test_pages_come_in_any_order_in_few_commits(either_daemon: DaemonProcess, spec: KVSpec, connections: int) -> None:
    pages = FLAT_PAGES + 44 if spec is SMALL else (FLAT_BYTES >> 20) + 3
    names, data = digests(range(pages)), data_of(spec, pages, 1)
    order = np.random.default_rng(2).permutation(pages)
    async with AsyncClient(either_daemon.endpoint, timeout=20, connections=connections) as client:
        namespace = await client.namespace(f"order-{connections}-{spec.page_bytes}", f"rev {connections}", spec)
        await namespace.put(b"".join(names[3:5]), data[3:5])
        before = stat(either_daemon.http)["totals"]["puts"]
        done = await namespace.put(b"".join(names[page] for page in order), data[order])
        assert done == PutResult(pages - 2, 2, 0)
        assert {page for low, high in done.existing for page in order[low:high].tolist()} == {3, 4}
        assert stat(either_daemon.http)["totals"]["puts"] == before + 2
        out = np.zeros_like(data)
        async with await namespace.match(b"".join(names)) as match:
            assert match.pages == pages
            await namespace.fetch(match, out)
        assert np.array_equal(out, data)
        again = await namespace.put(b"".join(names), data, durable=True)
        assert (again, again.existing) == (PutResult(0, pages, 0), ((0, pages),))
        await namespace.drop()


async def test_pages_lie_anywhere_and_parts_come_from_shards(either_daemon: DaemonProcess) -> None:
    rank = [PartRange(0, 0, 2, head, head + 1) for head in range(2)]
    async with AsyncClient(either_daemon.endpoint, timeout=20) as one, AsyncClient(either_daemon.endpoint, timeout=20) as two:
        spaces = [await client.namespace("shards", "rev shards", LARGE) for client in (one, two)]
        names, pages, put_id = digests(range(20)), 20, secrets.token_bytes(16)
        size, row = LARGE.part_bytes(rank[0]), LARGE.part_bytes(rank[0]) // 2
        memory = np.random.default_rng(5).integers(0, 256, (2, pages * size), dtype=np.uint8)
        places = [[(page * 2 + layer) * row for layer in range(2)] for page in np.random.default_rng(6).permutation(pages).tolist()]

        async def put(number: int, upto: int) -> PutResult:
            data, shard = Scattered(memory[number].data, places[:upto]), (rank[number],)
            return await spaces[number].put(b"".join(names[:upto]), data, parts=shard, put_id=put_id, whole_s=5 * number)

        assert await put(0, pages) == PutResult(0, 0, pages)
        assert await put(1, pages - 3) == PutResult(pages - 3, 0, 0)
        for number in range(2):
            out = np.zeros((pages - 3, 2, row), np.uint8)
            async with await spaces[number].match(b"".join(names)) as match:
                assert match.pages == pages - 3
                await spaces[number].fetch(match, out, wanted=rank[number])
            assert all(np.array_equal(out[p, r], memory[number][places[p][r] :][:row]) for p in range(pages - 3) for r in range(2))
        await spaces[0].drop()


def test_extras_spans_and_the_blocking_client(either_daemon: DaemonProcess) -> None:
    spec = KVSpec(4, (Component("full", 2, 2, 8), Component("state", 1, 1, 64, planes=1)), hash_bytes=16, flat=True)
    parts, pages = (spec.whole(0), spec.whole(1)), FLAT_PAGES + 10
    with Client(either_daemon.endpoint, timeout=20) as client:
        namespace = client.namespace("spans", "rev spans", spec)
        names, extras = (
            digests([*range(pages // 2), *range(pages // 2)]),
            {page: bytes([1 + page % 200]) * 32 for page in range(pages // 2, pages)},
        )
        full, state = (
            np.random.default_rng(n).integers(0, 256, (pages, spec.part_bytes(part)), dtype=np.uint8) for n, part in enumerate(parts)
        )
        spans = ((0, pages), (FLAT_PAGES - 6, pages - 5))
        carried = b"".join(full[p].tobytes() + (state[p].tobytes() if spans[1][0] <= p < spans[1][1] else b"") for p in range(pages))
        assert namespace.put(b"".join(names), carried, parts=parts, spans=spans, extras=extras) == PutResult(pages, 0, 0)
        for page in (0, FLAT_PAGES - 7, FLAT_PAGES - 6, FLAT_PAGES, pages - 6, pages - 5, pages - 1):
            own = {0: extras[page]} if page in extras else None
            with namespace.match(names[page], extras=own) as match:
                assert match.known_pages == 1
                assert match.pages == (spans[1][0] <= page < spans[1][1]), f"page {page}"
                if match.pages:
                    out = [np.zeros(spec.part_bytes(part), np.uint8) for part in parts]
                    for part, target in zip(parts, out, strict=True):
                        namespace.fetch(match, target, wanted=part)
                    assert np.array_equal(out[0], full[page])
                    assert np.array_equal(out[1], state[page])
        namespace.drop()


async def test_what_can_not_be_a_put(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("nonsense", "rev nonsense", SMALL)
        names, data = digests(range(600)), data_of(SMALL, 600, 3)
        with pytest.raises(BadRequest, match="pages 5 and 599 of the put are the same"):
            await namespace.put(b"".join([*names[:599], names[5]]), data)
        with pytest.raises(BadRequest, match="bytes of data"):
            await namespace.put(b"".join(names), data[:-1])
        for torn in (b"", names[0][:-1], b"".join(names[:2]) + b"x"):
            with pytest.raises(BadRequest, match="digests"):
                await namespace.put(torn, data[:1])
        with pytest.raises(BadRequest, match="stands alone"):
            await namespace.put(b"".join(names[:2]), data[:1], first_page=1)
        assert (await namespace.match(b"".join(names), lease_s=0, holes=True)).there() == []


async def test_a_put_that_does_not_fit_leaves_what_came_before(tmp_path: Path) -> None:
    """What was promised fills the disk after some of the commits."""
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "64MiB") as own:
        async with AsyncClient(own.endpoint, timeout=20) as client:
            namespace = await client.namespace("too-much", "rev too much", LARGE)
            pages = 6 * (FLAT_BYTES >> 20)
            names, data = digests(range(pages)), data_of(LARGE, pages, 4)
            with pytest.raises(NoSpace):
                await namespace.put(b"".join(names), data, durable=True)
            async with await namespace.match(b"".join(names), holes=True) as match:
                found = match.there()
                assert found == list(range(len(found)))
                assert FLAT_BYTES >> 20 <= len(found) < pages
                assert len(found) % (FLAT_BYTES >> 20) == 0, "a part of a commit is there"
                out = np.zeros_like(data[: len(found)])
                await namespace.fetch(match, out)
            assert np.array_equal(out, data[: len(found)])


# --- as the SDK never would --------------------------------------------------------------------------------------------


class Raw(RawClient):
    """Puts by hand to the namespace `raw` of small pages."""

    def __enter__(self) -> "Raw":
        return self

    def put(self, names: list[bytes]) -> PutReady:
        header, meta, _ = self.ask(FrameType.PUT, self.start(), b"".join(names))
        assert header.type is FrameType.PUT_READY, unpack(ErrorReply, meta)
        return unpack(PutReady, meta)

    @staticmethod
    def start(handle: int = 0) -> PutStart:
        return PutStart(namespace=RAW_ID[0], put_id=secrets.token_bytes(16), first_page=0, parts=[(0, 0, 2, 0, 2)], handle=handle)


RAW_ID: list[str] = [""]


def slices(handle: int, page: int, data: bytes, digest: bytes | None = None) -> bytes:
    head = encode_bulk(FrameType.SLICES, 5, SLICES_META.pack(handle, page, 0, 0), len(data), 1)
    return head + data + (digest or slice_digest(data))


@pytest.fixture
def raw_names(daemon: DaemonProcess) -> list[bytes]:
    with Client(daemon.endpoint, connections=1) as client:
        RAW_ID[0] = client.namespace("raw", "rev raw", SMALL).id
    return [secrets.token_bytes(16) for _ in range(40)]


def there(daemon: DaemonProcess, names: list[bytes]) -> list[int]:
    with Client(daemon.endpoint, connections=1) as client:
        return client.namespace("raw").match(b"".join(names), holes=True, lease_s=0).inner.there()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("bad", [0, 17, 39])
def test_one_bad_digest_among_many_is_named_and_leaves_nothing(
    daemon: DaemonProcess, raw_names: list[bytes], bad: int, at_once: bool
) -> None:
    data = data_of(SMALL, len(raw_names), 7)
    with Raw(daemon.endpoint) as raw:
        if at_once:
            handle = secrets.randbits(62) + 1
            raw.send(FrameType.PUT, 1, raw.start(handle), b"".join(raw_names))
        else:
            handle = raw.put(raw_names).handle
        frames = [slices(handle, page, data[page].tobytes(), b"x" * 16 if page == bad else None) for page in range(len(raw_names))]
        raw.send_raw(b"".join(frames) + b"".join(bytes(b) for b in encode(FrameType.COMMIT, 9, pack(Commit(handle=handle, wait_ms=1000)))))
        request = 0
        while request != 9:  # some come early, for slices
            header, meta, _ = raw.receive()
            request, error = header.request, unpack(ErrorReply, meta)
            assert (header.type, error.code) == (FrameType.ERROR, "bad_digest")
            assert error.message.startswith(f"page {bad}, part 0")
    assert there(daemon, raw_names) == []
    with Raw(daemon.endpoint) as raw:
        handle = raw.put(raw_names).handle
        raw.send_raw(b"".join(slices(handle, page, data[page].tobytes()) for page in reversed(range(len(raw_names)))))
        done = unpack(Committed, raw.ask(FrameType.COMMIT, Commit(handle=handle, wait_ms=5000))[1])
        assert (done.new_pages, done.existing) == (len(raw_names), [])
        assert there(daemon, raw_names) == list(range(len(raw_names)))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_client_that_dies_in_the_middle_leaves_nothing(daemon: DaemonProcess, raw_names: list[bytes], at_once: bool) -> None:
    data, used = data_of(SMALL, len(raw_names), 8), wait_for_baseline(daemon.http)
    with Raw(daemon.endpoint) as raw:
        handle = secrets.randbits(62) + 1
        if at_once:
            raw.send(FrameType.PUT, 1, raw.start(handle), b"".join(raw_names))
        else:
            handle = raw.put(raw_names).handle
        raw.send_raw(b"".join(slices(handle, page, data[page].tobytes()) for page in range(20)) + slices(handle, 20, bytes(96))[:60])
        if not at_once:
            assert stat(daemon.http)["puts_open"] == 1
    wait_for_baseline(daemon.http, used)
    assert there(daemon, raw_names) == []


def test_the_daemon_refuses_a_page_named_twice_and_too_many(daemon: DaemonProcess, raw_names: list[bytes]) -> None:
    with Raw(daemon.endpoint) as raw:
        for names, words in (([*raw_names, raw_names[3]], "pages 3 and 40"), ([secrets.token_bytes(16) for _ in range(257)], "1 to 256")):
            raw.send(FrameType.PUT, 1, raw.start(), b"".join(names))
            error = raw.error()
            assert error.code == "bad_request"
            assert words in error.message
        assert raw.alive()
    assert stat(daemon.http)["puts_open"] == 0


async def test_durable_pages_are_there_after_a_kill(tmp_path: Path) -> None:
    names, data = digests(range(70)), data_of(SMALL, 70, 9)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("kept", "rev kept", SMALL)
            puts = [namespace.put(b"".join(names[n : n + 20]), data[n : n + 20], durable=True) for n in range(0, 60, 10)]
            assert sum(done.new_pages for done in await asyncio.gather(*puts)) == 70
        daemon.kill()
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("kept")
            out = np.zeros_like(data)
            async with await namespace.match(b"".join(names)) as match:
                assert match.pages == 70
                await namespace.fetch(match, out)
            assert np.array_equal(out, data)


async def test_a_session_goes_on_in_a_flat_namespace(either_daemon: DaemonProcess) -> None:
    names, data = digests(range(12)), data_of(SMALL, 12, 7)
    async with AsyncClient(either_daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("flat-session", "rev", SMALL)
        await namespace.put(b"".join(names[:3]), data[:3])
        async with namespace.session() as session:
            assert await session.extend(names[:2]) == 2
            assert await session.extend(b"".join(names[2:6])) == 3
            assert await session.put(data[3:6]) == PutResult(3, 0)
            assert session.pages == 6
            assert await session.extend(names[6:8]) == 6
            assert await session.put(data[6:8], durable=True) == PutResult(2, 0)
            out = np.zeros_like(data[:8])
            await session.fetch(out)
            assert np.array_equal(out, data[:8])
            await namespace.delete(b"".join(names[9:]))
            assert await session.abandon(from_page=5) == 3
            assert await session.extend(names[8:9]) == 5, "of what is after a missing page nothing counts"
        await namespace.drop()
    wait_for_baseline(either_daemon.http)
