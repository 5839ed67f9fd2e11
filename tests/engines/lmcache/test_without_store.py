"""A store that is down, slow or full never stops LMCache."""

import logging
import signal
import time
from pathlib import Path

import pytest
import torch

from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.lmcache.objects import empty_obj, key, load, lookup, make_adapter, memory_obj, same, store

KEYS = [key(n) for n in range(3)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvstore_connectors")]


def test_a_store_that_was_never_there(caplog: pytest.LogCaptureFixture) -> None:
    adapter = make_adapter("127.0.0.1:9", lookup_timeout_s=1)
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert lookup(adapter, KEYS) == []
                assert not store(adapter, KEYS, [memory_obj(n) for n in range(3)]).is_successful()
                assert load(adapter, KEYS, [empty_obj() for _ in KEYS]) == []
            adapter.submit_unlock(KEYS)
            adapter.delete(KEYS)
        assert len([w for w in warnings(caplog) if "away" in w]) == 1
        assert not adapter.report_status()["is_healthy"]
    finally:
        adapter.close()


def test_a_store_that_is_killed_while_keys_are_locked(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "one", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        adapter = make_adapter(daemon.endpoint, lookup_timeout_s=1, transfer_timeout_s=2)
        store(adapter, KEYS, [memory_obj(n) for n in range(3)])
        assert lookup(adapter, KEYS) == [0, 1, 2]
        daemon.kill()
        assert load(adapter, KEYS, [empty_obj() for _ in KEYS]) in ([], [0, 1, 2])  # what is mapped can still be copied
        adapter.submit_unlock(KEYS)
        assert lookup(adapter, KEYS) == []
        adapter.close()


def test_a_store_that_stops_answering_and_comes_back(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "one", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        adapter = make_adapter(daemon.endpoint, lookup_timeout_s=0.5, transfer_timeout_s=0.5)
        store(adapter, KEYS, [memory_obj(n) for n in range(3)])
        daemon.send_signal(signal.SIGSTOP)
        try:
            assert lookup(adapter, KEYS) == []
            assert not store(adapter, [key(9)], [memory_obj(9)]).is_successful()  # not even asked: it is away
        finally:
            daemon.send_signal(signal.SIGCONT)
        for _ in range(1000):
            if lookup(adapter, KEYS) == [0, 1, 2]:
                break
            time.sleep(0.05)
        target = empty_obj()
        assert load(adapter, KEYS[:1], [target]) == [0]
        assert same(target, memory_obj(0))
        adapter.close()


def test_a_full_store_keeps_what_it_can_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    big = {"shape": (8 << 20,), "dtype": torch.uint8}
    with DaemonProcess(tmp_path / "one", "--dram", "32MiB", "--ssd", "32MiB") as daemon:
        adapter = make_adapter(daemon.endpoint, durable=True, lease_s=600, transfer_timeout_s=5)
        with caplog.at_level(logging.WARNING):
            done = [store(adapter, [key(n)], [memory_obj(n, **big)]).is_successful() for n in range(8)]
        assert done[0]
        assert not all(done)
        assert len([w for w in warnings(caplog) if "no room" in w or "away" in w]) >= 1
        kept = [n for n in range(8) if done[n]]
        for n in kept:
            target = empty_obj(**big)
            assert load(adapter, [key(n)], [target]) == [0]
            assert same(target, memory_obj(n, **big))
        adapter.close()
