"""The queue of rebuild jobs, with time as a number: no page in two jobs, claims that end, attempts that are counted, and bounds."""

import pytest

from kvstore.errors import Busy, NotFound, RebuildFailed
from kvstore.store.rebuilding import jobs as rebuild
from kvstore.store.rebuilding.jobs import LINGER_S, MAX_ATTEMPTS, MAX_JOB_PAGES, Job, RebuildQueue

ROOT = b"root".ljust(32)


def keys(*names: object) -> list[bytes]:
    return [repr(name).encode().ljust(32) for name in names]


@pytest.fixture
def ended() -> list[Job]:
    return []


@pytest.fixture
def queue(ended: list[Job]) -> RebuildQueue:
    return RebuildQueue(ended.append)


def want(queue: RebuildQueue, first: int, *names: object, parent: bytes = ROOT, now: float = 0.0) -> list[Job]:
    return queue.want(1, "t", first, parent, keys(*names), now)


def test_a_page_is_in_one_job(queue: RebuildQueue) -> None:
    (one,) = want(queue, 0, "a", "b", "c")
    assert want(queue, 0, "a", "b", "c") == [one]
    assert want(queue, 0, "a", "b") == [one]
    first, second = want(queue, 0, "a", "b", "x", "y")
    assert first is one
    assert (second.first, second.parent, second.keys) == (2, *keys("b"), keys("x", "y"))
    assert want(queue, 0, "a", "b", "x", "y", "z") == [one, second, queue.find(1, *keys("z"))]
    assert queue.want(2, "t", 0, ROOT, keys("a"), 0.0) != [one]
    for job in queue:
        assert all(queue.find(job.number, key) is job for key in job.keys)


def test_long_runs_are_cut_and_follow_on_each_other(queue: RebuildQueue) -> None:
    jobs = want(queue, 5, *range(MAX_JOB_PAGES + 10))
    assert [(job.first, job.last) for job in jobs] == [(5, 5 + MAX_JOB_PAGES), (5 + MAX_JOB_PAGES, 15 + MAX_JOB_PAGES)]
    assert jobs[1].parent == jobs[0].keys[-1]
    assert queue.next_for("t") is jobs[0]
    queue.claim(jobs[0], 1, 0.0, 10)
    assert queue.next_for("t") is None, "its prefix is not there yet"
    queue.done(jobs[0])
    assert queue.next_for("t") is jobs[1]


def test_what_is_waited_for_goes_first(queue: RebuildQueue) -> None:
    (ahead,), (asked,) = want(queue, 0, "a"), want(queue, 0, "b")
    assert queue.next_for("t") is ahead
    queue.join([asked])
    assert queue.next_for("t") is asked
    assert queue.next_for("other tenant") is None
    assert queue.next_for("t", 2) is None


def test_claims_end(queue: RebuildQueue, ended: list[Job]) -> None:
    (job,) = want(queue, 0, "a")
    queue.join([job])
    ids = set()
    for attempt in range(MAX_ATTEMPTS):
        queue.claim(job, attempt, 10.0 * attempt, 5)
        ids.add(job.put_id)
        assert queue.next_for("t") is None
        assert queue.sweep(10.0 * attempt + 4) == []
        queue.renew(attempt, job.id, 10.0 * attempt + 4, 5)
        assert queue.sweep(10.0 * attempt + 8) == []
        with pytest.raises(NotFound):
            queue.renew(attempt + 1, job.id, 0.0, 5)
        assert queue.sweep(10.0 * attempt + 9.5) == [job]
        with pytest.raises(NotFound):
            queue.renew(attempt, job.id, 0.0, 5)
    assert len(ids) == MAX_ATTEMPTS, "two attempts had one put id"
    assert ended == [job]
    assert isinstance(job.error, RebuildFailed)
    assert "did not finish" in job.error.message
    assert len(queue) == 0
    assert queue.find(1, *keys("a")) is None


def test_a_dead_workers_job_is_anothers(queue: RebuildQueue, ended: list[Job]) -> None:
    (job,), (other,) = want(queue, 0, "a"), want(queue, 0, "b")
    queue.claim(job, 7, 0.0, 5)
    queue.claim(other, 8, 0.0, 5)
    assert queue.release_owner(7) == [job]
    assert queue.next_for("t") is job
    queue.claim(job, 8, 0.0, 5)
    queue.done(job)
    queue.done(job)
    assert ended == [job]
    assert job.error is None


def test_what_nobody_wants_is_forgotten(queue: RebuildQueue, ended: list[Job]) -> None:
    (job,) = want(queue, 0, "a")
    (kept,) = queue.want(1, "t", 0, ROOT, keys("b"), 0.0, keep_s=100)
    queue.join([job])
    queue.sweep(50.0)
    queue.leave([job], 60.0)
    queue.sweep(60.0 + LINGER_S / 2)
    assert not ended
    queue.sweep(61.0 + LINGER_S)
    assert ended == [job]
    queue.claim(kept, 1, 90.0, 60)
    queue.sweep(120.0)
    assert ended == [job], "a job that a worker has was forgotten"


def test_moving_the_front(queue: RebuildQueue) -> None:
    (job,) = want(queue, 2, "c", "d", parent=keys("b")[0])
    queue.move_front(job, 0, ROOT, keys("a", "b", "c", "d"))
    assert queue.find(1, *keys("a")) is job
    assert (job.first, job.last) == (0, 4)
    queue.move_front(job, 3, keys("c")[0], keys("d"))
    assert queue.find(1, *keys("c")) is None


def test_bounds(queue: RebuildQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "MAX_JOBS", 3)
    monkeypatch.setattr(rebuild, "MAX_PAGES", 10)
    monkeypatch.setattr(rebuild, "MAX_WAITERS", 2)
    (job,) = want(queue, 0, "a", "b")
    with pytest.raises(Busy):
        want(queue, 0, *range(9))
    want(queue, 0, "c")
    queue.want_check(1, "t", 0, ROOT, keys("z"), 0.0)
    with pytest.raises(Busy):
        want(queue, 0, "d")
    with pytest.raises(Busy):
        queue.want_check(1, "t", 0, ROOT, keys("y"), 0.0)
    assert want(queue, 0, "a") == [job]
    queue.join([job])
    queue.join([job])
    with pytest.raises(Busy):
        queue.join([job])
    assert job.waiters == 2


def test_pages_of_checks_count(queue: RebuildQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "MAX_PAGES", 10)
    check = queue.want_check(1, "t", 0, ROOT, keys(*range(6)), 0.0)
    with pytest.raises(Busy):
        want(queue, 0, *range(100, 105))
    with pytest.raises(Busy):
        queue.want_check(1, "t", 1, ROOT, keys(*range(1, 6)), 0.0)
    assert queue.want_check(1, "t", 0, ROOT, keys(*range(6)), 0.0) is check
    queue.done(check)
    want(queue, 0, *range(100, 110))


def test_checks_are_apart(queue: RebuildQueue) -> None:
    check = queue.want_check(1, "t", 0, ROOT, keys("a", "b"), 0.0)
    assert queue.want_check(1, "t", 0, ROOT, keys("a", "b"), 0.0) is check
    assert queue.find(1, *keys("a")) is None
    (job,) = want(queue, 0, "a", "b")
    assert job is not check
    queue.join([job])
    assert queue.next_for("t") is job
    queue.end_namespace(1, NotFound("dropped"))
    assert len(queue) == 0
    assert isinstance(check.error, NotFound)
