"""The demo and the benchmarks say if the machine is busy with something else."""

import os
import sys

import pytest

from bench import fairness
from bench.report import arguments
from kvstore_client import BadRequest
from kvstore_workers.busy_machine import warn_if_busy, warning


def test_a_busy_machine_is_warned_of_in_one_line() -> None:
    assert warning(2.0, 2) == ""
    text = warning(4.25, 2)
    assert text.startswith("warning: this machine is busy (load 4.2 on 2 processors)")
    assert "\n" not in text


@pytest.mark.parametrize("start", [warn_if_busy, lambda: arguments("a benchmark").parse_args([])])
@pytest.mark.parametrize("load", [0.0, 1e6])
def test_it_is_said_at_the_start(start: object, load: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(start)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    start()
    said = capsys.readouterr()
    assert (said.out, "this machine is busy" in said.err) == ("", load > 1)


def test_a_part_of_a_benchmark_does_not_warn_of_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["fairness", "--part", "bulk", "--endpoint", "nowhere"])
    with pytest.raises(BadRequest):  # it got as far as its daemon
        fairness.main()
    assert capsys.readouterr().err == ""
