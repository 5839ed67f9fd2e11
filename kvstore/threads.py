"""Thread pools whose threads are all there from the beginning."""

import threading
from concurrent.futures import ThreadPoolExecutor

from kvstore.errors import Busy


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool that never has to start a thread again. Raises Busy if the system does not give so many.

    An executor that can't start a thread raises RuntimeError when the work is in its queue already: it may run later, unexpected,
    in memory that is somebody else's by then.
    """
    pool, all_there = ThreadPoolExecutor(count, name), threading.Event()
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
