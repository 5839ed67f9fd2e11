"""Two threads at one row of pieces."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.tiers.together import Together


@pytest.mark.parametrize("busy", [False, True])
def test_all_is_done_once_and_told_in_order(*, busy: bool) -> None:
    """Also if the other thread has no time."""
    done: list[int] = []
    told: list[int] = []
    until = threading.Event()
    with ThreadPoolExecutor(1) as other:
        if busy:
            other.submit(until.wait, 20)
        Together(100, done.append, told.append).run(other)
        until.set()
    assert sorted(done) == list(range(100))
    assert told == sorted(set(told))
    assert told[-1] == 100


def test_what_comes_out_of_order_is_told_once_those_before_are_there() -> None:
    second = threading.Event()
    told: list[int] = []

    def do(number: int) -> None:
        if number == 0:
            assert second.wait(20)
        elif number == 2:  # so 1 is done
            assert not told
            second.set()

    with ThreadPoolExecutor(1) as other:
        Together(3, do, told.append).run(other)
    assert told in ([2, 3], [3])


def test_a_thread_that_comes_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that can't start another thread says so when the work is in its queue already."""
    first, begun, done = threading.Event(), threading.Event(), list[int]()

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def do(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            first.set()
            begun.wait(0.5)
        else:
            begun.set()
            time.sleep(0.1)
        done.append(number)

    with ThreadPoolExecutor(2) as other:
        other.submit(first.wait, 20)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_more)
            Together(2, do, lambda _: None).run(other)
        assert sorted(done) == [0, 1], "it returned while the other thread was at work"


def test_an_error_ends_it_and_none_is_at_work_after_that() -> None:
    begun: list[int] = []
    both, at_work = threading.Barrier(2), threading.Event()

    def do(number: int) -> None:
        begun.append(number)
        if number < 2:
            both.wait(20)
        if number == 0:
            raise ValueError("bad")
        if number == 1:
            at_work.wait(0.1)
            at_work.set()

    with ThreadPoolExecutor(1) as other:
        with pytest.raises(ValueError, match="bad"):
            Together(1000, do, lambda _: None).run(other)
        assert at_work.is_set(), "it returned while the other thread was at work"
    assert len(begun) < 1000
