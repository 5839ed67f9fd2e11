"""Mooncake's FAST '25 traces: one request a line, with an id for each block of 512 tokens.

Ids are chained: equal ids mean equal whole prefixes. The last block may be partial; it counts as a page with fewer tokens.
"""

from pathlib import Path

import msgspec
import numpy as np

from kvstore.lab.readers.lines import Lines, checked_time, checked_tokens
from kvstore.lab.trace import Trace, TraceBuilder, TraceSpace

PAGE_TOKENS = 512


class _Request(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, lines: Lines, page_tokens: int = 0) -> Trace:
    """All requests. Blocks of another size than 512 tokens are read with their `page_tokens`."""
    size = page_tokens or PAGE_TOKENS
    builder = TraceBuilder(path.name, [TraceSpace(size)])
    decoder = msgspec.json.Decoder(_Request)
    last = 0.0

    def parse(line: bytes) -> bool:
        nonlocal last
        request = decoder.decode(line)
        time = checked_time(request.timestamp / 1000, last)
        if checked_tokens(request.input_length) and not request.hash_ids:
            raise ValueError(f"a request of {request.input_length} tokens in {len(request.hash_ids)} blocks")
        if not 0 <= min(request.hash_ids) <= max(request.hash_ids) < 1 << 64:
            raise ValueError("block ids are whole numbers from 0 on")
        partial = request.input_length - (len(request.hash_ids) - 1) * size
        if not 0 < partial <= size:
            raise ValueError(f"{request.input_length} tokens are not {len(request.hash_ids)} blocks of {size}; is --page-tokens right?")
        builder.add(time, np.array(request.hash_ids, np.uint64), partial, request.input_length, line=lines.number)
        last = time
        return True

    for _ in lines.parsed(parse):
        pass
    return builder.build(lines)
