"""A client whose hints lie: it marks all that it does as waiting for a tool, and never comes back."""

import numpy as np

from kvstore.hints import NO_HINTS, Ended, Hints, Turn
from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.trace import Trace, TraceBuilder, TraceSpace
from kvstore.tiers.policies.make import make_policies

_HONEST, _LIAR = 0, 1
_ROUNDS, _SESSIONS, _PAGES = 400, 12, 6


def trace_with(lie: Hints) -> Trace:
    """Sessions of one namespace that go on turn by turn, with true hints, beside contexts of another that are used once."""
    rng, builder = np.random.default_rng(5), TraceBuilder("lies", [TraceSpace(16, 1.0), TraceSpace(16, 1.0)])
    length, fresh = [3] * _SESSIONS, 1 << 30
    true = Hints("", Turn.MAIN, Ended.TOOL_CALL)
    for second in range(_ROUNDS):
        session = int(rng.integers(_SESSIONS))
        length[session] = length[session] + 1 if length[session] < 40 else 3
        pages = np.arange(length[session], dtype=np.uint64) + np.uint64(session << 20)
        builder.add(float(second), pages, 16, 16 * len(pages), space=_HONEST, scope=_HONEST, hints=true)
        once = np.arange(fresh, fresh + _PAGES, dtype=np.uint64)
        fresh += _PAGES
        builder.add(second + 0.5, once, 16, 16 * _PAGES, space=_LIAR, scope=_LIAR, hints=lie)
    return builder.build()


def honest_hits(trace: Trace) -> float:
    """The share of its pages that the honest namespace hits."""
    simulation = Simulation(trace, [1, 1], LabConfig(200), *make_policies("classifier", 200, 0))
    outcome = simulation.run()
    mine = trace.space == _HONEST
    return float(outcome.hit_pages[mine].sum() / np.diff(np.append(0, trace.ends))[mine].sum())


def test_hints_that_lie_push_no_other_namespace_out() -> None:
    silent = honest_hits(trace_with(NO_HINTS))
    lied_to = honest_hits(trace_with(Hints("", Turn.MAIN, Ended.TOOL_CALL)))
    assert silent > 0.3, "nothing is hit: this test shows nothing"
    assert lied_to > silent - 0.02
