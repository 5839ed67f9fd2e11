"""Commands that go on in a child process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CODE = """
import os, time
from kvstore.cli.child import go_on_in_a_child
go_on_in_a_child()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_the_child_of_a_command_that_is_killed_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert child != parent.pid
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
        parent.stdout.read()  # the child has it open, too
    for _ in range(200):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")
