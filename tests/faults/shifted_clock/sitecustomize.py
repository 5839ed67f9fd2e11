"""Put first on a daemon's PYTHONPATH, this shifts its wall clock, and nothing else, by the seconds in a file, at any moment."""

import os
import time
from pathlib import Path

_shift = Path(os.environ["SHIFTED_CLOCK"])
_time = time.time


def _shifted() -> float:
    return _time() + float(_shift.read_text())


time.time = _shifted
time.time_ns = lambda: int(_shifted() * 1e9)
