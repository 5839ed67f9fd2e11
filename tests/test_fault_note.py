"""The note of a fault, left by processes that really died."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.fault_note import FaultNote

DIES = """
import mmap, os, sys, threading
from kvstore.fault_note import FaultNote

def die():
    if sys.argv[2] == "Aborted":
        os.abort()
    elif sys.argv[2] == "Bus error":
        file = os.open(sys.argv[1] + ".short", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 4096)
        mapped = mmap.mmap(file, 4096)
        os.ftruncate(file, 0)
        mapped[0]
    elif sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)

note = FaultNote(__import__("pathlib").Path(sys.argv[1]))
note.arm()
thread = threading.Thread(target=die)
thread.start()
thread.join()
note.disarm()
"""


@pytest.mark.parametrize("how", ["Aborted", "Bus error", "killed", "clean"])
def test_only_a_fault_leaves_a_note_and_it_says_where(tmp_path: Path, how: str) -> None:
    program, file = tmp_path / "far" / "away" / "dies.py", tmp_path / "fault"
    program.parent.mkdir(parents=True)
    program.write_text(DIES)
    done = subprocess.run([sys.executable, str(program), str(file), how], cwd=Path(__file__).parent.parent, timeout=30)
    assert (done.returncode == 0) == (how == "clean")
    note = FaultNote(file)
    fault = note.take()
    if how in ("killed", "clean"):
        assert fault is None
        assert file.exists() == (how == "killed")
        return
    assert fault is not None
    assert fault.error == how
    assert fault.innermost_of(["/elsewhere/far/away/dies.py", "/x/python3/threading.py"]) == "/elsewhere/far/away/dies.py"
    assert fault.innermost_of(["/elsewhere/far/away/lives.py"]) is None
    assert str(fault).startswith(f"{how} in far/away/dies.py:")
    assert note.take() == fault, "it stays until it is taken care of"
    note.forget()
    assert note.take() is None


def test_what_is_no_note_says_nothing(tmp_path: Path) -> None:
    for junk in (b"", b"\0" * 100, b"\xff\xfe", b"Fatal Python", b'  File "x", line 1 in y'):
        (tmp_path / "fault").write_bytes(junk)
        assert FaultNote(tmp_path / "fault").take() is None
