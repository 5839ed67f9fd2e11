"""What this process has open."""

import os
from pathlib import Path

Open = tuple[int, int, int]
"""A descriptor, and the device and the number of what it is of."""


def descriptors() -> set[Open]:
    """All that is open now.

    A test looks for what is new, and does not count: what those before it left to the garbage collector may go while it runs.
    """
    found = set[Open]()
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            its = os.fstat(number)
        except OSError:
            continue  # that by which they were listed
        found.add((number, its.st_dev, its.st_ino))
    return found
