"""Memory as /proc and control groups tell of it, and what is too much."""

from pathlib import Path

import pytest

from kvstore.config import load_config
from kvstore.errors import BadRequest
from kvstore.machine import Disk, Memory, outgrows, read_disk, read_memory, tight, too_much

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Memory:
    meminfo = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\nSwapTotal: {1 << 20} kB\n"}
    for name, text in (meminfo | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_memory(root)


def test_without_control_groups(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == Memory(16 * GIB, 8 * GIB, GIB, False)


def test_a_group_around_this_one_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": str(4 * GIB),
        "sys/fs/cgroup/a/memory.current": str(3 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": "1",
        "sys/fs/cgroup/a/b/memory.stat": "",
    }
    assert machine(tmp_path, files) == Memory(4 * GIB, 2 * GIB, GIB, True)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:memory:/x\n3:cpu:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    assert machine(tmp_path, files) == Memory(2 * GIB, GIB, GIB, True)


def test_too_much_is_refused_and_much_is_warned_of() -> None:
    memory = Memory(16 * GIB, 8 * GIB, 0, False)
    assert too_much(16 * GIB, memory) is None
    assert "machine" in (too_much(16 * GIB + 1, memory) or "")
    assert too_much(10 << 40, memory) == "dram is 10.0 TiB, more than the 16.0 GiB that the machine has: give a smaller --dram"
    assert "control group" in (too_much(16 * GIB + 1, Memory(16 * GIB, 8 * GIB, 0, True)) or "")
    assert tight(6 * GIB, memory) is None
    assert "available" in (tight(7 * GIB, memory) or "")


def test_a_tier_that_its_disk_has_no_room_for_is_warned_of(tmp_path: Path) -> None:
    assert outgrows(100 * GIB, Disk(50 * GIB, 61 * GIB)) is None
    assert "--ssd" in (outgrows(100 * GIB, Disk(50 * GIB, 60 * GIB)) or "")
    assert (outgrows(1 << 47, Disk(68 * GIB, 0)) or "").startswith(
        "the SSD tier of 128.0 TiB may take 140.8 TiB on disk, where 68.0 GiB are free"
    )
    (tmp_path / "d/blobs").mkdir(parents=True)
    (tmp_path / "d/blobs/data.mdb").write_bytes(bytes(1 << 20))
    (tmp_path / "d/blobs.extents").write_bytes(bytes(2 << 20))
    assert read_disk(tmp_path / "d").taken == 3 << 20
    assert read_disk(tmp_path / "not/there").free > 0


def test_the_environment_is_read_and_mistakes_in_it_are_refused() -> None:
    fine = {
        "KVSTORE_DRAM": "2MiB",
        "KVSTORE_HTTP": "x",
        "KVSTORE_TOKEN": "x",
        "KVSTORE_SERVICE_HOST": "x",
        "KVSTORE_PORT_7421_TCP_ADDR": "x",
    }
    assert load_config({}, environment=fine).dram == 2 << 20
    for name, words in (("KVSTORE_DATADIR", "KVSTORE_DATA_DIR"), ("KVSTORE_ZZZZZ", "configuration.md")):
        with pytest.raises(BadRequest, match=name) as raised:
            load_config({}, environment={name: "1"})
        assert words in raised.value.message
