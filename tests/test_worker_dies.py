"""What this project tells pytest: a test that ends its process is named, and the run ends."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIES = """
import os, pathlib, signal

def test_before(): pass

def test_dies():
    once = pathlib.Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def test_after(): pass
"""


def test_a_run_ends_whose_worker_died(tmp_path: Path) -> None:
    """xdist 3.8.0 gives what a dead worker had done to the others again, as rows of no tests; they then wait for ever, idle."""
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_8.py").write_text(DIES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options: list[str | Path] = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider", "--numprocesses", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "crashed while running 'test_8.py::test_dies'" in ran.stdout, ran.stdout
    assert ran.returncode == 1
