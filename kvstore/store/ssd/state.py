"""How the disk under the SSD tier is doing: what is said of it, once per change, and which error a caller gets."""

import errno
import logging
import os
import time
from dataclasses import dataclass

import lmdb

from kvstore.errors import DiskFailing, KVStoreError, NoSpace

_log = logging.getLogger("kvstore.ssd")

SSD_STATES = OK, FULL, FAILING = "ok", "full", "failing"
_SHORTAGES = {
    os.strerror(errno.ENOSPC): "make room on the file system of the data directory",
    os.strerror(errno.EDQUOT): "raise the disk quota of the user that the daemon runs as",
    os.strerror(errno.EFBIG): "raise the limit of the largest file (ulimit -f), or take a file system that has larger ones",
}
"""What to do about an error of the system that says that there is no room."""
_NO_ROOM_IN_FILE = "a file of the store is as large as its budget allows"


def is_full(error: Exception) -> bool:
    """Whether an error of LMDB or the system says that there is no room, rather than that the disk is failing."""
    return isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or bool(_advice(error))


def _advice(error: Exception) -> str:
    return next((advice for text, advice in _SHORTAGES.items() if text in str(error)), "")


@dataclass(slots=True)
class SsdHealth:
    """What is told of the disk: `state` is ok, full or failing, `since` a Unix time; `last_error` stays after it is well again."""

    state: str = OK
    since: float = 0.0
    last_error: str = ""
    errors: int = 0

    @property
    def ok(self) -> bool:
        """Whether writes are worth trying."""
        return self.state == OK


@dataclass(slots=True)
class SsdState(SsdHealth):
    """The same, kept up by what happens to writes."""

    _said: str = ""
    """Of a full one, what is full and what to do."""

    def failed(self, error: Exception | str) -> KVStoreError:
        """A write failed, or takes too long. Returns what those who wait for it get."""
        full = isinstance(error, Exception) and is_full(error)
        self.errors += 1
        if isinstance(error, lmdb.MapFullError):
            self.last_error = _NO_ROOM_IN_FILE
            self._said = f"the SSD tier is full ({_NO_ROOM_IN_FILE}): delete what is not needed, or give the daemon a larger --ssd"
        else:
            self.last_error = str(error)
            advice = (_advice(error) if isinstance(error, Exception) else "") or "make room on it"
            self._said = f"the disk under the SSD tier is full ({error}): {advice}, or start it with a smaller --ssd than there is room for"
        self._become(FULL if full else FAILING)
        return self.error()

    def recovered(self) -> None:
        """A write went well."""
        self._become(OK)

    def error(self) -> KVStoreError:
        """What a durable put gets while the disk is not well."""
        if self.state == FULL:
            return NoSpace(f"{self._said}; the store serves on from DRAM")
        return DiskFailing(
            f"the disk under the SSD tier is failing ({self.last_error}); the store serves on from DRAM", retry_after_ms=1000
        )

    def _become(self, state: str) -> None:
        if state == self.state:
            return
        if state == OK:
            _log.warning("the disk takes writes again, after %.0f s", time.time() - self.since)
        else:
            _log.error("the disk is %s: %s. The store serves on from DRAM; durable puts are refused", state, self.last_error)
        self.state, self.since = state, time.time()
