"""What a run came to, from its journal."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_workers.factory.arrivals import PROBE_NUMBER
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.cost import CostModel
from kvstore_workers.factory.journal import Arrived, Begun, Ended, Event, Line, Sampled, read_journal
from kvstore_workers.factory.messages import Filled, Retired, Stats

PARTS = ("queue", "match", "wait", "fetch", "compute")


@dataclass(slots=True)
class Journalled:
    """A journal's lines by what they are; of what is said of a turn several times the last counts."""

    begun: float = 0.0
    arrived: dict[int, Arrived] = field(default_factory=dict)
    filled: dict[int, Filled] = field(default_factory=dict)
    retired: dict[int, Retired] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    samples: list[Sampled] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Journalled":
        """A journal from its file."""
        return cls.of(read_journal(path))

    @classmethod
    def of(cls, lines: Iterable[Line]) -> "Journalled":
        """A journal from its lines."""
        found = cls()
        for line in lines:
            match line:
                case Begun():
                    found.begun = line.at
                case Arrived():
                    found.arrived[line.turn] = line
                case Filled():
                    found.filled[line.turn] = line
                case Retired():
                    found.retired[line.turn] = line
                case Ended():
                    found.ended[line.turn] = line
                case Stats():
                    found.stats[line.name] = line
                case Sampled():
                    found.samples.append(line)
                case Event():
                    found.events.append(line)
        return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    return {"mean": float(np.mean(values)), "p50": float(np.percentile(values, 50)), "p95": float(np.percentile(values, 95))}


def _summary(parts: Iterable[dict[str, float]]) -> dict[str, dict[str, float]]:
    """TTFT and its parts over turns."""
    found = list(parts)
    return {name: _spread([p[name] for p in found]) for name in ("ttft", *PARTS)}


def _parts(arrived: Arrived, filled: Filled) -> dict[str, float]:
    """TTFT in parts. `wait` is for the accelerators once the prefix was asked for, `queue` all before a worker took it up."""
    return {
        "ttft": filled.token_at - arrived.at, "queue": filled.begun_at - arrived.at, "match": filled.match_s, "wait": filled.wait_s,
        "fetch": filled.fetch_s, "compute": filled.compute_s,
    }  # fmt: skip


def report(journal: Journalled, cost: CostModel) -> dict[str, Any]:
    """The figures of a run. Times in seconds, sizes in bytes."""
    traced = {n: a for n, a in journal.arrived.items() if not a.probe}
    parts = {n: _parts(a, journal.filled[n]) for n, a in traced.items() if n in journal.filled}
    done = [r for n, r in journal.retired.items() if n in traced]
    seconds = max((r.done_at for r in done), default=journal.begun) - journal.begun
    kinds = sorted({f.kind for n, f in journal.filled.items() if n in parts})
    by_kind = {kind: _summary(p for n, p in parts.items() if journal.filled[n].kind == kind) for kind in kinds}
    computed = sum(journal.filled[n].compute_s for n in parts)
    alone = sum(cost.fill_s(traced[n].input_tokens, 0) for n in parts)
    cached = sum(journal.filled[n].cached_tokens for n in parts)
    hbm = {name: sum(getattr(s, f"hbm_{name}") for s in journal.stats.values()) for name in ("used", "idle", "moving")}
    ready = np.array([s.ready for s in journal.samples if s.at <= journal.begun + seconds], float)
    return {
        "turns": len(traced), "done": len(done), "given_up": len([n for n in journal.ended if n in traced]), "seconds": seconds,
        "ttft": _summary(parts.values()), "ttft_by_kind": by_kind,
        "ttft_short": _spread([p["ttft"] for n, p in parts.items() if traced[n].short]),
        "input_tokens_s": sum(traced[n].input_tokens for n in parts) / seconds if seconds else 0.0,
        "output_tokens_s": sum(r.output_tokens for r in done) / seconds if seconds else 0.0,
        "followed": sum(r.followed for r in done), "utilisation": _utilisation(journal.stats.values()),
        "ready_mean": float(ready.mean()) if len(ready) else 0.0, "ready_std": float(ready.std()) if len(ready) else 0.0,
        "moved": dict(sum((Counter(s.moved) for s in journal.stats.values()), Counter())),
        "hbm_byte_seconds": hbm, "hbm_idle_share": hbm["idle"] / hbm["used"] if hbm["used"] else 0.0,
        "hbm_dropped_sets": sum(s.hbm_dropped for s in journal.stats.values()),
        "compute_s": computed, "compute_s_store_off": alone, "cached_tokens": cached,
        "cached_share": cached / max(sum(traced[n].input_tokens for n in parts), 1),
        "wrong_bytes": sum(s.wrong_bytes for s in journal.stats.values()),
        "verified_bytes": sum(s.verified_bytes for s in journal.stats.values()),
        "events": Counter(e.what for e in journal.events), "streaming": streaming(journal),
    }  # fmt: skip


def _utilisation(stats: Iterable[Stats]) -> dict[str, float]:
    """The share of their time that workers of a kind computed."""
    busy: Counter[str] = Counter()
    alive: Counter[str] = Counter()
    for one in stats:
        busy.update(one.busy_s)
        alive.update(one.alive_s)
    return {kind.value: busy[kind.value] / alive[kind.value] for kind in Kind if alive[kind.value] > 0}


def streaming(journal: Journalled) -> dict[str, Any]:
    """Layer streaming beside whole-prefix fetches: TTFT of the pairs of probes, and the median of their ratios."""
    pairs = []
    for number in range(0, len(journal.arrived), 2):
        both = [PROBE_NUMBER + number, PROBE_NUMBER + number + 1]
        if not all(n in journal.filled and n in journal.arrived for n in both):
            break
        ttft = {journal.filled[n].streamed: journal.filled[n].token_at - journal.arrived[n].at for n in both}
        pairs.append({"cached_tokens": journal.filled[both[0]].cached_tokens, "streamed": ttft[True], "whole": ttft[False]})
    if not pairs:
        return {}
    ratios = [p["streamed"] / p["whole"] for p in pairs]
    return {"pairs": pairs, "ratio": float(np.median(ratios)), "least": min(ratios), "most": max(ratios)}
