"""Large pages are asked for where memory lies, and for nothing beside it."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore_connectors.huge_pages import ask_for_huge_pages

SIZE = 8 << 20


def flags_of(address: int) -> str:
    """What the kernel has noted of the mapping that an address is in."""
    inside, found = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            found = line
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no transparent huge pages")
def test_they_are_asked_for_inside_only() -> None:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    base = array.ctypes.data
    assert ask_for_huge_pages(base + 100, SIZE // 2)
    inside, before, after = (flags_of(at).split() for at in (base + (1 << 20), base, base + SIZE - 1))
    assert "hg" in inside
    assert "hg" not in before, "a page that is not all of this memory is left alone"
    assert "hg" not in after


def test_less_than_a_page_is_left_alone() -> None:
    array = np.zeros(100, np.uint8)
    assert not ask_for_huge_pages(array.ctypes.data, 100)
