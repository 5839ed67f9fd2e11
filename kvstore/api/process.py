"""What the daemon's process holds, as the kernel and the event loop see it: leaks show here first."""

import asyncio
import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_stat() -> dict[str, int]:
    """Live tasks of the running loop, open descriptors, and resident memory (bytes; segments are shared memory, and count)."""
    return {
        "tasks": len(asyncio.all_tasks()),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,  # without the one that lists them
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE,
    }
