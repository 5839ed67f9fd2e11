"""A blob on its way from SSD into a DRAM slot: its slices can be had as each is read and verified, before the last is there.

On the loop's thread, all of it.
"""

import asyncio
from collections.abc import Callable

from kvstore.errors import Cancelled


class Arriving:
    """What those who wait for a blob share. The slot stays theirs until the last has left, also if the rest never comes."""

    def __init__(self) -> None:
        self.view = memoryview(b"")
        """Its stored form, of which the digest table and the first `slices` slices are verified."""
        self.slices = 0
        self.bad = False
        """Whether what has come was found to be bad in memory since: nobody else gets it."""
        self._users = 0
        self._progress = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._at_last: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether no more comes: it is in DRAM, or failed."""
        return self._ended

    def came(self, slices: int) -> None:
        """So many slices are there and verified, and with them the digest table."""
        if not self._ended:
            self.slices = slices
            self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """All of it has come; or it never will, for this reason."""
        if self._ended:
            return
        self._ended = True
        self._error = error if error is None or isinstance(error, Exception) else Cancelled("the daemon stops reading")
        self._tell()

    def _tell(self) -> None:
        told, self._progress = self._progress, asyncio.Event()
        told.set()

    def has(self, number: int) -> bool:
        """Whether a slice is there and verified."""
        return self.slices > number or (self._ended and self._error is None)

    async def wait_for(self, number: int) -> None:
        """Return once a slice is there. Raises what ended it before that."""
        while not self.has(number):
            if self._error is not None:
                raise self._error
            await self._progress.wait()

    @property
    def used(self) -> bool:
        """Whether anybody reads from the view."""
        return self._users > 0

    def join(self) -> None:
        """Somebody reads from the view from now on; follow with `leave`."""
        self._users += 1

    def leave(self) -> None:
        """Undo one `join`."""
        self._users -= 1
        self._settle()

    def unused(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as nobody reads from the view any more."""
        self._at_last = then
        self._settle()

    def _settle(self) -> None:
        if not self._users and self._at_last is not None:
            then, self._at_last = self._at_last, None
            then()
