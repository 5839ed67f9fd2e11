"""When which request comes: traces at their times, each so many times as fast, and probes made of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore_workers.factory.settings import Settings
from kvstore_workers.trace import BLOCK_TOKENS, Request, read_mooncake

_SPACE = 1 << 40
"""Traces have nothing to do with each other: block ids of each are moved by so much."""
_PROBES = 1 << 50
PROBE_NUMBER = 1_000_000
_PROBE_BLOCKS = 9


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes, in seconds from the run's begin. Probes are not of the trace."""

    number: int
    at: float
    request: Request
    stream: bool = True
    probe: bool = False


def arrivals(settings: Settings) -> list[Arrival]:
    """The requests of all traces that come within the run, in order."""
    found: list[tuple[float, Request]] = []
    for index, (path, speed) in enumerate(settings.traces):
        shift = index * _SPACE
        for request in read_mooncake(Path(path)):
            at = request.timestamp_ms / 1000 / speed
            if at <= settings.seconds:
                tail = None if request.tail_block is None else request.tail_block + shift
                found.append((at, replace(request, blocks=tuple(b + shift for b in request.blocks), tail_block=tail)))
    found.sort(key=lambda item: item[0])
    return [Arrival(number, at, replace(r, number=number)) for number, (at, r) in enumerate(found[: settings.turns])]


def probe(known: Sequence[Arrival], number: int, at: float) -> Arrival | None:
    """A midfill on one of the longest prompts that were replayed, with new blocks after it; one of each two is not streamed.

    The two of a pair have equal prefixes and equally many new tokens; which comes first alternates.
    """
    longest = sorted((a for a in known if a.request.blocks), key=lambda a: len(a.request.blocks))[-3:]
    if not longest:
        return None
    base = longest[number // 2 % len(longest)].request.blocks
    new = tuple(_PROBES + number * _PROBE_BLOCKS + n for n in range(_PROBE_BLOCKS))
    blocks = base + new
    turn = PROBE_NUMBER + number
    return Arrival(turn, at, Request(turn, 0, len(blocks) * BLOCK_TOKENS, blocks, None), stream=(number + number // 2) % 2 == 0, probe=True)
