"""What the machine gives this process: memory, physical and as control groups limit it, and room on disk. Sizes in bytes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvstore.size_text import size_text

_UNLIMITED = 1 << 60
"""A limit beyond this is none: version 1 of control groups writes a huge number."""
WARN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Memory:
    """`limit` is the smaller of the physical memory and the control group's; `grouped` says that it is the group's."""

    limit: int
    available: int
    swap: int
    grouped: bool


def read_memory(root: Path = Path("/")) -> Memory:
    """The memory of this machine, or of the one whose /proc and /sys are under `root`."""
    info = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info[name] = int(value.split()[0]) << 10
    limit, available = info["MemTotal"], info.get("MemAvailable", info["MemFree"])
    grouped = False
    for group_limit, used in _groups(root):
        if group_limit < limit:
            limit, grouped = group_limit, True
        available = min(available, max(0, group_limit - used))
    return Memory(limit, available, info.get("SwapTotal", 0), grouped)


def _groups(root: Path) -> list[tuple[int, int]]:
    """(limit, what is used and can't be dropped) of this process's control group and of those around it."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = top / path.strip("/")
        while True:
            if (group := _group(inside, *names)) is not None:
                found.append(group)
            if inside == top or top not in inside.parents:
                break
            inside = inside.parent
    return found


def _group(folder: Path, limit_name: str, used_name: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        text = (folder / limit_name).read_text().strip()
        limit = _UNLIMITED if text == "max" else int(text)
        if limit >= _UNLIMITED:
            return None
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit, used - int(stat.get(reclaimable, 0))


def too_much(dram: int, memory: Memory) -> str | None:
    """Why a DRAM tier of this size can't be, or None."""
    if dram <= memory.limit:
        return None
    whose = "its control group allows" if memory.grouped else "the machine has"
    return f"dram is {size_text(dram)}, more than the {size_text(memory.limit)} that {whose}: give a smaller --dram"


def tight(dram: int, memory: Memory) -> str | None:
    """Why a DRAM tier of this size may end badly, or None."""
    if dram <= WARN_SHARE * memory.available:
        return None
    return (
        f"the DRAM tier of {size_text(dram)} is more than {WARN_SHARE:.0%} of the {size_text(memory.available)} that are available: "
        "puts may get no_space, or the kernel may end a process; give a smaller --dram"
    )


@dataclass(frozen=True, slots=True)
class Disk:
    """Of the disk under a data directory: what is free, and what the files of the store take."""

    free: int
    taken: int

    @property
    def room(self) -> int:
        """What the store may have in all."""
        return self.free + self.taken


def read_disk(data_dir: Path) -> Disk:
    """The disk under a data directory, which need not be there yet. Raises OSError where it can't be looked at."""
    files = [*data_dir.glob("*/data.mdb"), *data_dir.glob("*.extents")]
    taken = sum(file.stat().st_blocks * 512 for file in files)
    return Disk(shutil.disk_usage(existing(data_dir)).free, taken)


def existing(path: Path) -> Path:
    """A folder, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def on_disk(ssd: int) -> int:
    """What an SSD tier of this size may take on disk: the blob file may be a tenth and 256 MiB larger than the tier."""
    return ssd + ssd // 10 + (256 << 20)


def outgrows(ssd: int, disk: Disk) -> str | None:
    """Why an SSD tier of this size may fill its disk, or None."""
    if on_disk(ssd) <= disk.room:
        return None
    return (
        f"the SSD tier of {size_text(ssd)} may take {size_text(on_disk(ssd))} on disk, where {size_text(disk.free)} are free and "
        f"{size_text(disk.taken)} are the store's: a full disk stops demotion and durable puts; give a smaller --ssd, or a larger disk"
    )
