"""The doctor's checks on given facts, both verdicts of each; and all of it once for real."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.doctor import CHECKS, Facts, Finding, Setup, read_facts, worst
from kvstore.doctor import checks as c
from kvstore.doctor.probes import DiskSpeed, measure_disk, measure_loopback
from kvstore.machine import Disk, Memory
from kvstore.store.datadir import FORMAT
from tests.commands import kvstore

MIB, GIB = 1 << 20, 1 << 30

SETUP = Setup(Path("/data"), dram=64 * GIB, ssd=1024 * GIB, segment=64 * MIB, max_connections=1024)
GOOD = Facts(
    setup=SETUP, memory=Memory(256 * GIB, 200 * GIB, 0, False), daemon_running=False, descriptors=1 << 20, locked_memory=None,
    address_space=None, core_size=0, shmem_huge="advise", anonymous_huge="madvise", max_maps=65530, overcommit=0, filesystem="ext4",
    mount="/", space=Disk(2048 * GIB, 0), cpus=16, cpu_quota=None, load=1.0, clock="tsc", kernel=(6, 1), python="3.11.9",
    debug=False, disk=DiskSpeed(GIB, 0.001, 2 * GIB, True, 256 * MIB), loopback=4 * GIB,
    store_format=FORMAT,
)  # fmt: skip


def test_a_good_machine_has_nothing_to_mend() -> None:
    findings = [finding for check in CHECKS if (finding := check(GOOD)) is not None]
    assert len(findings) == len(CHECKS)
    assert [f for f in findings if f.verdict != "ok" or f.mend] == []
    assert worst(findings) == "ok"


BAD: list[tuple[c.Check, dict[str, Any], str, str]] = [
    (c.descriptors, {"descriptors": 1024}, "bad", "ulimit -Hn"),
    (c.locked_memory, {"locked_memory": 8 * MIB}, "warn", "LimitMEMLOCK"),
    (c.address_space, {"address_space": 100 * GIB}, "bad", "LimitAS"),
    (c.core_dumps, {"core_size": None}, "warn", "LimitCORE=0"),
    (c.maps, {"max_maps": 1024}, "bad", "sysctl -w vm.max_map_count="),
    (c.overcommit, {"overcommit": 2}, "bad", "vm.overcommit_memory=0"),
    (c.memory, {"memory": Memory(32 * GIB, 30 * GIB, 0, True)}, "bad", "MemoryMax"),
    (c.memory, {"memory": Memory(256 * GIB, 70 * GIB, 0, False)}, "warn", "--dram"),
    (c.memory, {"memory": Memory(256 * GIB, 70 * GIB, 0, False), "daemon_running": True}, "ok", ""),
    (c.swap, {"memory": Memory(256 * GIB, 200 * GIB, GIB, False)}, "warn", "swapoff"),
    (c.shmem_huge_pages, {"shmem_huge": "never"}, "ok", ""),
    (c.shmem_huge_pages, {"shmem_huge": "deny"}, "warn", "echo advise"),
    (c.shmem_huge_pages, {"shmem_huge": "never", "kernel": (5, 15)}, "warn", "echo advise"),
    (c.anonymous_huge_pages, {"anonymous_huge": "always"}, "warn", "echo madvise"),
    (c.data_directory, {"data_dir_is": "no folder"}, "bad", "--data-dir"),
    (c.data_directory, {"data_dir_is": "closed"}, "bad", "chown"),
    (c.data_directory, {"data_dir_is": "to be made"}, "ok", ""),
    (c.filesystem, {"filesystem": "nfs4"}, "bad", "--data-dir"),
    (c.filesystem, {"filesystem": "fuse.sshfs"}, "bad", "--data-dir"),
    (c.filesystem, {"filesystem": "overlay"}, "bad", "volume"),
    (c.filesystem, {"filesystem": "tmpfs"}, "bad", "--data-dir"),
    (c.filesystem, {"filesystem": "btrfs"}, "warn", "--data-dir"),
    (c.filesystem, {"filesystem": "unheard-of"}, "warn", "--data-dir"),
    (c.disk_space, {"space": Disk(512 * GIB, 0)}, "bad", "--ssd"),
    (c.disk_space, {"space": Disk(1030 * GIB, 0)}, "warn", "--ssd"),
    (c.disk_space, {"space": Disk(512 * GIB, 700 * GIB)}, "ok", ""),
    (c.store_format, {"store_format": FORMAT - 1}, "bad", "kvstore migrate --data-dir /data"),
    (c.store_format, {"store_format": FORMAT + 1}, "bad", "another --data-dir"),
    (c.disk_writes, {"disk": DiskSpeed(100 * MIB, 0.001, GIB, True, 1)}, "warn", "NVMe"),
    (c.disk_writes, {"disk": DiskSpeed(MIB, 0.001, GIB, True, 1)}, "bad", "NVMe"),
    (c.disk_sync, {"disk": DiskSpeed(GIB, 0.05, GIB, True, 1)}, "warn", "power-loss"),
    (c.disk_sync, {"disk": DiskSpeed(GIB, 0.5, GIB, True, 1)}, "bad", "power-loss"),
    (c.disk_reads, {"disk": DiskSpeed(GIB, 0.001, 100 * MIB, True, 1)}, "warn", "--dram"),
    (c.disk_reads, {"disk": DiskSpeed(GIB, 0.001, MIB, False, 1)}, "bad", "--dram"),
    (c.loopback, {"loopback": 500.0 * MIB}, "warn", "idle"),
    (c.loopback, {"loopback": 50.0 * MIB}, "bad", "idle"),
    (c.cpus, {"cpus": 1}, "warn", "at least two"),
    (c.cpus, {"cpu_quota": 0.5}, "warn", "at least two"),
    (c.load, {"load": 30.0}, "warn", "quiet"),
    (c.clock, {"clock": "hpet"}, "warn", "tsc"),
    (c.kernel, {"kernel": (5, 10)}, "warn", "newer"),
    (c.python, {"debug": True}, "warn", "PYTHONDEVMODE"),
]


@pytest.mark.parametrize(("check", "changes", "verdict", "mend"), BAD)
def test_each_check_sees_what_is_wrong(check: c.Check, changes: dict[str, Any], verdict: str, mend: str) -> None:
    finding = check(replace(GOOD, **changes))
    assert finding is not None
    assert finding.verdict == verdict
    assert mend in finding.mend
    assert bool(finding.mend) == (verdict != "ok")


@pytest.mark.parametrize(("kernel", "value"), [((6, 1), "never, but they are asked for one by one"), ((5, 15), "never")])
def test_huge_pages_that_are_never_given_unasked(kernel: tuple[int, int], value: str) -> None:
    finding = c.shmem_huge_pages(replace(GOOD, shmem_huge="never", kernel=kernel))
    assert finding is not None
    assert finding.value == value


def test_every_check_is_tried_and_unknown_facts_are_not_judged() -> None:
    assert {check for check, *_ in BAD} == set(CHECKS)
    names = ("shmem_huge", "anonymous_huge", "max_maps", "overcommit", "clock", "disk", "loopback")
    unknown: dict[str, Any] = dict.fromkeys(names)
    silent = {check.__name__ for check in CHECKS if check(replace(GOOD, **unknown)) is None}
    assert silent == {
        "shmem_huge_pages", "anonymous_huge_pages", "maps", "overcommit", "clock", "disk_writes", "disk_sync", "disk_reads", "loopback",
    }  # fmt: skip


def test_the_gravest_verdict_counts() -> None:
    ok, warn, bad = (Finding("x", verdict, "", "") for verdict in ("ok", "warn", "bad"))
    assert (worst([]), worst([ok, warn]), worst([bad, ok])) == ("ok", "warn", "bad")


def test_facts_of_this_machine(tmp_path: Path) -> None:
    facts = read_facts(replace(SETUP, data_dir=tmp_path / "not" / "there"))
    assert facts.memory.limit > 0
    assert facts.space.free > 0
    assert facts.filesystem != "unknown"
    assert tmp_path.is_relative_to(facts.mount)
    assert facts.data_dir_is == "to be made"


def test_what_stands_in_place_of_the_data_directory_is_seen(tmp_path: Path) -> None:
    assert read_facts(replace(SETUP, data_dir=tmp_path)).data_dir_is == "there"
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert read_facts(replace(SETUP, data_dir=path)).data_dir_is == "no folder"


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, 1 << 40, 8 * MIB)
    assert speed.file_bytes == 8 * MIB
    assert min(speed.write, speed.sync_s, speed.read) > 0
    assert not list(tmp_path.iterdir())
    assert measure_disk(tmp_path, 1, 8 * MIB).file_bytes == 4 * MIB


def test_loopback_is_measured() -> None:
    assert measure_loopback(0.1) > MIB


def test_the_command(tmp_path: Path) -> None:
    command = ["doctor", "--data-dir", str(tmp_path / "d"), "--dram", "4MiB", "--ssd", "4MiB", "--no-measure"]
    done = kvstore(*command, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["verdict"] == "bad" else 0)
    assert {"descriptors", "memory", "file system"} <= {f["name"] for f in found["findings"]}
    assert not (tmp_path / "d").exists()
    done = kvstore(*command, "--dram", "lots")
    assert done.returncode == 2
