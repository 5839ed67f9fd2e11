"""Lines of a trace file, plain or compressed, and what becomes of bad ones."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from kvstore.errors import BadRequest

_GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE = 1 << 28
"""Bytes; a recorded session of a day has a few MiB."""

MAX_TOKENS = 1 << 40
MAX_PAGE_TOKENS = 1 << 24

_T = TypeVar("_T")


class BadTrace(BadRequest):
    """A trace can't be read; the message says where and why."""

    code = "bad_trace"


class Lines:
    """Parses a file line by line. A line for which the parser raises ValueError is an error, or skipped and counted."""

    def __init__(self, path: Path, *, skip_bad: bool) -> None:
        self._path = path
        self._skip_bad = skip_bad
        self.skipped = 0
        self.number = 0

    def parsed(self, parse: Callable[[bytes], _T | None]) -> Iterator[_T]:
        """What `parse` makes of each line that is not blank; None leaves it out."""
        for line in self._lines():
            try:
                found = parse(line)
            except (ValueError, RecursionError) as error:
                self.bad(self.number, "nested too deeply" if isinstance(error, RecursionError) else str(error))
                continue
            if found is not None:
                yield found

    def bad(self, number: int, why: str) -> None:
        """A line is bad: raises BadTrace, or counts it as left out."""
        if not self._skip_bad:
            raise BadTrace(f"{self._path}, line {number}: {why}; --skip-bad leaves such lines out")
        self.skipped += 1

    def first(self) -> bytes:
        """The first line that is not blank; empty if there is none."""
        found = next(self._lines(), b"")
        self.number = 0
        return found

    def _lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as raw:
                packed = raw.read(2) == _GZIP_MAGIC
                raw.seek(0)
                with gzip.GzipFile(fileobj=raw) if packed else nullcontext(raw) as file:
                    while line := file.readline(MAX_LINE + 1):
                        self.number += 1
                        if len(line) > MAX_LINE:
                            raise BadTrace(f"{self._path}, line {self.number}: longer than {MAX_LINE >> 20} MiB: is this a trace?")
                        if line.strip():
                            yield line
        except (OSError, EOFError, zlib.error) as error:  # gzip's errors too
            where = f", after line {self.number}" if self.number else ""
            raise BadTrace(f"can't read {self._path}{where}: {error}") from error


def checked_tokens(tokens: int) -> int:
    """A number of tokens that can be counted with. Raises ValueError."""
    if not 0 < tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens, not 1 to {MAX_TOKENS}")
    return tokens


def checked_time(time: float, last: float) -> float:
    """A time that does not go back. Raises ValueError."""
    if not 0 <= time < 1e12:
        raise ValueError(f"the time is {time}, not 0 or more")
    if time < last:
        raise ValueError(f"the time goes back from {last} to {time}")
    return time
