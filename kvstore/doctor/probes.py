"""Short measurements: the disk under the data directory, and TCP over loopback. Each is bounded in bytes and in time."""

import asyncio
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.api.wire import Channel

FILE_BYTES = 256 << 20
_SHARE_OF_FREE = 20
_CHUNK = 1 << 20
_READ_BYTES = 64 << 10
"""Rather little: larger blobs are read in larger pieces, which is faster."""
_READERS = 4
_WRITE_S, _READ_S, _LOOPBACK_S = 8.0, 1.0, 1.0
_SYNCS = 8
_START_S = 20.0


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Rates in bytes a second. `direct` says that reads went around the page cache; else they may flatter the disk."""

    write: float
    sync_s: float
    read: float
    direct: bool
    file_bytes: int


def measure_disk(folder: Path, free: int, file_bytes: int = FILE_BYTES) -> DiskSpeed:
    """Write a file without a name and read it at random. It is gone when this returns, or when the process ends.

    Raises OSError if the folder can't be written.
    """
    size = max(4 * _CHUNK, min(file_bytes, free // _SHARE_OF_FREE) // _CHUNK * _CHUNK)
    with tempfile.TemporaryFile(dir=folder, prefix=".kvstore-doctor-", buffering=0) as file:
        fd = file.fileno()
        content, written = os.urandom(_CHUNK), 0
        started = time.perf_counter()
        while written < size and time.perf_counter() - started < _WRITE_S:
            written += os.write(fd, content)
        os.fsync(fd)
        write = written / (time.perf_counter() - started)
        sync_s = statistics.median(_sync(fd, content, offset) for offset in range(0, _SYNCS * _CHUNK, _CHUNK))
        read, direct = _read(fd, written)
    return DiskSpeed(write, sync_s, read, direct, written)


def _sync(fd: int, content: bytes, offset: int) -> float:
    os.pwrite(fd, content[:4096], offset)
    started = time.perf_counter()
    os.fdatasync(fd)
    return time.perf_counter() - started


def _read(fd: int, size: int) -> tuple[float, bool]:
    """Random reads in as many threads as the daemon has."""
    try:
        reader, direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
        with mmap.mmap(-1, _READ_BYTES) as probe:
            os.preadv(reader, [probe], 0)
    except OSError:  # the file system has no direct reads: as good as it can be had
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        reader, direct = os.dup(fd), False
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            started = time.perf_counter()
            total = sum(pool.map(lambda seed: _read_some(reader, size, started + _READ_S, seed), range(_READERS)))
            return total / (time.perf_counter() - started), direct
    finally:
        os.close(reader)


def _read_some(fd: int, size: int, deadline: float, seed: int) -> int:
    rng, total = random.Random(seed), 0
    with mmap.mmap(-1, _READ_BYTES) as target:  # aligned to a page, as direct reads want it
        while time.perf_counter() < deadline:
            total += os.preadv(fd, [target], rng.randrange((size - _READ_BYTES) // 4096 + 1) * 4096)
    return total


def measure_loopback(seconds: float = _LOOPBACK_S) -> float:
    """Bytes a second over one TCP connection of our own kind, from another process to this one. Raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_START_S)
        command = [sys.executable, "-m", "kvstore.doctor.sender", str(listener.getsockname()[1])]
        with subprocess.Popen(command) as sender:
            try:
                return asyncio.run(_receive(listener.accept()[0], seconds))
            finally:
                sender.kill()


async def _receive(sock: socket.socket, seconds: float) -> float:
    channel, target, total = Channel(sock), memoryview(bytearray(_CHUNK)), 0
    try:
        async with asyncio.timeout(10 * seconds + 10):
            await channel.read_into(target)  # the first bytes pay for the start
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                await channel.read_into(target)
                total += len(target)
            return total / (time.perf_counter() - started)
    finally:
        channel.close()
