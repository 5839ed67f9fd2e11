"""kvstore's own records (`kvstore serve --record`)."""

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import BadRequest
from kvstore.hints import Ended, Hints, Turn
from kvstore.lab.readers.lines import MAX_PAGE_TOKENS, BadTrace, Lines, checked_time, checked_tokens
from kvstore.lab.trace import Op, Trace, TraceBuilder, TraceSpace
from kvstore.trace_record import FORMAT, VERSION, Header, NamespaceLine, UseLine, decode_ids, decode_line
from kvstore.trace_record import Hints as LineHints

_ENDED = {"tool_use": Ended.TOOL_CALL, "end_turn": Ended.END_TURN, "subagent_done": Ended.SUBAGENT_DONE}
_OPS = {"request": Op.REQUEST, "get": Op.GET, "put": Op.PUT, "abandon": Op.ABANDON}


@dataclass(slots=True)
class _Reader:
    builder: TraceBuilder
    lines: Lines
    numbers: dict[int, int] = field(default_factory=dict)
    last: float = 0.0
    headed: bool = False

    def take(self, line: bytes) -> bool:
        found = decode_line(line)
        if isinstance(found, Header):
            self._header(found)
        elif isinstance(found, NamespaceLine):
            self._namespace(found)
        else:
            self._use(found)
        return True

    def _header(self, header: Header) -> None:
        if self.headed:
            raise ValueError("a second header")
        if header.format != FORMAT or header.version != VERSION:
            raise BadTrace(
                f"a trace of format {header.format!r}, version {header.version}: this kvstore reads {FORMAT!r}, version {VERSION}"
            )
        self.builder.stored_pages = header.stored_pages
        self.headed = True

    def _namespace(self, line: NamespaceLine) -> None:
        if line.ns in self.numbers:
            raise ValueError(f"namespace {line.ns} is there twice")
        if not 0 < line.page_tokens <= MAX_PAGE_TOKENS or not 0 <= line.bytes_per_token < 1e12:
            raise ValueError(f"namespace {line.ns} has pages of {line.page_tokens} tokens of {line.bytes_per_token} bytes")
        self.numbers[line.ns] = len(self.builder.spaces)
        self.builder.spaces.append(TraceSpace(line.page_tokens, line.bytes_per_token))

    def _use(self, line: UseLine) -> None:
        if line.ns not in self.numbers:
            raise ValueError(f"namespace {line.ns} is used before the line that describes it")
        space = self.numbers[line.ns]
        size = self.builder.spaces[space].page_tokens
        time = checked_time(line.t, self.last)
        pages = decode_ids(line.pages)
        if not len(pages) * size <= checked_tokens(line.tokens):
            raise ValueError(f"a prompt of {line.tokens} tokens in {len(pages)} whole pages of {size}")
        if line.op == "abandon" and not 0 <= line.first <= len(pages):
            raise ValueError(f"pages from {line.first} on of {len(pages)} are abandoned")
        hints = None if line.hints is None else _hints(line.hints)
        op, number = _OPS[line.op], self.lines.number
        self.builder.add(time, pages, size, line.tokens, space=space, scope=space, op=op, first=line.first, hints=hints, line=number)
        self.last = time


def _hints(line: LineHints) -> Hints:
    """What a client said, as far as a record tells. Raises ValueError."""
    session = b"" if line.session is None else str(line.session).encode()
    turn = Turn.SUB_AGENT if line.role == "subagent" else None
    try:
        return Hints(session, turn, _ENDED.get(line.end or ""), line.ttl_s or 0.0)
    except BadRequest as error:
        raise ValueError(error.message) from error


def read_recorded(path: Path, lines: Lines) -> Trace:
    """All uses. A prompt shorter than a page is a request without pages."""
    reader = _Reader(TraceBuilder(path.name), lines)
    for _ in lines.parsed(reader.take):
        pass
    return reader.builder.build(lines)
