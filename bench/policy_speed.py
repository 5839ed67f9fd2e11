"""How fast the policy lab replays chat traces: requests a second of CPU time, the classifier beside leaf-LRU, DRAM alone.

CPU time and not the clock, so that others on the machine disturb it less. The policies take turns; each repetition replays the whole trace.
"""

import time
from pathlib import Path

from bench.policy import FILES, TRACES, cell
from bench.report import Report, arguments
from kvstore.lab.compare import Comparison
from kvstore.lab.readers import ReadOptions, read_trace

_NAMES = ("conversation", "toolagent")
_POLICIES = ("classifier", "lru")


def replay(comparison: Comparison, policy: str, percent: float) -> float:
    """Requests a second of CPU time."""
    started = time.process_time()
    comparison.run(policy, comparison.percent(percent))
    return len(comparison.trace) / (time.process_time() - started)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="folder of the trace files [default: ../shared/traces beside the repository]"
    )
    settings = parser.parse_args()
    percents, repetitions = ((5.0,), 1) if settings.quick else ((1.0, 5.0, 25.0), 3)
    report = Report("policy_speed", {"percent": percents, "repetitions": repetitions})
    for name in _NAMES:
        file, hours = FILES[name]
        comparison = Comparison(read_trace(settings.traces / file, ReadOptions(start_hours=hours)), hints=False)
        for percent in percents:
            for repetition in range(repetitions):
                for policy in _POLICIES:
                    report.add(cell(name, percent, policy), repetition, replay(comparison, policy, percent), "requests/s")
            report.ratio(f"speed_{name}_{percent:g}%_vs_lru", cell(name, percent, "classifier"), cell(name, percent, "lru"))
    report.show("requests a second of CPU time")
    report.write(settings.json)
    report.draw(settings.png, "requests a second of CPU time")


if __name__ == "__main__":
    main()
