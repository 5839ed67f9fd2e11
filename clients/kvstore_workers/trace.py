"""Request traces: reading them, and what an infinite cache could hit in them."""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kvstore.api.wire import BadRequest

BLOCK_TOKENS = 512
EXCERPT = "mooncake_conversation_500.jsonl.gz"
AGENTS = "coding_agents_8.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` has an id for each whole block of the prompt; equal ids mean equal whole prefixes."""

    number: int
    timestamp_ms: int
    input_tokens: int
    blocks: tuple[int, ...]
    tail_block: int | None
    """Id of the last, partial block. It is not a page: only whole pages exist, the worker recomputes the rest."""


def excerpt_path(name: str = EXCERPT) -> Path:
    """An excerpt carried with the project: of chat, or `AGENTS`."""
    return Path(str(files("kvstore_workers") / "traces" / name))


def read_mooncake(path: Path) -> list[Request]:
    """A trace in Mooncake's JSONL format (gzip or plain). Raises BadRequest with the line number of what is malformed."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            return list(_parse(lines, path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"can't read the trace {path}: {error}") from error


def _parse(lines: Iterable[str], path: Path) -> Iterator[Request]:
    for number, line in enumerate(lines):
        try:
            data = json.loads(line)
            tokens, ids = int(data["input_length"]), [int(i) for i in data["hash_ids"]]
            timestamp = int(data["timestamp"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(f"{path}, line {number + 1}: not a request ({type(error).__name__}: {error})") from error
        whole = min(tokens // BLOCK_TOKENS, len(ids))
        yield Request(number, timestamp, tokens, tuple(ids[:whole]), ids[whole] if whole < len(ids) else None)


def model_hits(requests: Iterable[Request]) -> tuple[int, int]:
    """Tokens hit with room for everything, and tokens asked for. Independent of the store: a set of block ids."""
    seen: set[int] = set()
    hit = asked = 0
    for request in requests:
        known = 0
        while known < len(request.blocks) and request.blocks[known] in seen:
            known += 1
        seen.update(request.blocks)
        hit, asked = hit + known * BLOCK_TOKENS, asked + request.input_tokens
    return hit, asked


def dependencies(requests: Iterable[Request]) -> list[set[int]]:
    """For each request, the earlier ones that first brought in a block it begins with: it waits for their commits."""
    introduced: dict[int, int] = {}
    found = []
    for request in requests:
        needs = set()
        for block in request.blocks:
            if block not in introduced:
                break
            needs.add(introduced[block])
        for block in request.blocks:
            introduced.setdefault(block, request.number)
        found.append(needs)
    return found
