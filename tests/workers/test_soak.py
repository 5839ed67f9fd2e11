"""The soak's verdict: what grows is found, what only moves is not."""

import numpy as np
import pytest

from kvstore_workers.soak_report import MEASURES, Measure, Sample, judge

TIMES = [float(t) for t in range(0, 200, 2)]


def samples(grow: str = "", by: float = 0.0) -> list[Sample]:
    """A hundred samples, noisy but flat, one measure of which grows by so much from the first to the last."""
    rng = np.random.default_rng(1)
    base = {measure.name: 100.0 * measure.unit for measure in MEASURES}
    return [
        {name: value * rng.uniform(0.99, 1.01) + (by * at / len(TIMES) if name == grow else 0.0) for name, value in base.items()}
        for at in range(len(TIMES))
    ]


def test_noise_is_flat() -> None:
    assert all(verdict.flat for verdict in judge(TIMES, samples()))


@pytest.mark.parametrize("measure", MEASURES, ids=lambda m: m.name)
def test_growth_is_found(measure: Measure) -> None:
    allowed = max(measure.share * 100 * measure.unit, measure.amount)
    grown = judge(TIMES, samples(measure.name, 2 * allowed))
    assert [verdict.measure.name for verdict in grown if not verdict.flat] == [measure.name]
    found = next(verdict for verdict in grown if verdict.measure is measure)
    assert found.slope == pytest.approx(2 * allowed / 200 * 3600, rel=0.1)


def test_a_leak_of_an_object_an_operation_is_found() -> None:
    """Of 100 bytes, at 100 operations a second, in the 20 minutes that a soak takes: between its quarters lie 12 of them."""
    leaked = 100 * 100 * 16 * 60
    base = samples()
    grown = [{**one, "anonymous memory": 65.0 * (1 << 20) + leaked * at / len(TIMES)} for at, one in enumerate(base)]
    assert [verdict.measure.name for verdict in judge(TIMES, grown) if not verdict.flat] == ["anonymous memory"]


def test_two_arenas_of_python_are_no_leak() -> None:
    """Memory comes in steps of a MiB: what one run happens to need once is not what it leaks."""
    base = samples()
    grown = [{**one, "anonymous memory": float((65 << 20) + (2 << 20) * (at > len(TIMES) // 2))} for at, one in enumerate(base)]
    assert all(verdict.flat for verdict in judge(TIMES, grown))


def test_what_shrinks_is_flat() -> None:
    assert all(verdict.flat for verdict in judge(TIMES, samples("blobs file", -50 * (1 << 20))))
