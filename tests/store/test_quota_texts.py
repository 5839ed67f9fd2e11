"""Who meets a quota is told which one, how large it is, and what to do; others are told nothing of it."""

from pathlib import Path

import pytest

from kvstore.errors import Busy, NoSpace
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.quotas import Quota, Quotas
from tests.store.test_store import OWNER, PARTS, SPEC, config, put, tokens_of

KEPT = {"rebuild": "never"}
"""Pages that may not be discarded: they have to go to SSD."""
DRAM, SSD = 60_000, 60_000


async def space_of(store: Store, tenant: str, **changes: object) -> Space:
    return await store.create_namespace(NamespaceSettings(tenant, "n", "model", SPEC, **changes))  # type: ignore[arg-type]


async def fill(store: Store, space: Space, first: int = 0) -> None:
    for number in range(first, first + 200):
        await put(store, space, (number,), b"v" * 16)


async def test_dram_that_the_ssd_quota_lets_nobody_leave(tmp_path: Path) -> None:
    async with Store(config(tmp_path, quotas={"alice": Quota(dram=DRAM, ssd=SSD)})) as store:
        hers = await space_of(store, "alice", **KEPT)
        with pytest.raises(NoSpace) as told:
            await fill(store, hers)
        assert f"quota of {DRAM} bytes in DRAM (`dram` of alice)" in told.value.message
        assert f"is full: what is there may not be discarded, and the quota of {SSD} bytes on SSD (`ssd` of alice)" in told.value.message
        assert told.value.message.endswith("is full, and what is there may not be discarded")
        assert store.figures.usage()["dram"].used <= DRAM
        his = await space_of(store, "bob")
        await put(store, his, (0,), b"v" * 16)
        leases = []
        with pytest.raises((Busy, NoSpace), match="no DRAM free") as his_told:  # noqa: PT012 - until all of DRAM is leased
            for number in range(1, 200):
                await put(store, his, (number,), b"v" * 16)
                leases.append(store.match(his, tokens_of((number,)), {}, owner=OWNER, lease_s=60).lease)
        assert "alice" not in his_told.value.message
        assert "quota" not in his_told.value.message


async def test_dram_that_is_leased_within_a_quota(tmp_path: Path) -> None:
    async with Store(config(tmp_path, quotas={"*": Quota(dram=DRAM)})) as store:
        hers = await space_of(store, "alice")
        with pytest.raises(Busy, match=rf"quota of {DRAM} bytes in DRAM \(`dram` of alice\) is full"):  # noqa: PT012 - until it is
            for number in range(200):
                await put(store, hers, (number,), b"v" * 16)
                store.match(hers, tokens_of((number,)), {}, owner=OWNER, lease_s=60)


async def test_ssd_that_is_retained_and_a_put_that_is_larger_than_the_quota(tmp_path: Path) -> None:
    async with Store(config(tmp_path, quotas={"alice": Quota(ssd=SSD)})) as store:
        hers = await space_of(store, "alice")
        with pytest.raises(
            NoSpace, match=rf"\d+ bytes to be written at once are over the quota of {SSD} bytes on SSD \(`ssd` of alice\): put fewer"
        ):
            await put(store, hers, tuple(range(18)), b"v" * 16, Ack.DURABLE)
        assert store.figures.puts_open == 0
        kept = "is kept for the retention_s of its namespace"
        full = rf"the quota of {SSD} bytes on SSD \(`ssd` of alice\) is full, and what is there "
        with pytest.raises(NoSpace, match=f"{full}{kept}$"):  # noqa: PT012 - until it is full
            for number in range(50):
                await put(store, hers, (number,), b"v" * 16, Ack.DURABLE)
        under_way = await store.begin_put(OWNER, hers, PutRequest(b"w" * 16, tokens_of((0, 9)), {}, 1, PARTS, Ack.MEMORY))
        with pytest.raises(NoSpace, match=f"{full}is of puts under way or {kept}$"):
            await put(store, hers, (51,), b"v" * 16, Ack.DURABLE)
        store.match(hers, tokens_of((1,)), {}, owner=OWNER, lease_s=60)
        with pytest.raises(NoSpace, match=f"{full}is leased or is of puts under way or {kept}$"):
            await put(store, hers, (52,), b"v" * 16, Ack.DURABLE)
        store.abort_put(under_way)
        with pytest.raises(NoSpace, match=f"{full}is leased or {kept}$"):
            await put(store, hers, (53,), b"v" * 16, Ack.DURABLE)


async def test_dram_that_a_put_and_a_full_ssd_keep(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=24 * 5000, ssd_bytes=12 * 5000)) as store:
        space = await store.create_namespace(NamespaceSettings("t", "n", "model", SPEC))
        with pytest.raises(NoSpace):  # noqa: PT012 - until SSD is full of what was promised
            for number in range(50):
                await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
        puts = []
        with pytest.raises(NoSpace, match=r"no DRAM free .*: what is there is of puts under way, and SSD has no room"):  # noqa: PT012
            for number in range(100, 200):
                await put(store, space, (number,), b"v" * 16)
                request = PutRequest(b"w" * 16, tokens_of((number, 9)), {}, 1, PARTS, Ack.MEMORY)
                puts.append(await store.begin_put(OWNER, space, request))


def test_what_is_in_flight() -> None:
    quotas = Quotas({"alice": Quota(in_flight=100)})
    with pytest.raises(
        NoSpace, match=r"a put of 101 bytes is over the quota of 100 bytes in flight \(`in_flight` of alice\): put fewer pages"
    ):
        quotas.start_put("alice", 101)
    quotas.start_put("alice", 60)
    with pytest.raises(
        Busy, match=r"60 bytes are in flight, and 41 more are over the quota of 100 bytes in flight \(`in_flight` of alice\)"
    ):
        quotas.start_fetch("alice", 41)
