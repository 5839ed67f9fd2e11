"""Random prefetches, uses, releases and time, against a plain model of what HBM holds and counts."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import KVStoreError
from kvstore.tiers.hbm import Arrived, DeviceConfig, Hbm, HostPool, PageSet, State
from tests.tiers.simulated_clock import SimulatedClock

CAPACITY, ALIGN, GRACE = 16 << 10, 256, 3.0


@dataclass
class Modelled:
    """What the model knows of a set."""

    real: PageSet
    value: int
    gate: asyncio.Event
    stack: AsyncExitStack | None = None
    idle_since: float | None = None
    writing: bool = field(default=False)


class HbmMachine(RuleBasedStateMachine):
    """Two devices; the real bytes of a set come when its gate opens, and the link is fast: so only idle time and room matter."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = SimulatedClock()
        self.pools = [HostPool(DeviceConfig(CAPACITY, 1e9)) for _ in range(2)]
        self.tier = Hbm(self.pools, grace_s=GRACE, max_sets=12, clock=self.clock)
        self.sets: list[Modelled] = []
        self.values = 0
        self.used = self.idle = 0.0

    def run(self, coroutine: object) -> None:
        self.loop.run_until_complete(coroutine)  # type: ignore[arg-type]

    def teardown(self) -> None:
        for model in self.sets:
            if model.stack is not None:
                self.run(model.stack.aclose())
        self.run(self.tier.close())
        self.run(self.clock.settle())
        assert [pool.usage().used for pool in self.pools] == [0, 0]
        assert self.tier.holding == (0, 0, 0)
        assert self.clock.pending == 0
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()

    @rule(sizes=st.tuples(*[st.integers(1, 9 << 10)] * 2), at_once=st.booleans())
    def prefetch(self, sizes: tuple[int, int], at_once: bool) -> None:
        self.values = self.values % 250 + 1
        model = Modelled(None, self.values, asyncio.Event())  # type: ignore[arg-type]
        if at_once:
            model.gate.set()

        async def fill(views: list[memoryview], arrived: Arrived) -> None:
            await model.gate.wait()
            for device, view in enumerate(views):
                view[:] = bytes([model.value]) * len(view)
                arrived(device, 0)

        async def start() -> None:
            if len([m for m in self.sets if m.real.state is not State.GONE]) >= 12:
                with pytest.raises(KVStoreError):
                    self.tier.prefetch(sizes, fill)
                return
            model.real = self.tier.prefetch(sizes, fill)
            self.sets.append(model)
            await self.clock.advance(0.001)

        self.run(start())

    def pick(self, index: int) -> Modelled:
        return self.sets[index % len(self.sets)]

    @precondition(lambda self: self.sets)
    @rule(index=st.integers(0, 99))
    def open_gate(self, index: int) -> None:
        self.pick(index).gate.set()
        self.run(self.clock.advance(0.001))

    @precondition(lambda self: self.sets)
    @rule(index=st.integers(0, 99))
    def use(self, index: int) -> None:
        model = self.pick(index)
        if model.stack is None and model.real.state is State.READY:
            model.stack = AsyncExitStack()
            self.run(model.stack.enter_async_context(model.real.use(keep=index % 2 == 0)))

    @precondition(lambda self: self.sets)
    @rule(index=st.integers(0, 99))
    def end_use(self, index: int) -> None:
        model = self.pick(index)
        if model.stack is not None:
            self.run(model.stack.aclose())
            model.stack = None

    @precondition(lambda self: self.sets)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        self.run(self.pick(index).real.release())

    @rule(seconds=st.floats(0.01, 2 * GRACE))
    def wait(self, seconds: float) -> None:
        self.run(self.clock.advance(seconds))

    @invariant()
    def nothing_is_idle_beyond_its_grace(self) -> None:
        for model in self.sets:
            idle = model.real.state is State.READY and model.stack is None
            if not idle:
                model.idle_since = None
            elif model.idle_since is None:
                model.idle_since = self.clock.time()
            else:
                assert self.clock.time() - model.idle_since <= GRACE

    @invariant()
    def what_is_taken_is_what_sets_hold(self) -> None:
        self.run(self.clock.settle())
        holders = [m.real for m in self.sets if m.real.regions]
        for device, pool in enumerate(self.pools):
            assert pool.usage().used == sum(-(-s.sizes[device] // ALIGN) * ALIGN for s in holders)
        used = sum(sum(m.real.sizes) for m in self.sets if m.stack is not None)
        idle = sum(sum(m.real.sizes) for m in self.sets if m.stack is None and m.real.state is State.READY)
        moving = sum(sum(s.sizes) for s in holders) - used - idle
        assert self.tier.holding == (used, idle, moving)
        for model in self.sets:
            if model.stack is not None:
                for view in (pool.view(r) for pool, r in zip(self.pools, model.real.regions, strict=True)):
                    assert bytes(view) == bytes([model.value]) * len(view), "a set in use has other bytes"
        self.sets = [m for m in self.sets if m.real.state is not State.GONE or m.stack is not None]


HbmMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHbm = HbmMachine.TestCase
