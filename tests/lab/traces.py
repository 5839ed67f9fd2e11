"""Small traces made up for tests."""

import numpy as np

from kvstore.lab.trace import Op, Trace, TraceBuilder, TraceSpace

PAGE_TOKENS = 4
Prompt = tuple[int, ...]


def trace_of(prompts: list[Prompt], ops: list[Op] | None = None, spaces: list[int] | None = None) -> Trace:
    """A request a second. Pages are equal where the whole prefix is."""
    builder = TraceBuilder("made up", [TraceSpace(PAGE_TOKENS) for _ in range(max(spaces or [0]) + 1)])
    for number, prompt in enumerate(prompts):
        space = spaces[number] if spaces else 0
        ids = [hash((space, prompt[: length + 1])) & 0xFFFFFFFFFFFFFFFF for length in range(len(prompt))]
        op = ops[number] if ops else Op.REQUEST
        builder.add(float(number), np.array(ids, np.uint64), PAGE_TOKENS, len(prompt) * PAGE_TOKENS, space=space, scope=space, op=op)
    return builder.build()
