"""Thread pools whose threads are all there from the beginning, and work that is done ahead in one."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kvstore.errors import Busy

T = TypeVar("T")
R = TypeVar("R")


def started_pool(count: int, name: str, *, apart: bool = False) -> ThreadPoolExecutor:
    """A pool that never has to start a thread again. Raises Busy if the system does not give so many.

    With `apart` each of its threads has processors of its own, where there are enough: systems that pack what is short onto one would
    have them wait for each other, and for whoever they work with.

    An executor that can't start a thread raises RuntimeError when the work is in its queue already: it may run later, unexpected,
    in memory that is somebody else's by then.
    """
    pool, all_there = ThreadPoolExecutor(count, name, _keep_apart(count) if apart else None), threading.Event()
    try:
        for _ in range(count):
            pool.submit(all_there.wait)  # none of them is idle, so each gets a thread
    except RuntimeError as error:
        pool.shutdown(wait=False)
        what = f"the threads {name} can't be started: {error}"
        raise Busy(f"{what}; raise the limits on tasks (ulimit -u, pids of the control group) or memory", retry_after_ms=1000) from error
    finally:
        all_there.set()
    return pool


def _keep_apart(count: int) -> Callable[[], None]:
    """What each of so many threads is to begin with: it takes its share of the processors that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    shares = iter([usable[first::count] for first in range(count)])

    def take() -> None:
        if share := next(shares):
            with suppress(OSError):  # then it runs wherever it may
                os.sched_setaffinity(0, share)  # of this thread

    return take


def in_order(pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[tuple[T, R]]:
    """Each item and what became of it, in order, while the pool works on up to `ahead` that come behind it."""
    under_way: deque[tuple[T, Future[R]]] = deque()
    for item in items:
        under_way.append((item, pool.submit(work, item)))
        if len(under_way) > ahead:
            done, future = under_way.popleft()
            yield done, future.result()
    for done, future in under_way:
        yield done, future.result()
