"""Chunks of vLLM's offloading between a buffer of rows and a real daemon: many to a put, each fetched to its row."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_connectors.vllm_chunks import Chunks, chunk_spec, digest
from kvstore_connectors.vllm_link import StoreLink
from kvstore_connectors.vllm_settings import Settings
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

KIB, MIB = 1 << 10, 1 << 20
KEYS = [number.to_bytes(36, "big") for number in range(300)]


@contextmanager
def chunks_of(daemon: DaemonProcess, name: str, rows: "npt.NDArray[Any]", **settings: Any) -> Iterator[Chunks]:
    chosen = Settings(endpoint=daemon.endpoint, **settings)
    link = StoreLink(chosen, name=name, fingerprint=f"revision of {name}", spec=chunk_spec(rows.shape[1]), who="test")
    try:
        yield Chunks(link, rows)
    finally:
        link.close()


def filled(count: int, nbytes: int) -> "npt.NDArray[np.int8]":
    return np.random.default_rng(count).integers(-128, 128, (count, nbytes), dtype=np.int8)


def puts(daemon: DaemonProcess) -> int:
    return int(stat(daemon.http)["totals"]["puts"])


def test_a_job_is_stored_by_few_puts_and_comes_back_to_its_rows(daemon: DaemonProcess) -> None:
    data, order = filled(300, 4 * KIB), np.random.default_rng(1).permutation(300).tolist()
    with chunks_of(daemon, "few-puts", data) as ours, chunks_of(daemon, "few-puts", np.zeros_like(data)) as theirs:
        before = puts(daemon)
        assert ours.link.submit(ours.store(KEYS, order)).result(20) == set(range(300))
        assert puts(daemon) == before + 2
        assert ours.link.submit(ours.store([*KEYS[5:7], KEYS[5]], [*order[5:7], order[5]])).result(20) == {0, 1, 2}, "they are there"
        there = theirs.link.submit(theirs.load([KEYS[7], bytes(72), KEYS[0]], [3, 4, 5])).result(20)
        assert there == {0, 2}
        assert np.array_equal(theirs.rows[3], data[order[7]])
        assert np.array_equal(theirs.rows[5], data[order[0]])
        assert not theirs.rows[4].any()


def test_what_the_store_has_no_room_for_is_told_and_the_rest_is_kept(tmp_path: Path) -> None:
    data = filled(20, MIB)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "16MiB") as own, chunks_of(own, "full", data, durable=True) as ours:
        kept = ours.link.submit(ours.store(KEYS[:20], list(range(20)))).result(30)
        assert 0 < len(kept) < 20
        out = np.zeros_like(data)
        with chunks_of(own, "full", out) as theirs:
            assert theirs.link.submit(theirs.load(KEYS[:20], list(range(20)))).result(20) >= kept
        for number in kept:
            assert np.array_equal(out[number], data[number])


def test_a_store_that_is_away_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = filled(3, 4 * KIB)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB") as own, chunks_of(own, "away", data, save_timeout_s=1.0) as ours:
        own.kill()
        for _ in range(3):
            assert ours.link.submit(ours.store(KEYS[:3], [0, 1, 2])).result(30) == set()
            assert ours.link.submit(ours.load(KEYS[:3], [0, 1, 2])).result(30) == set()
    assert not [record for record in caplog.records if record.exc_info], "that is no bug"


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 65536, 2_949_120, 500_000_000])
def test_chunks_of_any_size_are_pages(nbytes: int) -> None:
    assert chunk_spec(nbytes).page_bytes == nbytes


def test_short_hashes_are_refused(daemon: DaemonProcess, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="prefix_caching_hash_algo"):
        digest(b"short")
    with chunks_of(daemon, "short", filled(2, 4 * KIB)) as ours:
        assert ours.link.submit(ours.store([KEYS[0], b"short"], [0, 1])).result(20) == set()
        assert ours.link.submit(ours.load([b"short"], [1])).result(20) == set()
    assert "prefix_caching_hash_algo" in caplog.text
