"""Recorded coding-agent sessions (kv-cache-tester): one session a line, its requests with an id for each small block.

Ids are chained within a session and mean nothing outside. A page is several blocks; the rest of a prompt is dropped. Each session gets a
start time; sub-agents are branches of their own. Of near-duplicate sessions, which the same person recorded twice, the longest is kept.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvstore.hints import Ended, Hints, Turn
from kvstore.lab.readers.lines import BadTrace, Lines, checked_tokens
from kvstore.lab.trace import Trace, TraceBuilder, TraceSpace

DEFAULT_PAGE_TOKENS = 512
_SAME_REQUESTS = 3
_ENDED = {"tool_use": Ended.TOOL_CALL, "end_turn": Ended.END_TURN}


class _Request(msgspec.Struct):
    t: float
    type: str
    input: int = msgspec.field(name="in", default=0)
    output: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    stop: str | None = None
    requests: "list[_Request]" = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    hash_id_scope: str
    requests: list[_Request]
    line: int = 0
    """Where it was read."""


def read_weka(
    path: Path, lines: Lines, page_tokens: int = 0, *, hours: float = 24.0, seed: int = 1, keep_duplicates: bool = False
) -> Trace:
    """All sessions, with starts drawn over `hours`."""
    size = page_tokens or DEFAULT_PAGE_TOKENS
    decoder = msgspec.json.Decoder(_Session)

    def parse(line: bytes) -> _Session:
        session = decoder.decode(line)
        _check(session, size)
        session.line = lines.number
        return session

    sessions = list(lines.parsed(parse))
    if len({session.id for session in sessions}) < len(sessions):
        raise BadTrace(f"{path}: two sessions have one id")
    if not keep_duplicates:
        sessions = _without_duplicates(sessions)
    sessions.sort(key=lambda session: session.id)
    draw = random.Random(seed)
    builder = TraceBuilder(path.name, [TraceSpace(size)])
    for number, session in enumerate(sessions):
        start = draw.uniform(0, hours * 3600)
        _add(builder, number, session, start, size)
    return builder.build(lines)


def _check(session: _Session, size: int) -> None:
    if session.block_size <= 0 or size % session.block_size:
        raise ValueError(f"blocks of {session.block_size} tokens do not make pages of {size}; see --page-tokens")
    if session.hash_id_scope != "local":
        raise ValueError(f"ids of scope {session.hash_id_scope!r}: only sessions with ids of their own (local) can be read")
    if not session.requests:
        raise ValueError(f"session {session.id} has no requests")
    for request in _all(session.requests):
        if not 0 <= request.t < 1e12:
            raise ValueError(f"session {session.id}: the time is {request.t}, not 0 or more")
        if request.type != "subagent" and checked_tokens(request.input) and not request.hash_ids:
            raise ValueError(f"session {session.id}: a request of {request.input} tokens in {len(request.hash_ids)} blocks")
        if request.hash_ids and not 0 <= min(request.hash_ids) <= max(request.hash_ids) < 1 << 64:
            raise ValueError(f"session {session.id}: block ids are whole numbers from 0 on")
    _check_order(session.id, session.requests)


def _check_order(name: str, requests: list[_Request]) -> None:
    last = 0.0
    for request in requests:
        if request.t < last:
            raise ValueError(f"session {name}: the time goes back from {last} to {request.t}")
        last = request.t
        _check_order(name, request.requests)


def _all(requests: list[_Request]) -> Iterator[_Request]:
    for request in requests:
        yield request
        yield from _all(request.requests)


def _without_duplicates(sessions: list[_Session]) -> list[_Session]:
    """Of sessions with equal sizes of their first requests, the longest."""
    longest: dict[tuple[tuple[int, int], ...], _Session] = {}
    for session in sessions:
        main = [request for request in session.requests if request.type != "subagent"]
        sizes = tuple((request.input, request.output) for request in main[:_SAME_REQUESTS])
        if sizes not in longest or len(session.requests) > len(longest[sizes].requests):
            longest[sizes] = session
    return list(longest.values())


def _add(builder: TraceBuilder, number: int, session: _Session, start: float, size: int) -> None:
    blocks = size // session.block_size
    branches = [(start, session.requests, False)]
    for branch, (offset, requests, nested) in enumerate(branches):
        own = [request for request in requests if request.type != "subagent"]
        branches += [(offset + request.t, request.requests, True) for request in requests if request.type == "subagent"]
        turn = Turn.SUB_AGENT if nested else Turn.MAIN
        for request in own:
            pages = np.array(request.hash_ids[blocks - 1 :: blocks], np.uint64)  # a chained id names all before it
            ended = Ended.SUBAGENT_DONE if nested and request is own[-1] else _ENDED.get(request.stop or "")
            hints = Hints(f"{number}/{branch}", turn, ended)
            builder.add(offset + request.t, pages, size, request.input, scope=number, hints=hints, line=session.line)
