"""Who gets which job: simulated lanes of given speeds, to the end, without a clock."""

import heapq
from collections import Counter

import pytest

from kvstore_client.dealing import Ask, Dealer, Rate

MIB = 1 << 20
SPEED = 50 * MIB
TICK = 0.01
NEVER = 1e9


class Job:
    """A mebibyte with a name."""

    def __init__(self, name: int) -> None:
        self.name = name


class Lanes:
    """Lanes that bring their jobs one after the other, at a speed that can change."""

    def __init__(self, speeds: list[float], jobs: int, *, twice: bool = True) -> None:
        self.speeds = dict(enumerate(speeds))
        self.dealer: Dealer[Job] = Dealer([Job(n) for n in range(jobs)], lambda job: MIB, least_window=2 * MIB)
        self.twice = twice
        self.now = 0.0
        self.done: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self._free_at = dict.fromkeys(self.speeds, 0.0)
        self._coming: list[tuple[float, int, Ask[Job]]] = []
        for lane in self.speeds:
            self.dealer.up(lane, Rate())

    def stall(self, lane: int) -> list[int]:
        """From now on nothing comes over a lane. Returns what it had."""
        self.speeds[lane] = 0.0
        self._free_at[lane] = NEVER
        self._coming = [(NEVER if ask.lane == lane else at, tie, ask) for at, tie, ask in self._coming]
        heapq.heapify(self._coming)
        return [ask.job.name for _, _, ask in self._coming if ask.lane == lane]

    def run(self, until: float = 1000.0) -> None:
        """Let time pass until all is done."""
        tie = 0
        while self.dealer.left and self.now < until:
            for ask in self.dealer.deal(self.now, twice=self.twice):
                self.asked[ask.lane] += 1
                start = max(self.now, self._free_at[ask.lane])
                speed = self.speeds[ask.lane]
                self._free_at[ask.lane] = start + (ask.nbytes / speed if speed else NEVER)
                tie += 1
                heapq.heappush(self._coming, (self._free_at[ask.lane], tie, ask))
            self.now = min(self._coming[0][0], self.now + TICK) if self._coming else self.now + TICK
            while self._coming and self._coming[0][0] <= self.now:
                _, _, ask = heapq.heappop(self._coming)
                self.dealer.arrived(ask.lane, ask.nbytes, self.now)
                stalled = [twin.lane for _, _, twin in self._coming if twin.job is ask.job and self.dealer.stalled(twin.lane, self.now)]
                self.dealer.done(ask.job)
                self.done[ask.job.name] += 1
                for lane in stalled:
                    self.dealer.down(lane)


@pytest.mark.parametrize("slow", [1, 0.25, 0.05])
def test_lanes_of_any_speed_end_together(slow: float) -> None:
    lanes = Lanes([SPEED, SPEED, SPEED, SPEED * slow], 300)
    lanes.run()
    assert sorted(lanes.done) == list(range(300))
    ideal = 300 * MIB / (SPEED * (3 + slow))
    assert lanes.now < ideal * 1.05 + 2 * MIB / SPEED


def test_a_lane_that_stalls_loses_what_it_had_to_the_others() -> None:
    lanes = Lanes([SPEED] * 4, 200)
    lanes.run(until=0.4)
    had = lanes.asked[2]
    stuck = lanes.stall(2)
    lanes.run()
    assert stuck
    assert all(lanes.done[name] == 1 for name in stuck), "what it had came from elsewhere"
    assert sorted(lanes.done) == list(range(200))
    assert lanes.asked[2] <= had + 2, "a stalled lane is asked for nothing more"
    assert lanes.now < 2 * 200 * MIB / (3 * SPEED)


def test_a_lane_that_is_gone_gives_back_in_order() -> None:
    lanes = Lanes([SPEED, SPEED], 10)
    first = lanes.dealer.deal(0.0)
    had = [ask.job.name for ask in first if ask.lane == 0]
    assert had
    assert [ask.job.name for ask in lanes.dealer.down(0)] == had
    again = lanes.dealer.deal(0.0)
    assert [ask.job.name for ask in again] == had[: len(again)]


def test_jobs_that_can_not_be_on_two_lanes_never_are() -> None:
    lanes = Lanes([SPEED, SPEED / 50], 40, twice=False)
    lanes.run()
    assert sum(lanes.asked.values()) == 40
    assert set(lanes.done.values()) == {1}


def test_a_lane_far_behind_is_named_where_a_job_can_be_on_one_only() -> None:
    lanes = Lanes([SPEED, SPEED], 40, twice=False)
    lanes.run(until=0.2)
    assert not lanes.dealer.behind(lanes.now)
    lanes.dealer.arrived(0, MIB, lanes.now + 5)
    assert lanes.dealer.behind(lanes.now + 5) == [1]


def test_alone_a_lane_takes_everything_however_slow() -> None:
    lanes = Lanes([SPEED / 1000], 5)
    lanes.run(until=1e6)
    assert sorted(lanes.done) == list(range(5))
    assert set(lanes.done.values()) == {1}
    assert not lanes.dealer.behind(lanes.now)
