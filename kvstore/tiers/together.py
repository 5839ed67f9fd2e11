"""A row of pieces that two threads work through: while one waits for the disk, the other copies and verifies."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress


class Together:
    """`do` is called with every number below `count`, by the caller's thread and one more; `upto` with how many from the first on are done.

    What is begun is begun in order. After an error nothing more is begun.
    """

    def __init__(self, count: int, do: Callable[[int], None], upto: Callable[[int], None]) -> None:
        self._count = count
        self._do = do
        self._upto = upto
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._at_work = 0
        self._over = False
        self._begun = 0
        self._done: set[int] = set()
        self._front = 0
        self._error: Exception | None = None

    def run(self, other: Executor) -> None:
        """Return when all is done, also if the `other` thread never has time; raises what `do` raised. No call outlasts this one."""
        partner = None
        if self._count > 1:
            with suppress(RuntimeError):  # no thread could be started; what was to run in it may be run by one of the others yet
                partner = other.submit(self._work)
        try:
            self._work()
        finally:
            with self._left:
                self._over = True
                while self._at_work:
                    self._left.wait()
            if partner is not None:
                partner.cancel()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with self._lock:
            if self._over:
                return
            self._at_work += 1
        try:
            self._take_turns()
        finally:
            with self._left:
                self._at_work -= 1
                self._left.notify()

    def _take_turns(self) -> None:
        while (number := self._begin()) is not None:
            try:
                self._do(number)
            except Exception as error:  # noqa: BLE001 - `run` raises it
                self._error = self._error or error
                return
            self._end(number)

    def _begin(self) -> int | None:
        with self._lock:
            if self._error is not None or self._begun == self._count:
                return None
            self._begun += 1
            return self._begun - 1

    def _end(self, number: int) -> None:
        with self._lock:  # so that `upto` only goes up
            self._done.add(number)
            before = self._front
            while self._front in self._done:
                self._done.remove(self._front)
                self._front += 1
            if self._front > before:
                self._upto(self._front)
