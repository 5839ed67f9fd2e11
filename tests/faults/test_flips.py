"""Flipped bits in both LMDB files of a stopped daemon: it starts, serves no wrong byte, and goes on. `make flips`: 300 trials."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import DiskFailing
from kvstore_client import Client, ConnectionLost, NoSpace, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import unexpected
from tests.integration.pages import content, context, fetch_checked, open_namespace

TRIALS = int(os.environ.get("KVSTORE_TEST_FLIPS", "3"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "11"))
SIZES = ("--dram", "4MiB", "--ssd", "64MiB")
CONTEXTS = range(0, 300, 10)
_FILES = (("journal",), ("blobs",), ("journal", "blobs"))
_META_BYTES = 2 * 4096
_DEADLY = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)


def flip(file: Path, rng: np.random.Generator) -> None:
    """Flip 1 to 64 bits anywhere, or a few in LMDB's two meta pages, on which everything hangs."""
    data = bytearray(file.read_bytes())
    end = _META_BYTES if rng.random() < 0.15 else len(data)
    for _ in range(int(rng.choice([1, 4, 16, 64]))):
        bit = int(rng.integers(end * 8))
        data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def pages_left(namespace: Namespace, seed: int) -> int:
    """Pages of a context that are still served, all of them right; a page found bad at its fetch is a miss the next time."""
    for _ in range(5):
        try:
            return fetch_checked(namespace, context(seed))
        except NotFound:
            continue
    raise AssertionError("a lost blob is found again and again")


def read_all(data_dir: Path, fresh: int, *, may_refuse: bool) -> int:
    """Start a daemon, read everything, put something new, stop it cleanly. Returns the pages found."""
    for start in (1, 2, 3):
        daemon = DaemonProcess(data_dir, *SIZES)
        try:
            with daemon:
                found = _read_and_put(daemon, fresh, may_refuse=may_refuse)
                assert daemon.stop() == 0, "\n".join(list(daemon.lines)[-20:])
                assert not (words := unexpected(daemon)), "\n".join(words)
                return found
        except BaseException as error:
            # LMDB itself can end the process at a damaged page; the third start after that salvages.
            if isinstance(error, ConnectionLost) and may_refuse and start < 3 and daemon.wait_exit() in _DEADLY:
                continue
            print("\n".join(list(daemon.lines)[-30:]))
            raise
    raise AssertionError("unreachable")


def _read_and_put(daemon: DaemonProcess, fresh: int, *, may_refuse: bool) -> int:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        found = sum(pages_left(namespace, seed) for seed in CONTEXTS)
        try:
            namespace.put(context(fresh), content(context(fresh)), durable=True)
        except (NoSpace, DiskFailing):  # a file too damaged to be written is salvaged at the next start, and until then says so
            assert may_refuse, "what was salvaged refuses writes"
            namespace.put(context(fresh), content(context(fresh)))
        assert fetch_checked(namespace, context(fresh)) == 4, "the daemon does not go on"
        return found


@pytest.mark.timeout(3600 if TRIALS > 20 else 300)
def test_flipped_bits(data_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in CONTEXTS:
            namespace.put(context(seed), content(context(seed)), durable=True)
    found, again = [], []
    for trial in range(TRIALS):
        rng, copy = np.random.default_rng([SEED, trial]), tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(data_dir, copy)
        for name in _FILES[trial % len(_FILES)]:
            flip(copy / name / "data.mdb", rng)
        try:
            found.append(read_all(copy, 5000, may_refuse=True))
            if trial % len(_FILES) == len(_FILES) - 1:
                again.append(read_all(copy, 5010, may_refuse=False))
        except BaseException:
            print(f"trial {trial} of seed {SEED} ({' and '.join(_FILES[trial % len(_FILES)])})")
            raise
    print(
        f"{TRIALS} trials, pages found {min(found)} to {max(found)} of {4 * len(CONTEXTS)}, at the next start {min(again)} to {max(again)}"
    )
    assert min(found) < 4 * len(CONTEXTS), "no flip hit anything: this test shows nothing"
    assert max(found) > 0
