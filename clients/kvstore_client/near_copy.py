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


class _Copying:
    """The items of a fetch, copied portion by portion by any thread that calls `copy_all` or `copy_next`; each begins what is next."""

    def __init__(self, blobs: dict[bytes, NearBlob], items: Sequence[Item], target: memoryview) -> None:
        self.left: list[Item] = []
        """Those that turned out not to be there, in order, as far as `settled` has looked."""
        self._blobs = blobs
        self._items = items
        self._target: Bytes = np.frombuffer(target, np.uint8)
        self._lock = threading.Lock()
        self._over = False
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

    def copy_all(self) -> None:
        """Copy until nothing is left, or it is over."""
        while self.copy_next():
            pass

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

    def stop(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._over = True

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
            self.left.append(item)


async def copy_near(
    blobs: dict[bytes, NearBlob], items: Sequence[Item], target: memoryview, arrived: Callable[[Item], None], helper: Helper
) -> list[Item]:  # fmt: skip
    """Copy what of the items is near. Returns the others, in order: what is not there, and what turned out to have gone.

    Once this returns, or raises, nothing more is written into `target`.
    """
    copying = _Copying(blobs, items, target)
    helping = helper.start(copying.copy_all) if sum(item.nbytes for item in items) >= _SHARED_BYTES else None
    breath = 0
    try:
        while nbytes := copying.copy_next():
            for item in copying.settled():
                arrived(item)
            breath += nbytes
            if breath >= _BREATH_BYTES and current() is None:
                breath = 0
                await asyncio.sleep(0)
    finally:
        copying.stop()
        if helping is not None:
            await _ended(helping)
    for item in copying.settled():
        arrived(item)
    return copying.left


async def _ended(helping: Future[None]) -> None:
    """Return once the other thread is done, also if this is cancelled: it writes into the caller's buffer. Raises what it raised."""
    if helping.cancel():
        return
    if current() is not None:
        concurrent.futures.wait([helping])
    cancelled: asyncio.CancelledError | None = None
    while not helping.done():
        try:
            await asyncio.wait([asyncio.wrap_future(helping)])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    helping.result()
