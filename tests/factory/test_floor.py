"""The floor: every turn is somewhere, whoever comes and goes; and whole simulated runs."""

import random

import pytest

from bench.factory_control import COST, admission, load, simulate, steady
from kvstore_workers.factory.controls import Kind, Reconfiguration, SmoothedAdmission
from kvstore_workers.factory.cost import OutputLengths
from kvstore_workers.factory.floor import Floor, FloorSettings
from kvstore_workers.factory.load import TurnRules, simulated_turns
from kvstore_workers.factory.simulation import Plant, Simulation
from kvstore_workers.factory.turns import CancelOrder, ChangeOrder, DecodeOrder, FillOrder, Order, Stage, Turn

RULES = TurnRules(COST, OutputLengths(1), deadline_s=1000.0)


def turn(number: int, *, new: int = 20_000, cached: int = 0, now: float = 0.0) -> Turn:
    return RULES.turn(number, now, new + cached, cached)


def floor(fill_depth: int = 2, reserved_fills: int = 1, reserved_slots: int = 1) -> Floor:
    """A floor that admits what comes."""
    settings = FloorSettings(fill_depth, reserved_fills, reserved_slots)
    made = Floor(SmoothedAdmission(50.0, burst=100.0, correct_s=0.01), settings)
    made.orders(-10.0)
    return made


def stage(f: Floor, number: int) -> Stage:
    return f.turns[number].stage


def test_a_turn_goes_through_the_stages_and_decode_follows_its_fill() -> None:
    f = floor(reserved_fills=0, reserved_slots=0)
    f.join("p", Kind.PREFILL, 4)
    f.join("d", Kind.DECODE, 4)
    f.arrive(turn(0))
    assert f.orders(0.0) == [FillOrder("p", 0, 0)]
    f.started(0, 0, 0.1)
    assert f.orders(0.1) == [DecodeOrder("d", 0, 0, follow=True)]
    f.filled(0, 0, 1.0)
    assert stage(f, 0) is Stage.DECODING
    f.retired(0, 5.0)
    assert stage(f, 0) is Stage.DONE
    assert (f.view(5.0).decoding, f.ready, f.retired_turns) == (0, 0, 1)


def test_a_turn_that_nobody_follows_waits_in_the_ready_buffer() -> None:
    f = floor(reserved_fills=0, reserved_slots=0)
    f.join("p", Kind.PREFILL, 4)
    f.arrive(turn(0))
    f.orders(0.0)
    f.started(0, 0, 0.1)
    f.filled(0, 0, 1.0)
    assert f.orders(1.0) == []
    assert f.ready == 1
    f.join("d", Kind.DECODE, 4)
    assert f.orders(1.0) == [DecodeOrder("d", 0, 0, follow=False)]


def test_midfills_and_prefills_go_to_their_workers_and_to_others_if_there_are_none() -> None:
    f = floor(reserved_fills=0)
    f.join("p", Kind.PREFILL, 4)
    f.join("m", Kind.MIDFILL, 4)
    f.arrive(turn(0))
    f.arrive(turn(1, new=1000, cached=50_000))
    assert set(f.orders(0.0)) == {FillOrder("p", 0, 0), FillOrder("m", 1, 0)}
    f.leave("m", 1.0)
    assert f.orders(1.0) == [FillOrder("p", 1, 1)]


def test_places_are_kept_for_short_turns() -> None:
    f = floor(fill_depth=2, reserved_fills=1)
    f.join("p", Kind.PREFILL, 4)
    for number in range(3):
        f.arrive(turn(number))
    assert f.orders(0.0) == [FillOrder("p", 0, 0)], "the second place is kept"
    f.arrive(turn(9, new=600, now=0.5))
    assert FillOrder("p", 9, 0) in f.orders(1.0), "a short one does not get it"


def test_what_a_lost_worker_had_goes_to_others_and_its_late_words_count_for_nothing() -> None:
    f = floor(reserved_fills=0, reserved_slots=0)
    for name, kind in (("p1", Kind.PREFILL), ("d1", Kind.DECODE), ("d2", Kind.DECODE)):
        f.join(name, kind, 2)
    f.arrive(turn(0))
    f.orders(0.0)
    f.started(0, 0, 0.1)
    (followed,) = f.orders(0.1)
    assert isinstance(followed, DecodeOrder)
    f.join("p2", Kind.PREFILL, 2)
    f.leave("p1", 0.5)
    assert f.orders(0.5) == [CancelOrder(followed.worker, 0), FillOrder("p2", 0, 1)]
    f.filled(0, 0, 0.6)
    assert stage(f, 0) is Stage.FILLING, "a word of the lost attempt was believed"
    f.filled(0, 1, 1.0)
    (order,) = f.orders(1.0)
    assert isinstance(order, DecodeOrder)
    f.leave(order.worker, 1.5)
    (again,) = f.orders(1.5)
    assert isinstance(again, DecodeOrder)
    assert again.worker != order.worker
    assert again.attempt > order.attempt
    f.lost(0, again.attempt, Stage.DECODING, 2.0)
    assert f.orders(2.0) == [FillOrder("p2", 0, 1)], "its pages are gone: it is filled again"
    assert f.turns[0].restarts == 3
    f.lost(0, 1, Stage.FILLING, 2.5)
    assert stage(f, 0) is Stage.GIVEN_UP


def test_nothing_outlives_its_deadline() -> None:
    f = floor()
    f.join("p", Kind.PREFILL, 4)
    for number in range(4):
        f.arrive(turn(number))
    f.orders(0.0)
    f.tick(1001.0)
    assert all(t.stage is Stage.GIVEN_UP for t in f.turns.values())
    assert {type(o) for o in f.orders(1001.0)} == {CancelOrder}
    assert f.view(1001.0).waiting == f.view(1001.0).filling == 0


def test_after_a_restart_workers_say_what_they_have() -> None:
    f = floor()
    filled = turn(2)
    filled.stage = Stage.READY
    for t in (turn(0), turn(1), filled):
        f.arrive(t)
    assert f.join("p", Kind.PREFILL, 4, fills=[(0, 3), (7, 0)]) == [7], "a turn that it does not know, or that is done"
    assert f.join("d", Kind.DECODE, 4, decodes=[(2, 0), (1, 0)]) == [1]
    f.filled(0, 3, 1.0)
    f.retired(2, 2.0)
    assert (f.turns[0].stage, f.turns[2].stage) == (Stage.READY, Stage.DONE)


def test_a_turn_that_is_done_is_nowhere_any_more() -> None:
    """After a restart a worker may say that it has decoded what the orchestrator knows only as waiting."""
    f = floor()
    f.arrive(turn(0))
    f.retired(0, 1.0)
    f.arrive(turn(1))
    f.join("p", Kind.PREFILL, 4)
    f.join("d", Kind.DECODE, 4)
    assert f.orders(2.0) == [FillOrder("p", 1, 0)]
    assert f.join("p", Kind.PREFILL, 4, fills=[(0, 0)]) == [0]
    assert stage(f, 0) is Stage.DONE


def check(f: Floor) -> None:
    """Every turn is in one place, and workers have what turns say."""
    fills = [n for w in f.workers.values() for n in w.fills]
    decodes = [n for w in f.workers.values() for n in w.decodes]
    assert len(fills) == len(set(fills))
    assert len(decodes) == len(set(decodes))
    for t in f.turns.values():
        places = [t.number in f._backlog.all(), *(t.number in q.all() for q in f._admitted.values()), t.number in f._ready.all()]
        queued = t.stage in (Stage.WAITING, Stage.ADMITTED, Stage.READY)
        assert sum(places) == (1 if queued else 0), t
        assert (t.number in fills) == (t.stage is Stage.FILLING), t
        assert (t.number in decodes) == (t.decode_worker is not None), t
        if t.stage is Stage.DECODING:
            assert t.decode_worker is not None
    for worker in f.workers.values():
        assert len(worker.decodes) <= worker.slots
        assert len(worker.fills) <= f.settings.fill_depth


@pytest.mark.parametrize("seed", range(6))
def test_at_random(seed: int) -> None:
    """Turns, workers that come, go and change, words late or twice: nothing is lost, and all of it ends."""
    random_ = random.Random(seed)
    kinds = [Kind.AGGREGATED] if seed % 4 == 3 else [Kind.PREFILL, Kind.MIDFILL, Kind.DECODE]
    f = Floor(admission("direct" if seed % 2 else "smoothed"), FloorSettings(most_restarts=50), reconfiguration=Reconfiguration())
    said: list[Order] = []
    now, names = 0.0, 0
    for step in range(600):
        now += random_.uniform(0, 0.5)
        choice = random_.random()
        if step < 300 and choice < 0.3:
            f.arrive(RULES.turn(len(f.turns), now, random_.randrange(100, 40_000), 0, aggregated=kinds == [Kind.AGGREGATED]))
        elif choice < 0.36 or len(f.workers) < 4:
            f.join(f"w{(names := names + 1)}", random_.choice(kinds), 3)
        elif choice < 0.4:
            f.leave(random_.choice(list(f.workers)), now)
        elif said:
            order = random_.choice(said[-40:])
            tell(f, order, random_, now)
        f.tick(now)
        said += f.orders(now)
        check(f)
    for kind in kinds:
        f.join(f"last {kind.value}", kind, 3)
    for _ in range(40_000):
        now += 0.05
        f.tick(now)
        said += f.orders(now)
        if all(t.over for t in f.turns.values()):
            break
        for worker in list(f.workers.values()):
            for number in list(worker.fills):
                f.filled(number, f.turns[number].fill_attempt, now)
            for number in [n for n in worker.decodes if f.turns[n].stage is Stage.DECODING]:
                f.retired(number, now)
            if worker.target is not None and not worker.fills and not worker.decodes:
                f.changed(worker.name, worker.target)
    check(f)
    assert all(t.over for t in f.turns.values())
    assert sum(t.stage is Stage.DONE for t in f.turns.values()) == f.retired_turns > 0


def tell(f: Floor, order: Order, random_: random.Random, now: float) -> None:
    """Something about an order, which may be long out of date."""
    match order:
        case FillOrder():
            told = random_.choice([f.started, f.filled, f.filled])
            told(order.turn, order.attempt, now)
            if random_.random() < 0.1:
                f.lost(order.turn, order.attempt, Stage.FILLING, now)
        case DecodeOrder():
            if random_.random() < 0.2:
                f.lost(order.turn, order.attempt, Stage.DECODING, now)
            elif f.turns[order.turn].stage is Stage.DECODING or random_.random() < 0.05:
                f.retired(order.turn, now)
        case ChangeOrder():
            f.changed(order.worker, order.kind)


# --- whole runs --------------------------------------------------------------------------------------------------------


def test_the_ready_buffer_is_steadier_with_smoothed_admission() -> None:
    requests = load(1)
    runs = {control: steady(simulate(control, requests, 1)) for control in ("direct", "smoothed")}
    cv = {}
    for control, (samples, _) in runs.items():
        ready = [s.ready for s in samples]
        mean = sum(ready) / len(ready)
        cv[control] = (sum((r - mean) ** 2 for r in ready) / len(ready)) ** 0.5 / mean
    assert cv["direct"] > 3 * cv["smoothed"]
    assert runs["direct"][1] == pytest.approx(runs["smoothed"][1], rel=0.05)


def test_aggregated_workers_do_it_all_and_the_same_run_twice_is_the_same() -> None:
    requests = load(1)[:150]

    def run() -> list[tuple[float, float]]:
        plant = Plant({Kind.AGGREGATED: 4}, 8, COST)
        turns = simulated_turns(requests, RULES, 2.0, aggregated=True)
        return [(t.filled_at, t.done_at) for t in Simulation(Floor(admission("smoothed")), plant, turns).run().turns]

    first = run()
    assert first == run()
    assert all(0 < filled < done for filled, done in first)


def test_a_worker_changes_its_kind_where_the_work_is() -> None:
    """Three midfill workers and nothing but prefills: some of them turn to it, and it ends sooner."""
    requests = load(1)[:200]
    seconds = {}
    for name, control in (("fixed", None), ("changing", Reconfiguration())):
        plant = Plant({Kind.PREFILL: 1, Kind.MIDFILL: 3, Kind.DECODE: 2}, 16, COST)
        turns = [RULES.turn(r.number, 0.0, min(r.input_tokens, 20_000), 0) for r in requests]
        run = Simulation(Floor(SmoothedAdmission(8.0), reconfiguration=control), plant, turns).run()
        assert all(t.stage is Stage.DONE for t in run.turns)
        seconds[name] = run.seconds
        if control is not None:
            assert control.changes >= 1
    assert seconds["changing"] < 0.8 * seconds["fixed"]
