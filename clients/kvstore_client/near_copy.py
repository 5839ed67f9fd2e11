"""Fetches out of shared memory: the caller's thread and one more copy and verify, each what comes next.

Copying and hashing are done without the GIL, and one processor does not get out of the memory what it can give.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from kvstore.api.wire import NotFound
from kvstore_client.blocks import Item
from kvstore_client.direct import current
from kvstore_client.helper import Helper
from kvstore_client.near import Bytes, NearBlob, portions

_SHARED_BYTES = 2 << 20
"""A second thread helps with so much; waking it for less takes longer than it saves."""
_BREATH_BYTES = 4 << 20
"""So much is copied before others on the loop get a turn."""
_NOWHERE: Bytes = np.empty(0, np.uint8)


class _Copying:
    """The items of a fetch, copied portion by portion: by the caller, who calls `copy_next`, and by one more thread, which calls `help`.

    Each begins what is next. What they do ends with `end`, however late the other thread comes to it.
    """

    def __init__(self, blobs: dict[bytes, NearBlob], items: Sequence[Item], target: memoryview) -> None:
        self._left: list[Item] = []
        """Those that turned out not to be there, in order, as far as `settled` has looked."""
        self._blobs = blobs
        self._items = items
        self._target: Bytes = np.frombuffer(target, np.uint8)
        self._lock = threading.Lock()
        self._over = False
        self._helping: Future[None] | None = None
        """There once the other thread has begun; done when it has ended."""
        self._missing = [1] * len(items)
        """Portions of each item that are not copied yet; one as long as nobody has looked at it."""
        self._near: list[NearBlob | None] = [None] * len(items)
        """Where each is; None if it is not there."""
        self._next = self._cut()
        self._front = 0

    def _cut(self) -> Iterator[tuple[int, NearBlob, int, int]]:
        for number, item in enumerate(self._items):
            near = self._blobs.get(item.blob)
            try:
                if near is not None:
                    near.digests()
            except NotFound:
                near = None
            ranges = [] if near is None else portions(item)
            self._near[number] = near
            self._missing[number] = len(ranges)
            if near is not None:
                for first, last in ranges:
                    yield number, near, first, last

    def help(self) -> None:
        """Copy until nothing is left, or it is over. For the other thread."""
        with self._lock:
            if self._over:
                return
            helping = self._helping = Future[None]()
        try:
            while self.copy_next():
                pass
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            helping.set_exception(error)
        else:
            helping.set_result(None)

    def copy_next(self) -> int:
        """Copy the next portion; its bytes, 0 if none was left."""
        with self._lock:
            portion = None if self._over else next(self._next, None)
        if portion is None:
            return 0
        number, near, first, last = portion
        item = self._items[number]
        try:
            near.copy_portion(item, first, last, self._target)
        except NotFound:
            self._near[number] = None
        with self._lock:
            self._missing[number] -= 1
        return sum(piece.size for piece in item.pieces[first:last])

    async def end(self) -> None:
        """Begin nothing more, and return once nobody writes any more, also if this is cancelled or interrupted. Raises what `help` met."""
        interrupted: BaseException | None = None
        helping: Future[None] | None = None
        ended = False
        while not ended:
            try:
                helping = self._stopped()
                if helping is not None and current() is not None:
                    concurrent.futures.wait([helping])
                elif helping is not None:
                    await asyncio.wait([asyncio.wrap_future(helping)])
                ended = helping is None or helping.done()
            except BaseException as error:  # noqa: BLE001 - it is raised below
                interrupted = error
        self._target = _NOWHERE  # the other thread may hold this a little longer; the caller's memory is free
        if interrupted is not None:
            raise interrupted
        if helping is not None:
            helping.result()

    def _stopped(self) -> "Future[None] | None":
        with self._lock:
            self._over = True
            return self._helping

    @property
    def rest(self) -> list[Item]:
        """What is to be had another way, in order: what is not there, and what nobody got to."""
        return [*self._left, *self._items[self._front :]]

    def settled(self) -> Iterator[Item]:
        """The next items that are there, in order, up to the first that is not copied yet. For the caller's thread."""
        while self._front < len(self._items) and not self._missing[self._front]:
            number, item = self._front, self._items[self._front]
            self._front += 1
            near = self._near[number]
            try:
                if near is not None:
                    near.confirm()
                    yield item
                    continue
            except NotFound:
                pass
            self._blobs.pop(item.blob, None)
            self._left.append(item)


async def copy_near(
    blobs: dict[bytes, NearBlob], items: Sequence[Item], target: memoryview, arrived: Callable[[Item], None], helper: Helper
) -> list[Item]:  # fmt: skip
    """Copy what of the items is near. Returns the others, in order: what is not there, and what turned out to have gone.

    Once this returns, or raises, nothing more is written into `target`.
    """
    copying = _Copying(blobs, items, target)
    withdraw: Callable[[], None] | None = None
    breath = 0
    try:
        if sum(item.nbytes for item in items) >= _SHARED_BYTES:
            withdraw = helper.offer(copying.help)
        while nbytes := copying.copy_next():
            for item in copying.settled():
                arrived(item)
            breath += nbytes
            if breath >= _BREATH_BYTES and current() is None:
                breath = 0
                await asyncio.sleep(0)
    finally:
        if withdraw is not None:
            withdraw()
        await copying.end()
    for item in copying.settled():
        arrived(item)
    return copying.rest
