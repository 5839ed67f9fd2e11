"""One more thread of a client, for copies that one processor takes too long over."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Helper:
    """A client's second thread, from when it is first of use until the client is closed. For any thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvstore-client-copier")

    def offer(self, work: Callable[[], None]) -> Callable[[], None]:
        """Have `work` done by the thread if it has time before what is returned is called; it may also never be.

        A thread that can't be started now may be for somebody else's work later, and do this first: so nothing follows from an error here.
        """
        offered = _Offered(work)
        if len(os.sched_getaffinity(0)) > 1:
            try:
                self._thread.submit(offered.take)
            except RuntimeError:  # no thread could be started, or the client was closed
                pass
        return offered.withdraw

    def close(self) -> None:
        """End the thread. What it does is never more than a copy of about a MiB."""
        self._thread.shutdown(wait=False)


class _Offered:
    """Work that waits for the thread, and that nothing holds any more once it is withdrawn."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def take(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()

    def withdraw(self) -> None:
        self._work = None
