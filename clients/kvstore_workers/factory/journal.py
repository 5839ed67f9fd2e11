"""What has happened in a run, one JSON object a line: what an orchestrator that is started again goes on from, and the report's source."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvstore_workers.factory.messages import Filled, Retired, Stats


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """The run's time zero, on the machine's monotonic clock."""

    at: float


class Arrived(msgspec.Struct, tag="arrived", frozen=True):
    """A turn came. `look_s` is what asking the store took."""

    turn: int
    at: float
    kind: str
    short: bool
    input_tokens: int
    cached_tokens: int
    look_s: float
    probe: bool = False


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """A turn was given up."""

    turn: int
    at: float
    why: str


class Event(msgspec.Struct, tag="event", frozen=True):
    """Something that happened to a worker or to a turn's stage."""

    at: float
    what: str
    worker: str = ""
    turn: int = -1
    why: str = ""


class Sampled(msgspec.Struct, tag="sampled", frozen=True):
    """The factory at one moment: turns by where they are, and bytes of HBM used, idle and moving."""

    at: float
    waiting: int
    filling: int
    ready: int
    decoding: int
    hbm: tuple[int, int, int]
    workers: dict[str, int]


Line = Begun | Arrived | Ended | Event | Sampled | Filled | Retired | Stats
_decoder = msgspec.json.Decoder(Line)


class Journal:
    """Appends lines, each with the system before the next; what a killed process had not finished is left out when it is read."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._file, b"\n")

    def add(self, line: Line) -> None:
        """Append a line."""
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_journal(path: Path) -> Iterator[Line]:
    """All whole lines of a journal; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                if line.strip():
                    yield _decoder.decode(line)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # cut short by a kill
