"""The checks: pure functions from facts to a finding, or None where the facts are not known."""

from collections.abc import Callable

from kvstore.api.same_host import MAX_LENT_BUFFERS
from kvstore.doctor.facts import Facts
from kvstore.doctor.findings import Finding, Verdict
from kvstore.machine import on_disk, tight, too_much
from kvstore.size_text import size_text
from kvstore.store.datadir import FORMAT, migrate_command

Check = Callable[[Facts], Finding | None]

_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "glusterfs",
    "lustre",
    "afs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.glusterfs",
    "virtiofs",
}
_LOCAL = {"ext4", "ext3", "ext2", "xfs", "f2fs", "zfs", "btrfs", "bcachefs"}
_COPYING = {"btrfs", "zfs", "bcachefs"}
_SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies"}
_MAPS_OF_NAMESPACE = 4
_SPARE_DESCRIPTORS = 256
_SPARE_MAPS = 1000
_MIB, _GIB = 1 << 20, 1 << 30


def _judge(value: float, warn_below: float, bad_below: float) -> Verdict:
    return "bad" if value < bad_below else "warn" if value < warn_below else "ok"


def _segments(facts: Facts) -> int:
    return -(-facts.setup.dram // facts.setup.segment)


# --- limits ----------------------------------------------------------------------------------------------------------------


def descriptors(facts: Facts) -> Finding:
    """Every connection, every buffer that a client lends and every segment is one."""
    needed = 2 * facts.setup.max_connections + _segments(facts) + MAX_LENT_BUFFERS + _SPARE_DESCRIPTORS
    have = facts.descriptors
    enough = have is None or have >= needed
    return Finding(
        "descriptors", "ok" if enough else "bad", f"{'no limit' if have is None else have}, {needed} may be needed",
        "every connection, HTTP client, lent buffer and segment is a descriptor; without one a client is refused, or no segment made",
        "" if enough else f"LimitNOFILE={needed} in the unit, or: ulimit -Hn {needed}; or a lower max_connections, or larger segments",
    )  # fmt: skip


def locked_memory(facts: Facts) -> Finding:
    """Kvstore itself locks nothing; workers that register its segments do."""
    have, dram = facts.locked_memory, facts.setup.dram
    enough = have is None or have >= dram
    return Finding(
        "locked memory", "ok" if enough else "warn", "no limit" if have is None else size_text(have),
        "kvstore locks no memory, but workers that register shared segments with a device or a network card (RDMA, pinned host memory) "
        "need a limit as large as the DRAM tier",
        "" if enough else "for such workers: LimitMEMLOCK=infinity in their unit, or: ulimit -l unlimited",
    )  # fmt: skip


def address_space(facts: Facts) -> Finding:
    """Columns reserve far more than they use."""
    have = facts.address_space
    return Finding(
        "address space", "ok" if have is None else "bad", "no limit" if have is None else size_text(have),
        "columns reserve address space for max_pages at once and LMDB maps whole files: a limit makes that fail",
        "" if have is None else "ulimit -Hv unlimited (LimitAS=infinity in the unit)",
    )  # fmt: skip


def core_dumps(facts: Facts) -> Finding:
    """A core has everybody's prompts in it."""
    off = facts.core_size == 0
    return Finding(
        "core dumps", "ok" if off else "warn", "off" if off else "no limit" if facts.core_size is None else size_text(facts.core_size),
        f"a core of the daemon would hold the DRAM tier ({size_text(facts.setup.dram)}): the state of everybody's conversations, on disk",
        "" if off else "LimitCORE=0 in the unit, or: ulimit -Hc 0",
    )  # fmt: skip


def maps(facts: Facts) -> Finding | None:
    """Segments and columns are mappings."""
    if facts.max_maps is None:
        return None
    needed = 2 * _segments(facts) + facts.setup.namespaces * _MAPS_OF_NAMESPACE + _SPARE_MAPS
    enough = facts.max_maps >= needed
    return Finding(
        "vm.max_map_count", "ok" if enough else "bad", f"{facts.max_maps}, {needed} may be needed",
        "each DRAM segment is two mappings (one for its alignment), and a namespace takes a few; without one a segment can't be made",
        "" if enough else f"sysctl -w vm.max_map_count={2 * needed} (and in /etc/sysctl.d), or larger segments",
    )  # fmt: skip


def overcommit(facts: Facts) -> Finding | None:
    """Strict accounting refuses reservations."""
    if facts.overcommit is None:
        return None
    strict = facts.overcommit == 2
    return Finding(
        "vm.overcommit_memory", "bad" if strict else "ok", str(facts.overcommit),
        "columns reserve address space for max_pages that is never all used; strict accounting (2) counts it as if it were",
        "sysctl -w vm.overcommit_memory=0 (and in /etc/sysctl.d)" if strict else "",
    )  # fmt: skip


# --- memory ----------------------------------------------------------------------------------------------------------------


def memory(facts: Facts) -> Finding:
    """The DRAM tier has to fit."""
    dram, have = facts.setup.dram, facts.memory
    refused = too_much(dram, have)
    warned = None if facts.daemon_running else tight(dram, have)
    whose = "the control group's limit" if have.grouped else "the machine's"
    return Finding(
        "memory", "bad" if refused else "warn" if warned else "ok",
        f"DRAM tier {size_text(dram)}; {size_text(have.available)} of {size_text(have.limit)} available ({whose})",
        "memory is taken as segments are filled: what is not there then becomes no_space, or the kernel ends a process",
        "a smaller --dram, or a higher limit (MemoryMax= in the unit, the container's memory limit)" if refused or warned else "",
    )  # fmt: skip


def swap(facts: Facts) -> Finding:
    """A swapped tier is a slow disk."""
    has = facts.memory.swap > 0
    return Finding(
        "swap", "warn" if has else "ok", size_text(facts.memory.swap) if has else "none",
        "swapped pages of the DRAM tier come back at disk speed in the middle of a fetch, and are written to disk unencrypted",
        "MemorySwapMax=0 in the unit, or: swapoff -a; at least: sysctl -w vm.swappiness=1" if has else "",
    )  # fmt: skip


def shmem_huge_pages(facts: Facts) -> Finding | None:
    """Segments ask for huge pages: from Linux 6.1 on they are given to who asks, unless they are denied."""
    if facts.shmem_huge is None:
        return None
    off = facts.shmem_huge == "deny" or (facts.shmem_huge == "never" and facts.kernel < (6, 1))
    value = "never, but they are asked for one by one" if facts.shmem_huge == "never" and not off else facts.shmem_huge
    return Finding(
        "huge pages for segments", "warn" if off else "ok", value,
        "segments ask for huge pages; with small ones they are made six times as slowly, and copies cost more address translation",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" if off else "",
    )  # fmt: skip


def anonymous_huge_pages(facts: Facts) -> Finding | None:
    """Columns are touched here and there."""
    if facts.anonymous_huge is None:
        return None
    always = facts.anonymous_huge == "always"
    return Finding(
        "huge pages elsewhere", "warn" if always else "ok", facts.anonymous_huge,
        "a namespace's columns are touched here and there: with `always` each first touch takes and clears 2 MiB",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if always else "",
    )  # fmt: skip


# --- disk ------------------------------------------------------------------------------------------------------------------


def data_directory(facts: Facts) -> Finding:
    """The daemon keeps all that lasts in one folder, and makes it."""
    path, state = facts.setup.data_dir, facts.data_dir_is
    mends = {"no folder": "another --data-dir: there is a file in its way", "closed": "another --data-dir, or: chown to the daemon's user"}
    return Finding(
        "data directory", "bad" if state in mends else "ok", str(path) if state == "there" else f"{path}, {state}",
        "journal, blobs and recipes lie there: it is a folder that the user of the daemon may write to", mends.get(state, ""),
    )  # fmt: skip


def filesystem(facts: Facts) -> Finding:
    """LMDB wants a local disk."""
    kind = facts.filesystem
    verdict: Verdict = "ok"
    why = "LMDB maps its files and trusts the sync: that holds on local file systems"
    if kind in _NETWORK or kind.startswith("fuse"):
        verdict, why = "bad", "LMDB must not lie on a network or user-space file system: its locks and maps are not kept coherent there"
    elif kind in ("overlay", "aufs", "overlayfs"):
        verdict, why = "bad", "an overlay is a container's own layer: slow to write, and gone with the container"
    elif kind in ("tmpfs", "ramfs"):
        verdict, why = "bad", "it is memory: nothing durable survives a restart of the machine, and it takes memory beside the DRAM tier"
    elif kind in _COPYING:
        verdict, why = "warn", "it copies on write: LMDB's random writes fragment the file"
    elif kind not in _LOCAL:
        verdict, why = "warn", "it is not known to be a local file system on which LMDB was tried"
    return Finding(
        "file system", verdict, f"{kind} at {facts.mount}", why,
        "" if verdict == "ok" else "give a --data-dir on ext4 or xfs on a local disk (in a container: a volume of one)",
    )  # fmt: skip


def disk_space(facts: Facts) -> Finding:
    """The blob file grows to the tier's size and a little more."""
    ssd, disk = facts.setup.ssd, facts.space
    verdict: Verdict = "ok" if disk.room >= on_disk(ssd) else "warn" if disk.room >= ssd else "bad"
    return Finding(
        "disk space", verdict,
        f"SSD tier {size_text(ssd)}; {size_text(disk.free)} free, {size_text(disk.taken)} taken by the store",
        "the file may be a tenth and 256 MiB larger than the tier, with index and journal; a full disk stops demotion and durable puts",
        "" if verdict == "ok" else "a smaller --ssd, or a larger disk",
    )  # fmt: skip


def store_format(facts: Facts) -> Finding | None:
    """A daemon opens its own format only."""
    found = facts.store_format
    if found is None:
        return None
    older = f"stop the daemon, and run: {migrate_command(facts.setup.data_dir)}"
    newer = "use the version of kvstore that wrote it, or another --data-dir"
    return Finding(
        "store format", "ok" if found == FORMAT else "bad", str(found) if found == FORMAT else f"{found}, this version reads {FORMAT}",
        "a daemon opens a data directory of its own format only",
        "" if found == FORMAT else older if found < FORMAT else newer,
    )  # fmt: skip


def disk_writes(facts: Facts) -> Finding | None:
    """Demotion is sequential writing."""
    if facts.disk is None:
        return None
    verdict = _judge(facts.disk.write, 200 * _MIB, 50 * _MIB)
    return Finding(
        "disk writes", verdict, f"{size_text(facts.disk.write)}/s with the sync, over {size_text(facts.disk.file_bytes)}",
        "demotion and durable puts go at most this fast; beyond it, puts wait and get busy",
        "" if verdict == "ok" else "a faster disk (local NVMe); on a cloud volume, more throughput; see that nothing else writes to it",
    )  # fmt: skip


def disk_sync(facts: Facts) -> Finding | None:
    """A durable put waits for one after the other: of the blobs, of their index, of the journal."""
    if facts.disk is None:
        return None
    milliseconds = 1000 * facts.disk.sync_s
    verdict: Verdict = "ok" if milliseconds <= 20 else "warn" if milliseconds <= 100 else "bad"
    return Finding(
        "disk sync", verdict, f"{milliseconds:.1f} ms", "a durable put waits for five: of blobs, their index twice, the journal twice",
        "" if verdict == "ok" else "a disk with power-loss protection; not a spinning or a network disk",
    )  # fmt: skip


def disk_reads(facts: Facts) -> Finding | None:
    """Promotion reads blobs at random."""
    if facts.disk is None:
        return None
    verdict = _judge(facts.disk.read, 300 * _MIB, 50 * _MIB)
    how = "around the page cache" if facts.disk.direct else "NOT around the page cache, which this file system does not offer: may flatter"
    return Finding(
        "disk reads", verdict, f"{size_text(facts.disk.read)}/s at random, 64 KiB each, {how}",
        "what is not in DRAM is fetched at most this fast, and competes with computing it again",
        "" if verdict == "ok" else "a faster disk (local NVMe), or a larger --dram",
    )  # fmt: skip


# --- speed -----------------------------------------------------------------------------------------------------------------


def loopback(facts: Facts) -> Finding | None:
    """The physical limit of workers on this host."""
    if facts.loopback is None:
        return None
    verdict = _judge(facts.loopback, _GIB, 256 * _MIB)
    return Finding(
        "loopback", verdict, f"{size_text(facts.loopback)}/s over one connection",
        "no worker on this machine fetches faster than this over TCP",
        "" if verdict == "ok" else "see that the CPUs are idle and not throttled, and that no firewall rule or proxy handles loopback",
    )  # fmt: skip


def cpus(facts: Facts) -> Finding:
    """One for the loop, one for disk and digests."""
    usable = facts.cpus if facts.cpu_quota is None else min(float(facts.cpus), facts.cpu_quota)
    return Finding(
        "CPUs", "ok" if usable >= 2 else "warn", f"{usable:g}",
        "the loop takes one at full rate; disk, digests and the workers themselves need others",
        "" if usable >= 2 else "allow at least two (CPUQuota=, the container's cpu limit, taskset)",
    )  # fmt: skip


def load(facts: Facts) -> Finding:
    """What is measured on a busy machine says little."""
    busy = facts.load > facts.cpus + 1
    return Finding(
        "load", "warn" if busy else "ok", f"{facts.load:.1f} on {facts.cpus} CPUs",
        "others want the CPUs: what is measured here is less than the machine can do, and so is what a daemon would do",
        "look again when it is quiet" if busy else "",
    )  # fmt: skip


def clock(facts: Facts) -> Finding | None:
    """The loop reads the clock all the time."""
    if facts.clock is None:
        return None
    slow = facts.clock in _SLOW_CLOCKS
    return Finding(
        "clock source", "warn" if slow else "ok", facts.clock, "the loop reads the clock at every turn: with this one each is a slow call",
        "boot with clocksource=tsc (tsc=reliable) if the machine's is stable" if slow else "",
    )  # fmt: skip


def kernel(facts: Facts) -> Finding:
    """Memory is populated in one call."""
    old = facts.kernel < (5, 14)
    return Finding(
        "kernel", "warn" if old else "ok", ".".join(str(n) for n in facts.kernel),
        "from 5.14 on a segment's memory is taken in one call (MADV_POPULATE_WRITE)", "a newer kernel" if old else "",
    )  # fmt: skip


def python(facts: Facts) -> Finding:
    """Debug modes cost a multiple."""
    return Finding(
        "Python", "warn" if facts.debug else "ok", facts.python + (", debug mode" if facts.debug else ""),
        "debug modes of Python and asyncio slow every transfer",
        "unset PYTHONDEVMODE and PYTHONASYNCIODEBUG; not a debug build" if facts.debug else "",
    )  # fmt: skip


CHECKS: tuple[Check, ...] = (
    descriptors, maps, address_space, overcommit, locked_memory, core_dumps, memory, swap, shmem_huge_pages, anonymous_huge_pages,
    data_directory, filesystem, disk_space, store_format, disk_writes, disk_sync, disk_reads, loopback, cpus, load, clock, kernel, python,
)  # fmt: skip
