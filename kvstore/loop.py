"""The daemon's event loop: asyncio's own, but it can be told that something is about to come (see `kvstore.api.wire.spin`)."""

import asyncio
import selectors
from functools import partial

from kvstore.api.wire.spin import Spin, spin_s


class SpinningSelector(selectors.EpollSelector):
    """Waits for sockets as any selector does; after `expect` it looks again for a moment before it sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._spin = Spin()
        self._expected_s = 0.0

    def expect(self, nbytes: int = 0) -> None:
        """Something may come within microseconds, or a bit later if the other end has to look at so many bytes before.

        Not for bulk: who looks for every few bytes of it is slower, and in the way of others.
        """
        self._expected_s = spin_s(nbytes)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, after `timeout` seconds at most, to the millisecond."""
        if self._expected_s and (timeout is None or timeout > 0):
            seconds, self._expected_s = self._expected_s, 0.0
            if self._spin.worth() and (ready := self._spin.look(partial(super().select, 0), seconds)):
                return ready
        ready = super().select(timeout)
        if ready:
            self._expected_s = 0.0  # it has come while something else was done
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop with an `expect`."""

    def __init__(self) -> None:
        selector = SpinningSelector()
        super().__init__(selector)
        self.expect = selector.expect
