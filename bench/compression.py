"""What compressing KV bytes for SSD would gain, and what it costs: zstd level 1, plain and after splitting bf16 into byte planes.

Two kinds of data: normal, and one that looks like real keys and values (each channel has a scale of its own, neighbouring tokens are
alike). Beside it, in the same run, the disk: sequential writes with a sync, and reads past the page cache. One thread each.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from bench.report import Report, arguments

_BLOB_BYTES = 1 << 20
_GIB = 1 << 30
_CHANNELS = 128

Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def normal(rng: np.random.Generator) -> bytes:
    """Independent normal numbers as bf16."""
    return _bf16(rng.standard_normal(_BLOB_BYTES // 2))


def real_looking(rng: np.random.Generator) -> bytes:
    """Channels of very different scales, a few of them outliers, and tokens that resemble the ones before."""
    scale = np.exp(rng.normal(0, 1, _CHANNELS)) * np.where(rng.random(_CHANNELS) < 0.03, 20, 1)
    noise = rng.standard_normal((_BLOB_BYTES // 2 // _CHANNELS, _CHANNELS))
    for token in range(1, len(noise)):
        noise[token] = 0.7 * noise[token - 1] + 0.71 * noise[token]
    return _bf16((noise * scale + rng.normal(0, 1, _CHANNELS)).ravel())


def _bf16(numbers: npt.NDArray[np.float64]) -> bytes:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _split(data: bytes) -> bytes:
    numbers = np.frombuffer(data, np.uint16)
    return numbers.astype(np.uint8).tobytes() + (numbers >> 8).astype(np.uint8).tobytes()


def _join(data: bytes) -> bytes:
    low, high = np.frombuffer(data, np.uint8).reshape(2, -1)
    return (high.astype(np.uint16) << 8 | low).tobytes()


def coders() -> dict[str, Coder]:
    """Ways to store a blob: what makes the stored form, and what reads it."""
    zip_, unzip = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    half = _BLOB_BYTES // 2

    def high_plane(data: bytes) -> bytes:
        planes = _split(data)
        return planes[:half] + zip_.compress(planes[half:])

    return {
        "plain": (zip_.compress, unzip.decompress),
        "planes": (lambda data: zip_.compress(_split(data)), lambda data: _join(unzip.decompress(data))),
        "high_plane": (high_plane, lambda data: _join(data[:half] + unzip.decompress(data[half:]))),
    }


def disk(report: Report, folder: Path, repetition: int, size: int) -> None:
    """Sequential write with a sync, and read after the page cache was told to forget it."""
    block, file = os.urandom(8 << 20), folder / "disk"
    started = time.perf_counter()
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for _ in range(size // len(block)):
        os.write(fd, block)
    os.fsync(fd)
    report.add("disk_write", repetition, size / _GIB / (time.perf_counter() - started), "GiB/s")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    for at in range(0, size, len(block)):
        os.pread(fd, len(block), at)
    report.add("disk_read", repetition, size / _GIB / (time.perf_counter() - started), "GiB/s")
    os.close(fd)


def measure(report: Report, name: str, blobs: list[bytes], coder: Coder, repetition: int) -> None:
    """Ratio, and CPU time both ways."""
    started = time.process_time()
    stored = [coder[0](blob) for blob in blobs]
    encoded = time.process_time()
    back = [coder[1](form) for form in stored]
    decoded = time.process_time()
    assert back == blobs
    whole = sum(map(len, blobs))
    report.add(f"{name}_ratio", repetition, whole / sum(map(len, stored)), "x")
    report.add(f"{name}_compress", repetition, whole / _GIB / (encoded - started), "GiB/s CPU")
    report.add(f"{name}_decompress", repetition, whole / _GIB / (decoded - encoded), "GiB/s CPU")


def run(settings: argparse.Namespace) -> Report:
    """All data, all ways, and the disk between them."""
    report = Report("compression", {"blob_bytes": _BLOB_BYTES, "blobs": settings.blobs, "disk_bytes": settings.disk})
    rng = np.random.default_rng(1)
    data = {"normal": [normal(rng) for _ in range(settings.blobs)], "real": [real_looking(rng) for _ in range(settings.blobs)]}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=settings.folder) as folder:
        for repetition in range(settings.repetitions):
            disk(report, Path(folder), repetition, settings.disk)
            for kind, blobs in data.items():
                for name, coder in coders().items():
                    measure(report, f"{kind}_{name}", blobs, coder, repetition)
    for kind in data:
        for name in coders():
            ratio, speed = (report.median(f"{kind}_{name}_{what}") for what in ("ratio", "compress"))
            written, plain = 1 / speed + 1 / ratio / report.median("disk_write"), 1 / report.median("disk_write")
            report.ratios[f"{kind}_{name}_write_time_vs_off"] = round(written / plain, 4)
            ratio, speed = (report.median(f"{kind}_{name}_{what}") for what in ("ratio", "decompress"))
            read, plain = 1 / speed + 1 / ratio / report.median("disk_read"), 1 / report.median("disk_read")
            report.ratios[f"{kind}_{name}_read_time_vs_off"] = round(read / plain, 4)
    return report


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--blobs", type=int, default=64)
    parser.add_argument("--disk", type=int, default=512 << 20, help="bytes written to the disk and read back")
    parser.add_argument("--folder", type=Path, help="where the disk is; the system's folder for temporary files if not given")
    parser.add_argument("--repetitions", type=int, default=5)
    settings = parser.parse_args()
    if settings.quick:
        settings.blobs, settings.disk, settings.repetitions = 16, 64 << 20, 2
    report = run(settings)
    report.show("compression of KV bytes for SSD (times are for one thread, its work and the disk's one after the other)")
    report.write(settings.json)
    report.draw(settings.png, "ratio or GiB/s")


if __name__ == "__main__":
    main()
