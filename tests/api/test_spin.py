"""Looking again before sleeping: what comes is found, and what does not pay is left."""

import asyncio
import socket
import time
from itertools import pairwise

import pytest

from kvstore.api.wire.spin import Spin, spin_s
from kvstore.loop import Loop, SpinningSelector


def test_what_comes_is_returned() -> None:
    spin, answers = Spin(), iter([[], [], ["it"]])
    assert spin.worth()
    assert spin.look(lambda: next(answers), 60) == ["it"]
    assert spin.worth()


def test_it_is_tried_less_and_less_often_while_nothing_comes() -> None:
    spin = Spin()
    tried = []
    for wait in range(1000):
        if spin.worth():
            tried.append(wait)
            assert spin.look(list) == []
    assert tried[:6] == [0, 2, 6, 14, 30, 62]
    gaps = [later - earlier for earlier, later in pairwise(tried[6:])]
    assert set(gaps) == {64}
    while not spin.worth():
        pass
    spin.tried(came=True)
    assert all(spin.worth() for _ in range(10))


def test_it_is_looked_for_longer_where_there_are_bytes_to_look_at() -> None:
    looks = [0.0, 0.0]
    for which, nbytes in enumerate((0, 20 << 20)):
        began = time.monotonic()
        assert Spin().look(list, spin_s(nbytes)) == []
        looks[which] = time.monotonic() - began
    assert looks[1] >= spin_s(20 << 20) > 100 * spin_s(0)
    assert looks[0] >= spin_s(0)


def test_a_selector_that_spins_finds_what_is_ready_and_keeps_to_its_timeout() -> None:
    here, there = socket.socketpair()
    with here, there, SpinningSelector() as selector:
        key = selector.register(here, 1)
        assert selector.select(0) == []
        selector.expect()
        assert selector.select(0) == []
        assert selector.select(0.001) == []  # spun in vain, and slept
        there.send(b"x")
        for timeout in (None, 0.0, -1.0, 1.0):
            selector.expect()
            assert selector.select(timeout) == [(key, 1)]


def test_what_has_come_already_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there, SpinningSelector() as selector:
        key = selector.register(here, 1)
        selector.expect()
        there.send(b"x")
        assert selector.select(0) == [(key, 1)]
        here.recv(1)
        monkeypatch.setattr(Spin, "look", lambda *_: pytest.fail("it spun for what had come"))
        assert selector.select(0.001) == []


def test_timers_and_threads_go_on_in_such_a_loop() -> None:
    async def work() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.expect()
        await asyncio.sleep(0.001)
        return await asyncio.to_thread(lambda: "done")

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(work()) == "done"
