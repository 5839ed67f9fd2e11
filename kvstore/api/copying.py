"""Copies of slices out of a client's memory by several threads, each hashed in the copy while that is still in the processor's cache."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from xxhash import xxh3_128

from kvstore.digests import slice_digest
from kvstore.errors import Busy

COPIERS = 2
_UNIT = 256 << 10
"""Bytes copied and then hashed at a time."""
_SHARE = 2 << 20
"""A second thread comes for no fewer bytes than this: it is woken for them."""
_TURN = 4 << 20
"""So many bytes a thread copies for one request before it turns to the others that wait: some milliseconds."""

Job = tuple[memoryview, tuple[int, ...], int]
"""Where to copy to, the sizes of the slices there, and where they lie in the buffer."""
Read = Callable[[memoryview, int], None]
"""Fills its first argument with the bytes from an offset on. Runs in several threads at once."""


@dataclass(slots=True)
class _Piece:
    """Consecutive slices that are copied together: one slice, or several small ones."""

    target: memoryview
    sizes: tuple[int, ...]
    offset: int
    digests: list[bytes] = field(default_factory=list)

    def copy(self, read: Read) -> None:
        if len(self.sizes) > 1:
            read(self.target, self.offset)
            at = 0
            for size in self.sizes:
                self.digests.append(slice_digest(self.target[at : at + size]))
                at += size
            return
        digest = xxh3_128()
        for at in range(0, len(self.target), _UNIT):
            part = self.target[at : at + _UNIT]
            read(part, self.offset + at)
            digest.update(part)
        self.digests.append(digest.digest())


class Copying:
    """One request's copies. Threads take pieces from a common list, so one that the system lets wait holds nobody up.

    They take turns with other requests, so that a large one does not stop all small ones.
    """

    def __init__(self, read: Read, jobs: Sequence[Job]) -> None:
        self._read = read
        self._pieces = [list(_pieces(*job)) for job in jobs]
        self._left = deque(piece for pieces in self._pieces for piece in pieces)
        self._lock = threading.Lock()
        self._unfinished = len(self._left)
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[list[list[bytes]]] = self._loop.create_future()

    def start(self, copiers: ThreadPoolExecutor) -> "asyncio.Future[list[list[bytes]]]":
        """Begin. The future gives the digests of each job's slices, or what went wrong (Busy if no thread could be had); until it is
        done, threads write.
        """
        if not self._left:  # nothing of what came is wanted
            self._finish()
            return self._done
        nbytes = sum(len(piece.target) for piece in self._left)
        try:
            for _ in range(min(COPIERS, max(1, nbytes // _SHARE))):
                copiers.submit(self._work, copiers)
        except RuntimeError as error:  # what was to run may be in the queue all the same, and run late: then it finds nothing to do
            self._give_up(Busy(f"no thread can be had to copy: {error}", retry_after_ms=1000))
        return self._done

    def _work(self, copiers: ThreadPoolExecutor) -> None:
        """Take pieces for a turn, then stand in line again, behind the others."""
        turn = 0
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            turn += len(piece.target)
            self._copy(piece)
            if turn >= _TURN and self._left:
                try:
                    copiers.submit(self._work, copiers)
                except RuntimeError:  # they are being shut down, which waits for what has begun
                    turn = 0
                else:
                    return

    def _copy(self, piece: _Piece) -> None:
        error: BaseException | None = None
        try:
            if self._error is None:
                piece.copy(self._read)
        except BaseException as raised:  # noqa: BLE001 - whoever waits is told
            error = raised
        piece.target = memoryview(b"")  # a view keeps its segment from being given back
        self._end(1, error)

    def _give_up(self, error: BaseException) -> None:
        """Take off the list what has not begun."""
        count = 0
        while self._left:
            try:
                self._left.popleft().target = memoryview(b"")
            except IndexError:  # a thread took it
                break
            count += 1
        if count:
            self._end(count, error)

    def _end(self, pieces: int, error: BaseException | None) -> None:
        """So many pieces are over. With the last, whoever waits is told."""
        with self._lock:
            self._error = self._error or error
            self._unfinished -= pieces
            last = not self._unfinished
        if last:
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self._error is not None:
            self._done.set_exception(self._error)
        else:
            self._done.set_result([[digest for piece in pieces for digest in piece.digests] for pieces in self._pieces])


def _pieces(target: memoryview, sizes: tuple[int, ...], offset: int) -> Iterator[_Piece]:
    at = end = first = 0
    for index, size in enumerate(sizes):
        end += size
        if index + 1 < len(sizes) and end + sizes[index + 1] - at <= _UNIT:
            continue  # with the next
        yield _Piece(target[at:end], sizes[first : index + 1], offset + at)
        at, first = end, index + 1
