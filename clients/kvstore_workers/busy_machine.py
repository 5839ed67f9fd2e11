"""What is measured on a busy machine says little: whoever measures says so, before."""

import os
import sys


def warning(load: float, processors: int) -> str:
    """One line, if the processors have more to do than they can; else nothing."""
    if load <= processors:
        return ""
    busy = f"this machine is busy (load {load:.1f} on {processors} processors)"
    return f"warning: {busy}: what is measured now says little; try again when it is quiet"


def warn_if_busy() -> None:
    """Say so on standard error, if it is so over the last minute."""
    if text := warning(os.getloadavg()[0], len(os.sched_getaffinity(0))):
        print(text, file=sys.stderr)
