"""What admission does to the ready buffer between fill and decode, in simulated time.

The same turns of a real trace, the same drawn output lengths, the same workers, slots and floor; only admission differs:

- `direct`: tied to decode retirements. A decode that retires admits what decode has room for just then.
- `smoothed`: from the smoothed work in the factory and the predicted service rate, with a ready buffer as its set point.
- `direct_buffered`, to tell causes apart: as `direct`, with the smoothed control's set point counted as room.

More turns wait than can be decoded, so that admission decides. Measured between 15% and 85% of all retirements: the
coefficient of variation of the ready buffer, sampled every 0.25 s, and turns retired a second. One repetition a seed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import Report, arguments
from kvstore_workers.factory.controls import Admission, DirectAdmission, Kind, SmoothedAdmission
from kvstore_workers.factory.cost import CostModel, OutputLengths
from kvstore_workers.factory.floor import Floor, FloorSettings
from kvstore_workers.factory.load import TurnRules, simulated_turns
from kvstore_workers.factory.simulation import Plant, Run, Sample, Simulation
from kvstore_workers.trace import Request, excerpt_path, read_mooncake

TARGET = 16.0
SPEED = 4.0
COST = CostModel()
PLANT = Plant({Kind.PREFILL: 8, Kind.MIDFILL: 2, Kind.DECODE: 2}, slots=16, cost=COST)
SETTINGS = FloorSettings(follow=False)
"""All turns pass through the ready buffer: none is handed over while its fill is under way."""
CONTROLS = ("direct", "smoothed", "direct_buffered")
_FROM, _TO = 0.15, 0.85


def load(repeats: int) -> list[Request]:
    """The excerpt, several times on end, each time with other blocks."""
    excerpt = read_mooncake(excerpt_path())
    span = excerpt[-1].timestamp_ms + 300
    found = [
        replace(r, timestamp_ms=r.timestamp_ms + n * span, blocks=tuple(b + n * 1_000_000 for b in r.blocks))
        for n in range(repeats)
        for r in excerpt
    ]
    return [replace(r, number=number) for number, r in enumerate(found)]


def admission(control: str) -> Admission:
    """A control by its name."""
    if control == "smoothed":
        return SmoothedAdmission(TARGET)
    return DirectAdmission(TARGET if control == "direct_buffered" else 0.0)


def simulate(control: str, requests: list[Request], seed: int) -> Run:
    """One run."""
    rules = TurnRules(COST, OutputLengths(seed), deadline_s=86_400.0)
    return Simulation(Floor(admission(control), SETTINGS), PLANT, simulated_turns(requests, rules, SPEED)).run()


def steady(run: Run) -> tuple[list[Sample], float]:
    """The samples of the measured span, and turns retired a second in it."""
    done = sorted(t.done_at for t in run.turns)
    first, last = int(len(done) * _FROM), int(len(done) * _TO)
    samples = [s for s in run.samples if done[first] <= s.time <= done[last]]
    return samples, (last - first) / (done[last] - done[first])


def measure(report: Report, seeds: int, repeats: int) -> dict[str, Run]:
    """All seeds, the controls in turn. Returns the runs of the first seed."""
    requests = load(repeats)
    shown: dict[str, Run] = {}
    for seed in range(1, seeds + 1):
        for control in CONTROLS:
            run = simulate(control, requests, seed)
            shown.setdefault(control, run)
            samples, rate = steady(run)
            ready: npt.NDArray[np.float64] = np.array([s.ready for s in samples], np.float64)
            ttft = [t.filled_at - t.arrived for t in run.turns]
            for name, value, unit in (
                ("ready_cv", float(ready.std() / ready.mean()), "1"),
                ("ready_mean", float(ready.mean()), "turns"),
                ("ready_empty", float((ready == 0).mean()), "share of time"),
                ("being_filled", float(np.mean([s.filling for s in samples])), "turns"),
                ("throughput", rate, "turns/s"),
                ("ttft_p95", float(np.percentile(ttft, 95)), "s"),
            ):
                report.add(f"{control}_{name}", seed, value, unit)
    for control in ("direct", "direct_buffered"):
        report.ratio(f"ready_cv_{control}_vs_smoothed", f"{control}_ready_cv", "smoothed_ready_cv")
        report.ratio(f"throughput_{control}_vs_smoothed", f"{control}_throughput", "smoothed_throughput")
    pairs = zip(report.values("direct_ready_cv"), report.values("smoothed_ready_cv"), strict=True)
    report.ratios["ready_cv_direct_vs_smoothed_least"] = round(min(a / b for a, b in pairs), 4)
    return shown


def draw(runs: dict[str, Run], path: Path) -> None:
    """The ready buffer, what is filled and what is decoded over time, a control a panel. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels: Any = figure.subplots(len(runs), 1, sharex=True, sharey=True)
    for axes, (control, run) in zip(panels, runs.items(), strict=True):
        times = [s.time for s in run.samples]
        axes.fill_between(times, [s.ready for s in run.samples], step="post", alpha=0.5, label="ready")
        axes.plot(times, [s.filling for s in run.samples], linewidth=0.8, label="admitted, being filled")
        axes.plot(times, [s.decoding for s in run.samples], linewidth=0.8, label="decoding")
        axes.set_ylabel("turns")
        axes.set_title(control)
    panels[0].legend(loc="upper right", ncols=3)
    panels[-1].set_xlabel("simulated seconds")
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="of the output lengths")
    parser.add_argument("--repeats", type=int, default=2, help="how often the trace's excerpt is run through, with other blocks")
    settings = parser.parse_args()
    if settings.quick:
        settings.seeds = 2
    if settings.png:
        from kvstore.lab.picture import can_draw

        can_draw()
    shown = {"seeds": settings.seeds, "trace": excerpt_path().name, "repeats": settings.repeats, "speed": SPEED, "ready_target": TARGET,
             "workers": {kind.value: n for kind, n in PLANT.workers.items()}, "slots": PLANT.slots, "clock": "simulated"}  # fmt: skip
    report = Report("factory_control", shown)
    runs = measure(report, settings.seeds, settings.repeats)
    report.show("admission and the ready buffer, in simulated time")
    report.write(settings.json)
    if settings.png:
        draw(runs, settings.png)


if __name__ == "__main__":
    main()
