"""What is not worth writing to SSD, in whole runs of the lab."""

import pytest

from kvstore.lab.compare import Comparison
from kvstore.lab.measure import Row
from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.synthetic import documents_and_scans, random_reuse
from kvstore.lab.tiers import DRAM, SSD
from kvstore.lab.trace import Trace
from kvstore.tiers.policies.make import make_policies


def run(trace: Trace, dram: float, ssd: float, loss: float | None) -> Row:
    comparison = Comparison(trace, ssd_loss=loss)
    return comparison.run("classifier", comparison.percent(dram), comparison.percent(ssd))


def test_what_is_read_once_is_not_written_and_what_is_written_stays_longer() -> None:
    trace = documents_and_scans(1_600, 60)
    everything, chosen = run(trace, 1, 3, None), run(trace, 1, 3, 0.002)
    assert (chosen.ssd_written_bytes or 0) < 0.7 * (everything.ssd_written_bytes or 0)
    assert chosen.hit_ratio > everything.hit_ratio
    assert (chosen.written_per_hit_byte or 0) < 0.7 * (everything.written_per_hit_byte or 0)


def test_where_nothing_can_be_known_next_to_nothing_is_lost() -> None:
    trace = random_reuse(1_500, 250)
    assert run(trace, 5, 25, 0.002).hit_ratio > run(trace, 5, 25, None).hit_ratio - 0.006


@pytest.mark.parametrize("loss", [None, 0.0, 1.0])
def test_what_is_above_a_page_on_ssd_is_there_too(loss: float | None) -> None:
    """Whatever is refused: a page on SSD without those above it is of no use."""
    trace = random_reuse(700, 150)
    dram, ssd = make_policies("classifier", 60, 300, loss)
    simulation = Simulation(trace, [1], LabConfig(60, 300), dram, ssd)
    simulation.run()
    tree, place = simulation.spaces[0].tree, simulation.spaces[0].place
    held = [slot for slot in tree.live_slots().tolist() if place[slot] & SSD]
    assert held or loss == 1.0
    for slot in held:
        assert (place[tree.path_slots(tree.path_to(slot))] & SSD).all()
    assert (place[tree.live_slots()] & (DRAM | SSD)).all()
