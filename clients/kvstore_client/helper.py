"""One more thread of a client, for copies that one processor takes too long over."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Helper:
    """A client's second thread, from when it is first of use until the client is closed. For any thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvstore-client-copier")

    def start(self, work: Callable[[], None]) -> Future[None] | None:
        """Have `work` done by the thread, once it has time; None if there is none."""
        if len(os.sched_getaffinity(0)) < 2:
            return None
        try:
            return self._thread.submit(work)
        except RuntimeError:  # no thread could be started (if one is later, it finds nothing left to do), or the client was closed
            return None

    def close(self) -> None:
        """End the thread. What it does is never more than a copy of about a MiB."""
        self._thread.shutdown(wait=False)
