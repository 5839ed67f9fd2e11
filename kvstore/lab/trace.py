"""A trace in memory: requests as flat arrays, whatever file they came from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.hints import Hints


class Op(IntEnum):
    """What a request does: see `kvstore.trace_record.UseLine`."""

    REQUEST = 0
    GET = 1
    PUT = 2
    ABANDON = 3


@dataclass(frozen=True, slots=True)
class TraceSpace:
    """A namespace of a trace. `bytes_per_token` is 0 if the trace does not say."""

    page_tokens: int
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time. Page numbers are dense from 0, each of one namespace, and equal only where the whole prefix is."""

    name: str
    spaces: tuple[TraceSpace, ...]
    pages: npt.NDArray[np.uint32]
    """Those of all requests, each from the root on."""
    ends: npt.NDArray[np.int64]
    """Where each request's pages end in `pages`."""
    times: npt.NDArray[np.float64]
    """Seconds."""
    last_tokens: npt.NDArray[np.int64]
    """Tokens of each request's last page: fewer than others have if it is counted though it is not whole."""
    prompt_tokens: npt.NDArray[np.int64]
    space: npt.NDArray[np.int64]
    op: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int64]
    """For `ABANDON`: the first page that is not wanted."""
    hints: Sequence[Hints | None]
    skipped: int = 0
    """Bad lines that were left out."""
    stored_pages: int = 0
    """Pages that the store held when the recording began: what is hit of them counts as missed, as nothing says which they were."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def unique_pages(self) -> int:
        """How many different pages there are."""
        return int(self.pages.max()) + 1 if len(self.pages) else 0

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each request's pages begin in `pages`."""
        return np.append(0, self.ends[:-1])

    def page_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of a whole page, by request."""
        return np.array([space.page_tokens for space in self.spaces], np.int64)[self.space]

    def page_space(self) -> npt.NDArray[np.int64]:
        """The namespace of each page number."""
        found = np.zeros(self.unique_pages, np.int64)
        found[self.pages] = np.repeat(self.space, np.diff(np.append(0, self.ends)))
        return found


class Judge(Protocol):
    """What becomes of bad lines."""

    skipped: int
    """How many were left out."""

    def bad(self, number: int, why: str) -> None:
        """Raises, or counts the line as left out."""


@dataclass(slots=True)
class TraceBuilder:
    """Collects requests in the order of time. Page ids are whatever a file has (64 bits), unique within a `scope`."""

    name: str
    spaces: list[TraceSpace] = field(default_factory=list)
    stored_pages: int = 0
    _lines: list[int] = field(default_factory=list)
    _pages: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _scopes: list[int] = field(default_factory=list)
    _rows: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)
    _hints: list[Hints | None] = field(default_factory=list)

    def add(
        self, time: float, pages: npt.NDArray[np.uint64], last_tokens: int, prompt_tokens: int,
        *, space: int = 0, scope: int = 0, op: Op = Op.REQUEST, first: int = 0, hints: Hints | None = None, line: int = 0,
    ) -> None:  # fmt: skip
        """One request, read from a line of a file."""
        self._lines.append(line)
        self._pages.append(pages)
        self._scopes.append(scope)
        self._rows.append((time, last_tokens, prompt_tokens, space, int(op), first))
        self._hints.append(hints)

    def build(self, judge: Judge | None = None) -> Trace:
        """All requests, sorted by time (those of one time as they were added), with dense page numbers.

        `judge` is told of lines with requests whose ids are not chained: it raises, or such requests are left out. Without one they stay.
        """
        if judge is not None:
            self._leave_out(self._unchained(), judge)
        columns = np.array(self._rows, np.float64).reshape(-1, 6)
        order = np.argsort(columns[:, 0], kind="stable")
        lengths = np.array([len(pages) for pages in self._pages], np.int64)
        numbers = self._numbers(lengths)
        starts = np.append(0, np.cumsum(lengths))[:-1]
        ends = np.cumsum(lengths[order])
        moved = np.repeat(starts[order] - (ends - lengths[order]), lengths[order]) + np.arange(len(numbers))
        whole = columns[order, 1:].astype(np.int64)
        return Trace(
            self.name, tuple(self.spaces), numbers[moved], ends, columns[order, 0], whole[:, 0], whole[:, 1], whole[:, 2],
            whole[:, 3].astype(np.uint8), whole[:, 4], [self._hints[i] for i in order.tolist()], judge.skipped if judge is not None else 0,
            self.stored_pages,
        )  # fmt: skip

    def _unchained(self) -> dict[int, str]:
        """What is wrong with requests in which a page comes after another one than where it was met first, or twice."""
        lengths = np.array([len(pages) for pages in self._pages], np.int64)
        numbers = self._numbers(lengths).astype(np.int64)
        if not len(numbers):
            return {}
        before = np.append(-1, numbers[:-1])
        before[(np.cumsum(lengths) - lengths)[lengths > 0]] = -1
        _, first = np.unique(numbers, return_index=True)
        wrong = np.flatnonzero(before != before[first][numbers])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        ids, found = np.concatenate(self._pages), dict[int, str]()
        for place in wrong.tolist():
            found.setdefault(int(owner[place]), f"block {ids[place]} comes after others than before: ids must be chained, and not repeat")
        return found

    def _leave_out(self, bad: dict[int, str], judge: Judge) -> None:
        told = set()
        for request, why in bad.items():
            if (line := self._lines[request]) not in told:
                told.add(line)
                judge.bad(line, why)
        if bad:
            kept = [request for request in range(len(self._lines)) if request not in bad]
            self._lines = [self._lines[i] for i in kept]
            self._pages = [self._pages[i] for i in kept]
            self._scopes = [self._scopes[i] for i in kept]
            self._rows = [self._rows[i] for i in kept]
            self._hints = [self._hints[i] for i in kept]

    def _numbers(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Dense numbers: scope by scope, as ids mean something only there."""
        numbers = np.empty(int(lengths.sum()), np.uint32)
        scopes = np.repeat(np.array(self._scopes, np.int64), lengths)
        ids = np.concatenate([np.empty(0, np.uint64), *self._pages])
        by_scope = np.argsort(scopes, kind="stable")
        edges = np.flatnonzero(np.diff(scopes[by_scope])) + 1
        used = 0
        for part in np.split(by_scope, edges):
            values, inverse = np.unique(ids[part], return_inverse=True)
            numbers[part] = inverse + used
            used += len(values)
        return numbers
