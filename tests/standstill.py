"""Run a command on a machine that stands still now and then: all processes below it are stopped at once, and go on together.

    python -m tests.standstill python -m pytest tests/integration

What fails here and not without took a moment for an answer. Tests that stop processes themselves may find them running again.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def stopped(top: psutil.Process) -> Iterator[None]:
    """Stop a process and all below it, but for those that are stopped already."""
    pids: list[int] = []
    try:
        for process in (*top.children(recursive=True), top):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    os.kill(process.pid, signal.SIGSTOP)
                    pids.append(process.pid)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def main() -> int:
    """Its exit code is the command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one stop to the next, on average (default 2)")
    parser.add_argument("--least", type=float, default=0.6, help="seconds that the shortest takes (default 0.6)")
    parser.add_argument("--most", type=float, default=2.2, help="seconds that the longest takes (default 2.2)")
    parser.add_argument("--seed", type=int, default=1, help="which lengths (default 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.command:
        parser.error("which command?")
    lengths, stops = random.Random(asked.seed), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with subprocess.Popen(asked.command) as command:
        try:
            top = psutil.Process(command.pid)
            while command.poll() is None:
                time.sleep(lengths.uniform(0, 2 * asked.every))
                if command.poll() is None:
                    with stopped(top):
                        time.sleep(lengths.uniform(asked.least, asked.most))
                    stops += 1
        finally:
            command.terminate()
            print(f"it stood still {stops} times", file=sys.stderr)
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
