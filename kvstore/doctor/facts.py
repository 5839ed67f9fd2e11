"""What is read of the machine, in one value, so that checks can be given any machine. Sizes in bytes."""

import fcntl
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.probes import DiskSpeed
from kvstore.errors import DataDirError
from kvstore.machine import Disk, Memory, existing, read_disk, read_memory
from kvstore.store.datadir import read_format

_THP = Path("/sys/kernel/mm/transparent_hugepage")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


@dataclass(frozen=True, slots=True)
class Setup:
    """What the daemon would be run with."""

    data_dir: Path
    dram: int
    ssd: int
    segment: int
    max_connections: int
    namespaces: int = 100
    """How many namespaces to reckon with."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Limits are None where there is none. What could not be read or measured is None too, and is not judged."""

    setup: Setup
    memory: Memory
    daemon_running: bool
    descriptors: int | None
    locked_memory: int | None
    address_space: int | None
    core_size: int | None
    shmem_huge: str | None
    anonymous_huge: str | None
    max_maps: int | None
    overcommit: int | None
    filesystem: str
    mount: str
    space: Disk
    cpus: int
    cpu_quota: float | None
    load: float
    """Mean number of processes that want a CPU, over the last minute."""
    clock: str | None
    kernel: tuple[int, int]
    python: str
    debug: bool
    disk: DiskSpeed | None = None
    loopback: float | None = None
    """Bytes a second."""
    store_format: int | None = None
    """Of the data directory."""
    data_dir_is: str = "there"
    """The data directory: `there`, `to be made`, `no folder` (it, or one above it, is a file), or `closed` to this user."""


def read_facts(setup: Setup) -> Facts:
    """The facts of this machine, nothing measured."""
    there = existing(setup.data_dir)
    mount, filesystem = _mount_of(there)
    release = platform.release().split("-")[0].split(".")
    running = _is_locked(setup.data_dir / "lock")
    return Facts(
        setup=setup,
        memory=read_memory(),
        daemon_running=running,
        descriptors=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        address_space=_limit(resource.RLIMIT_AS),
        core_size=_limit(resource.RLIMIT_CORE),
        shmem_huge=_chosen(_THP / "shmem_enabled"),
        anonymous_huge=_chosen(_THP / "enabled"),
        max_maps=_number(Path("/proc/sys/vm/max_map_count")),
        overcommit=_number(Path("/proc/sys/vm/overcommit_memory")),
        filesystem=filesystem,
        mount=mount,
        space=read_disk(setup.data_dir),
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        load=os.getloadavg()[0],
        clock=_text(_CLOCK),
        kernel=(int(release[0]), int(release[1])),
        python=platform.python_version(),
        store_format=_format(setup.data_dir),
        data_dir_is=_data_dir_is(setup.data_dir, there),
        debug=sys.flags.dev_mode or bool(os.environ.get("PYTHONASYNCIODEBUG")) or hasattr(sys, "gettotalrefcount"),
    )


def _data_dir_is(data_dir: Path, there: Path) -> str:
    if not there.is_dir():
        return "no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return "closed"
    return "there" if there == data_dir.absolute() else "to be made"


def _format(data_dir: Path) -> int | None:
    try:
        found = read_format(data_dir)
    except (DataDirError, OSError):
        return None
    return found if type(found) is int else None


def _limit(which: int) -> int | None:
    """The limit that will hold: the daemon raises that of descriptors as far as it may, and leaves the others."""
    soft, hard = resource.getrlimit(which)
    limit = hard if which == resource.RLIMIT_NOFILE else soft
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None else None


def _chosen(path: Path) -> str | None:
    """The word in brackets."""
    text = _text(path)
    return text.partition("[")[2].partition("]")[0] if text else None


def _mount_of(path: Path) -> tuple[str, str]:
    """Mount point and file system type of a path."""
    best, kind = "/", "unknown"
    resolved = str(path.resolve())
    for line in (_text(Path("/proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if (resolved == point or resolved.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return best, kind


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _cpu_quota() -> float | None:
    """CPUs that the control group allows, if it limits them."""
    text = _text(Path("/sys/fs/cgroup/cpu.max"))
    if text and not text.startswith("max"):
        quota, period = text.split()
        return int(quota) / int(period)
    quota_v1 = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    period_v1 = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    return quota_v1 / period_v1 if quota_v1 and quota_v1 > 0 and period_v1 else None
