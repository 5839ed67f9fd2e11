"""How long the commits of a put wait for other shards."""

import time
from dataclasses import dataclass

from kvstore.api.wire.put_messages import Commit
from kvstore_client.times import milliseconds

_SLICES_MS = 10_000
"""How long a commit waits for slices under way on other connections."""


class Whole:
    """So many seconds for all commits of one call, however often each is sent. They begin with the first: to send is not to wait."""

    def __init__(self, seconds: float) -> None:
        milliseconds("whole_s", seconds)
        self._seconds = seconds
        self._end: float | None = None

    def left_s(self) -> float:
        """What is left of them."""
        return self._seconds if self._end is None else max(self._end - time.monotonic(), 0.0)

    def begin(self) -> None:
        """A commit is sent."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of a put that is under way."""

    handle: int
    whole: Whole

    @property
    def waits(self) -> bool:
        """Whether its commit waits for other shards."""
        return self.whole.left_s() > 0

    def commit(self) -> Commit:
        """The COMMIT, which is sent now."""
        self.whole.begin()
        return Commit(handle=self.handle, wait_ms=_SLICES_MS, whole_ms=milliseconds("whole_s", self.whole.left_s()))
