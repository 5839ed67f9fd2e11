"""What a process leaves behind that a fault ended (SIGBUS, SIGSEGV, SIGABRT): where it was, in a file, for the next start to read.

LMDB reads its pages through a map, and a damaged one can end the process there, past any `except`. Python's `faulthandler` then writes the
stack of the thread that faulted, from within the signal's handler. A kill, a full memory or a power cut leaves nothing, so nobody takes
those for damage.
"""

import contextlib
import faulthandler
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOM_BYTES = 32 << 10
"""Taken beforehand, so that a full disk can hold it; a stack has at most a hundred lines."""
_ERROR = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
_SAID = 8
"""Frames that the log gets."""
_TAIL = 3
"""So many parts of a module's path tell it: faulthandler escapes and cuts the rest."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a process ended."""

    error: str
    """Such as "Bus error"."""
    frames: tuple[tuple[str, int], ...]
    """(source file, line) of the thread that faulted, the innermost first."""

    def innermost_of(self, modules: Sequence[str]) -> str | None:
        """The one of these source files that the thread was in last."""
        tails = {_tail(module): module for module in modules}
        return next((tails[_tail(file)] for file, _ in self.frames if _tail(file) in tails), None)

    def __str__(self) -> str:
        places = " < ".join(f"{_tail(file)}:{line}" for file, line in self.frames[:_SAID])
        return f"{self.error} in {places or 'a thread without Python'}"


class FaultNote:
    """See the module's text. One process at a time uses a file; all of it blocks, and a disk that refuses is no error."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = -1

    def take(self) -> Fault | None:
        """What the last process left, if a fault ended it."""
        try:
            text = self._file.read_bytes().split(b"\0")[0].decode("ascii", "replace")
        except OSError:
            return None
        if (error := _ERROR.search(text)) is None:
            return None
        return Fault(error[1], tuple((file, int(line)) for file, line in _FRAME.findall(text)))

    def forget(self) -> None:
        """Remove what the last process left, once that was taken care of."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def arm(self) -> None:
        """Have a fault of this process noted from now on, in place of what was left. A process has one such note."""
        with contextlib.suppress(OSError):
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._fd, 0, _ROOM_BYTES)
            faulthandler.enable(self._fd, all_threads=False)

    def disarm(self) -> None:
        """Note nothing any more."""
        if self._fd >= 0:
            faulthandler.disable()
            os.close(self._fd)
            self._fd = -1
            self.forget()


def _tail(file: str) -> str:
    return "/".join(file.split("/")[-_TAIL:])
