"""`kvstore simulate` from end to end, on a small trace."""

import gzip
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.lab.compare import Comparison, size_for
from kvstore.lab.cost import PrefillCost
from kvstore.lab.measure import Row
from kvstore.lab.synthetic import random_reuse
from kvstore.lab.trace import Op
from kvstore_workers.trace import excerpt_path
from tests.commands import kvstore
from tests.lab.traces import PAGE_TOKENS, trace_of


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvstore("simulate", *arguments)


def test_all_policies_beside_the_bound(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = simulate(
        str(excerpt_path()), "--policy", "s3fifo", "--dram", "3%", "--ssd", "200MiB", "--bytes-per-token", "100", "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["s3fifo", "lru", "arc", "clairvoyant"]
    for name, row in rows.items():
        assert 0 < row["hit_ratio"] <= rows["clairvoyant"]["hit_ratio"] <= found["unlimited"]
        assert name in done.stdout
        assert 0 < row["saved_s"] < row["all_s"]
        if name != "clairvoyant":
            assert row["hit_ratio"] == pytest.approx(row["dram_hit_ratio"] + row["ssd_hit_ratio"])
            assert row["ssd_written_bytes"] > 0
            assert row["dram_bytes"] == int(found["unique_bytes"] * 0.03)
    assert found["requests"] == 500


def test_a_sweep_says_what_suffices(tmp_path: Path) -> None:
    path, out = tmp_path / "trace", tmp_path / "out.json"
    path.write_bytes(b"".join(gzip.decompress(excerpt_path().read_bytes()).splitlines(keepends=True)[:60]))
    done = simulate(str(path), "--policy", "lru", "--sweep", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "90% of what unlimited room would give" in done.stdout
    found = json.loads(out.read_text())
    ratios = [row["hit_ratio"] for row in found["rows"] if row["policy"] == "lru"]
    assert len(ratios) == 8
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(found["unlimited"])
    sizes = [goal["dram_bytes"] for goal in found["sizing"] if goal["policy"] == "lru"]
    assert 0 < sizes[0] <= sizes[1] <= found["unique_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "fifo"), "no policy 'fifo'"),
        (("--dram", "4GiB"), "--bytes-per-token"),
        (("--dram", "many"), "is not a size"),
        (("--dram", "-5%"), "out of range"),
        (("--bytes-per-token", "1e11"), "are the most"),
        (("--ssd-admission", "some"), "all or classifier"),
        (("--format", "csv"), "no trace format 'csv'"),
        (("--png", "picture.png"), "pip install matplotlib"),
        (("--page-tokens", "64"), "is --page-tokens right?"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    if "--png" in arguments and find_spec("matplotlib"):
        pytest.skip("matplotlib is here")
    done = simulate(str(excerpt_path()), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_skipped_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = [{"timestamp": n, "input_length": 512, "hash_ids": [n % 3]} for n in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{\n")
    assert "line 10" in simulate(str(path)).stderr
    done = simulate(str(path), "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert "1 bad line left out" in done.stdout


def test_tokens_and_seconds_are_those_of_the_hits() -> None:
    trace = trace_of([(1, 2, 3), (1, 2, 4), (9,)], [Op.REQUEST, Op.GET, Op.PUT])
    comparison = Comparison(trace, 10.0, PrefillCost(1.0, 0.0))
    row = comparison.run("lru", comparison.percent(100))
    assert comparison.measure.looked_up == 6 * PAGE_TOKENS
    assert row.hit_ratio == pytest.approx(2 / 6)
    assert (row.saved_s, row.all_s) == (2 * PAGE_TOKENS, 6 * PAGE_TOKENS)
    assert row.ssd_written_bytes == 0


def test_a_page_is_written_to_ssd_once_while_its_copy_is_there() -> None:
    trace = trace_of([(1,), (2,), (1,), (2,), (1,), (2,)])
    comparison = Comparison(trace, batch=0.0)
    row = comparison.run("lru", comparison.percent(50), comparison.percent(100))
    assert row.hit_ratio == pytest.approx(4 / 6)
    assert row.ssd_hit_ratio == pytest.approx(4 / 6)
    assert row.ssd_written_bytes == comparison.percent(100)
    assert row.written_per_hit_byte == pytest.approx(2 / 4)


def test_prefill_costs_more_further_on() -> None:
    cost = PrefillCost(2.0, 1.0)
    assert cost.seconds(np.array([0, 3]), np.array([3, 5])).tolist() == [2 * 3 + 0 + 1 + 2, 2 * 2 + 3 + 4]


def test_the_size_for_a_ratio_lies_between_those_tried() -> None:
    rows = [Row("lru", size, 0, 0.0, 0.0, ratio) for size, ratio in ((100, 0.2), (400, 0.4), (800, 0.4))]
    assert size_for(rows, "lru", 0.1) == 100
    assert size_for(rows, "lru", 0.3) == 200
    assert size_for(rows, "lru", 0.5) is None


def test_on_random_reuse_lru_hits_its_share() -> None:
    comparison = Comparison(random_reuse(3000, 200))
    assert comparison.run("lru", comparison.percent(50)).hit_ratio == pytest.approx(0.5, abs=0.06)
