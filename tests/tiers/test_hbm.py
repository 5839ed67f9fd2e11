"""The HBM tier: real bytes over a simulated link, deadlines, double buffering, shards, grace, and what is counted."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import BadRequest, Busy, Cancelled, Corrupt, DeadlineExceeded, NoSpace, NotFound
from kvstore.tiers.hbm import Arrived, DeviceConfig, Fill, Hbm, HostPool, PageSet, State
from tests.tiers.simulated_clock import SimulatedClock
from tests.waiting import until

DEVICE = DeviceConfig(capacity=64 << 10, bandwidth=1024.0, latency_s=0.5)
KIB = 1 << 10


def hbm(devices: int = 1, clock: SimulatedClock | None = None, grace_s: float = 2.0, **options: float) -> tuple[Hbm, SimulatedClock]:
    clock = clock or SimulatedClock()
    pools = [HostPool(DEVICE) for _ in range(devices)]
    return Hbm(pools, grace_s=grace_s, clock=clock, max_sets=int(options.get("max_sets", 256)), lead_s=options.get("lead_s", 0.0)), clock


def at_once(value: int, groups: int = 1) -> Fill:
    """A transfer whose real bytes are there at once."""

    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        for device, view in enumerate(views):
            view[:] = bytes([value + device]) * len(view)
            for group in range(groups):
                arrived(device, group)

    return fill


def at_once_into(value: int, nbytes: int) -> Fill:
    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        for device, view in enumerate(views):
            view[:nbytes] = bytes([value]) * nbytes
            arrived(device, 0)

    return fill


def gated(gate: asyncio.Event, value: int = 7, log: list[str] | None = None) -> Fill:
    """A transfer whose real bytes wait for a gate."""

    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        try:
            await gate.wait()
        finally:
            if log is not None:
                log.append("stopped")
        for device, view in enumerate(views):
            view[:] = bytes([value]) * len(view)
            arrived(device, 0)

    return fill


def state(page_set: PageSet) -> State:
    return page_set.state


def used(tier: Hbm) -> int:
    return sum(usage.used for usage in tier.usage())


def test_a_pool_gives_real_bytes_and_takes_regions_back() -> None:
    pool = HostPool(DEVICE)
    assert pool.usage().capacity == 64 * KIB
    first, second, third = (pool.allocate(16 * KIB) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    pool.write(second, np.arange(4 * KIB, dtype=np.uint32))
    assert pool.read(second, 4, 8) == np.arange(1, 3, dtype=np.uint32).tobytes()
    pool.view(first)[:] = b"x" * 16 * KIB
    assert pool.read(second, 0, 4) == b"\0" * 4, "regions overlap"
    assert pool.allocate(17 * KIB) is None
    pool.free(first)
    pool.free(third)
    assert pool.allocate(33 * KIB) is None, "the gap is 32 KiB: regions are contiguous"
    assert pool.allocate(32 * KIB) is not None
    pool.free(second)
    assert pool.allocate(32 * KIB) is not None, "gaps that touch are one"
    assert pool.usage().used == 64 * KIB
    with pytest.raises(BadRequest, match="bytes"):
        pool.read(0, 0, 33 * KIB)
    with pytest.raises(BadRequest, match="device"):
        DeviceConfig(capacity=0, bandwidth=1)


async def test_a_transfer_takes_the_links_time_when_that_is_longer() -> None:
    tier, clock = hbm()
    page_set = tier.prefetch([2 * KIB], at_once(1))
    await clock.advance(2.4)
    assert state(page_set) is State.MOVING
    assert tier.holding == (0, 0, 2 * KIB)
    await clock.advance(0.2)
    await page_set.arrived()
    assert state(page_set) is State.READY
    async with page_set.use() as (view,):
        assert bytes(view) == b"\1" * 2 * KIB
    assert state(page_set) is State.GONE
    assert used(tier) == 0


async def test_a_transfer_takes_the_real_time_when_that_is_longer() -> None:
    tier, clock = hbm()
    gate = asyncio.Event()
    page_set = tier.prefetch([KIB], gated(gate))
    await clock.advance(10)
    assert state(page_set) is State.MOVING
    gate.set()
    await clock.settle()
    assert state(page_set) is State.READY


async def test_transfers_share_a_link_and_each_device_has_its_own() -> None:
    tier, clock = hbm(devices=2)
    first, second = tier.prefetch([KIB, 1], at_once(1)), tier.prefetch([KIB, 2 * KIB], at_once(2))
    await clock.advance(1.6)
    assert (state(first), state(second)) == (State.READY, State.MOVING)
    await clock.advance(1.0)
    assert state(second) is State.READY


async def test_layer_groups_are_told_one_by_one_and_can_be_used_while_others_move() -> None:
    tier, clock = hbm()
    page_set = tier.prefetch([4 * KIB], at_once(1, groups=4), groups=4)
    await clock.advance(1.6)
    await page_set.arrived(0)
    waiting = asyncio.create_task(page_set.arrived(1))
    async with page_set.use():
        assert tier.holding == (KIB, 0, 3 * KIB)
        await clock.advance(0.5)
        assert not waiting.done()
        await clock.advance(0.5)
        assert waiting.done()
        assert tier.holding == (2 * KIB, 0, 2 * KIB)
    assert state(page_set) is State.GONE
    assert tier.holding == (0, 0, 0)


async def test_shards_go_straight_to_the_memory_of_each_accelerator() -> None:
    tier, clock = hbm(devices=4)
    page_set = tier.prefetch([KIB] * 4, at_once(10))
    await clock.advance(2)
    async with page_set.use() as views:
        assert [bytes(v[:1])[0] for v in views] == [10, 11, 12, 13]
        assert all(np.shares_memory(np.frombuffer(v, np.uint8), np.frombuffer(p.view(r), np.uint8))
                   for v, p, r in zip(views, tier.pools, page_set.regions, strict=True))  # fmt: skip


async def test_what_can_not_arrive_in_time_says_so_at_once() -> None:
    tier, _ = hbm()
    with pytest.raises(DeadlineExceeded, match="after its deadline"):
        tier.prefetch([2 * KIB], at_once(1), deadline=2.4)
    tier.prefetch([2 * KIB], at_once(1), deadline=2.6)
    with pytest.raises(DeadlineExceeded):  # the link is taken until then
        tier.prefetch([2 * KIB], at_once(1), deadline=2.6)
    assert tier.account().late_sets == 2
    await tier.close()


async def test_what_turns_out_late_says_so_and_leaves() -> None:
    tier, clock = hbm()
    log: list[str] = []
    page_set = tier.prefetch([KIB], gated(asyncio.Event(), log=log), deadline=3.0)
    waiting = asyncio.create_task(page_set.arrived())
    await clock.advance(3.1)
    with pytest.raises(DeadlineExceeded, match="not in HBM at its deadline"):
        await waiting
    assert log == ["stopped"]
    assert used(tier) == 0
    assert clock.pending == 0


async def test_held_back_it_arrives_shortly_before_it_is_needed() -> None:
    tier, clock = hbm(lead_s=0.25)
    page_set = tier.prefetch([KIB], at_once(1), deadline=11.0, needed_at=10.0)
    await clock.advance(8.2)
    assert used(tier) == 0, "it takes up room before it must"
    await clock.advance(0.1)
    assert state(page_set) is State.MOVING
    await clock.advance(1.5)
    assert state(page_set) is State.READY
    assert tier.account().idle < KIB


async def test_room_for_what_is_computed_is_no_transfer() -> None:
    tier, clock = hbm()
    page_set = tier.prefetch([KIB], at_once_into(3, KIB), room=[4 * KIB])
    await clock.advance(1.4)
    assert tier.holding == (0, 0, 5 * KIB)
    await clock.advance(0.2)
    assert tier.holding == (0, KIB, 4 * KIB)
    async with page_set.use() as (view,):
        assert tier.holding == (5 * KIB, 0, 0)
        assert len(view) == 5 * KIB
    nothing_moves = tier.prefetch([0], short, room=[KIB], groups=4)
    await clock.settle()
    await nothing_moves.arrived()
    assert tier.account().arrived_bytes == KIB
    await tier.close()


async def test_one_set_moves_while_another_is_used() -> None:
    tier, clock = hbm()
    first = tier.prefetch([32 * KIB], at_once(1))
    await clock.advance(33)
    async with first.use():
        second = tier.prefetch([32 * KIB], at_once(2))
        await clock.advance(33)
        assert state(second) is State.READY
        third = tier.prefetch([KIB], at_once(3))
        await clock.advance(1)
        assert state(third) is State.HELD, "there is no room"
        async with second.use() as (view,):
            assert view[0] == 2
    await clock.advance(3)
    assert state(third) is State.READY


async def test_an_idle_set_leaves_after_its_grace_time() -> None:
    tier, clock = hbm(grace_s=2.0)
    page_set = tier.prefetch([KIB], at_once(1))
    await clock.advance(1.5 + 1.9)
    async with page_set.use(keep=True):
        await clock.advance(100)
    assert state(page_set) is State.READY
    await clock.advance(1.9)
    assert state(page_set) is State.READY
    await clock.advance(0.2)
    assert state(page_set) is State.GONE
    assert used(tier) == 0
    with pytest.raises(NotFound, match="nobody used"):
        async with page_set.use():
            pass
    account = tier.account()
    assert account.dropped_sets == 1
    assert account.idle == pytest.approx(KIB * (1.9 + 2.0))
    assert account.used == pytest.approx(KIB * 100)


async def test_a_group_that_waits_for_one_that_does_not_come_leaves_too() -> None:
    tier, clock = hbm(grace_s=1.0)

    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        arrived(0, 0)
        await asyncio.Event().wait()

    page_set = tier.prefetch([2 * KIB], fill, groups=2)
    await clock.advance(2.4)
    assert state(page_set) is State.MOVING
    await clock.advance(0.2)
    assert state(page_set) is State.GONE
    assert used(tier) == 0


async def test_a_set_that_comes_slowly_is_not_idle() -> None:
    tier, clock = hbm(grace_s=1.2)
    page_set = tier.prefetch([4 * KIB], at_once(1, groups=4), groups=4)
    await clock.advance(4.6)
    assert state(page_set) is State.READY, "it was dropped while its groups came, one a second"
    assert tier.account().idle == pytest.approx(KIB * (1 + 2 + 3 + 4 * 0.1))
    await clock.advance(1.2)
    assert state(page_set) is State.GONE


async def test_memory_stays_until_the_use_is_over() -> None:
    tier, clock = hbm()
    page_set = tier.prefetch([KIB], at_once(1))
    await clock.advance(2)
    async with page_set.use() as (view,):
        await page_set.release()
        other = tier.prefetch([KIB], at_once(9))
        await clock.advance(2)
        assert bytes(view) == b"\1" * KIB, "another set got the memory of a batch that runs"
    assert state(page_set) is State.GONE
    await other.release()
    assert used(tier) == 0


@pytest.mark.parametrize("steps", range(6))
async def test_a_release_at_any_moment_leaves_nothing(steps: int) -> None:
    tier, clock = hbm()
    gate, log = asyncio.Event(), list[str]()
    page_set = tier.prefetch([KIB], gated(gate, log=log))
    for _ in range(steps):
        await asyncio.sleep(0)
    if steps > 3:
        gate.set()
        await clock.advance(0.3 * steps)
    await page_set.release()
    await page_set.release()
    assert state(page_set) is State.GONE
    assert used(tier) == 0
    assert clock.pending == 0
    if steps < 5:
        with pytest.raises(Cancelled):
            await page_set.arrived()
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_release_is_finished_all_the_same() -> None:
    tier, _ = hbm()
    begun, stopping = asyncio.Event(), asyncio.Event()

    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await stopping.wait()  # it still writes: the memory must not be given away
            views[0][:] = b"z" * KIB

    page_set = tier.prefetch([KIB], fill)
    await begun.wait()
    releasing = asyncio.create_task(page_set.release())
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.sleep(0.01)
    assert used(tier) == KIB
    stopping.set()
    await until(lambda: used(tier) == 0)


def failing(error: Exception) -> Fill:
    async def fill(views: list[memoryview], arrived: Arrived) -> None:
        raise error

    return fill


async def short(views: list[memoryview], arrived: Arrived) -> None:
    """Says less than it should."""


@pytest.mark.parametrize(
    ("fill", "expected"),
    [(failing(Corrupt("it did not verify")), Corrupt), (failing(OSError("gone")), NotFound), (short, NotFound)],
)
async def test_a_failed_transfer_is_told_to_who_waits(fill: Fill, expected: type[Exception]) -> None:
    tier, clock = hbm()
    page_set = tier.prefetch([KIB], fill)
    await clock.advance(2)
    with pytest.raises(expected):
        await page_set.arrived()
    assert used(tier) == 0
    again = tier.prefetch([KIB], at_once(1))
    await clock.advance(1.6)
    assert state(again) is State.READY, "the link was not given back"
    await tier.close()


async def test_it_is_bounded() -> None:
    tier, _ = hbm(max_sets=2)
    with pytest.raises(NoSpace):
        tier.prefetch([65 * KIB], at_once(1))
    cases: list[Callable[[], object]] = [
        lambda: tier.prefetch([1, 1], at_once(1)), lambda: tier.prefetch([3], at_once(1), groups=4),
        lambda: Hbm([], clock=SimulatedClock()),
    ]  # fmt: skip
    for case in cases:
        with pytest.raises(BadRequest):
            case()
    tier.prefetch([KIB], at_once(1))
    tier.prefetch([KIB], at_once(1))
    with pytest.raises(Busy):
        tier.prefetch([KIB], at_once(1))
    await tier.close()
    assert used(tier) == 0
