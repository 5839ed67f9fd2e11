"""What state machines have in common that drive a store on a real disk: a loop of their own, restarts, and kills."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvstore.store import Space, Store, StoreConfig

T = TypeVar("T")

EXAMPLES = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class DiskMachine(RuleBasedStateMachine):
    """A store of one namespace. Its `start` calls `begin`; `opened` is called for each store that is opened, the first included."""

    space_name: ClassVar[str]
    store: Store

    def begin(self, config: Callable[[Path], StoreConfig]) -> None:
        """Open the first store, configured for its data directory."""
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.generation = 0
        self.loop = asyncio.new_event_loop()
        self.loop.slow_callback_duration = 60
        self.open()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    @property
    def data_dir(self) -> Path:
        return self.folder / str(self.generation)

    @property
    def space(self) -> Space:
        return self.store.space("default", self.space_name)

    def open(self) -> None:
        self.store = self.run(Store(self.config(self.data_dir)).__aenter__())
        self.opened()

    def opened(self) -> None:
        """What ended with the store before."""

    def end(self) -> None:
        """Close the store, and remove all there was."""
        self.run(self.store.__aexit__(None, None, None))
        self.loop.close()
        shutil.rmtree(self.folder)

    @rule()
    def restart(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.open()

    @rule()
    def kill(self) -> None:
        """What is on disk now, with nothing flushed, is all that the next daemon gets."""
        shutil.copytree(self.data_dir, self.folder / str(self.generation + 1))
        self.run(self.store.__aexit__(None, None, None))
        self.generation += 1
        self.open()


class EvictingMachine(DiskMachine):
    """One that evicts, and pins. `durable` is what was acknowledged as durable."""

    durable: set[Any]
    pins: list[int]

    @rule(nbytes=st.integers(1, 60_000))
    def evict_from_dram(self, nbytes: int) -> None:
        self.run(self.store._residency.reclaim(nbytes))

    @rule(nbytes=st.integers(1, 60_000), past_retention=st.booleans())
    def evict_from_ssd(self, nbytes: int, past_retention: bool) -> None:
        self.store._residency.make_ssd_room(nbytes, 1e12 if past_retention else time.time())
        self.store._writeback.poke()
        if past_retention:
            self.durable.clear()  # what was promised was promised until then

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.store.prefixes.unpin(self.space, self.pins.pop())
