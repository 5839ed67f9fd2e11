"""Memory that requests use and free stays in the process, in bounds."""

import subprocess
import sys

import pytest

from kvstore.heap import KEPT

_COUNT_FAULTS = """
import resource, sys
from kvstore.heap import keep_freed_memory
if "keep" in sys.argv and not keep_freed_memory():
    sys.exit("unsupported")
def request():
    return len([bytearray(1 << 20) for _ in range(8)])
for _ in range(5):
    request()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    request()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
bytearray(3 << 20), [bytearray(2 << 20) for _ in range(100)]
print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize())
"""


def _run(*arguments: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS, *arguments], capture_output=True, text=True, check=False, timeout=30)
    if "unsupported" in done.stderr:
        pytest.skip("the C library has no mallopt")
    faults, resident = done.stdout.split()
    return int(faults), int(resident)


def test_what_requests_free_is_used_again_without_page_faults() -> None:
    faults, resident = _run("keep")
    without, resident_without = _run()
    assert faults < 20 * 256 < without, "each request of 8 MiB would take 2,048 faults"
    assert resident < resident_without + KEPT + (1 << 20), "what is kept is bounded"
