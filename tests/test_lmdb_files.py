"""Environments that are opened: which are salvaged, which are not, and what a kill in the middle of that leaves."""

import os
import random
import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.lmdb_files import DATA_FILE, mark_damaged, open_environment, open_readonly
from kvstore.lmdb_walk import read_meta
from tests.forked_daemon import forking

MAP_BYTES = 64 << 20
ENTRIES = {b"%05d" % number: b"x" * number for number in range(500)}
MOST_STEPS = 60


def fill(path: Path, entries: dict[bytes, bytes]) -> None:
    with closing(open_environment(path, MAP_BYTES)) as env, env.begin(write=True) as txn:
        for entry in entries.items():
            txn.put(*entry)


def entries_in(env: lmdb.Environment) -> dict[bytes, bytes]:
    with env.begin() as txn, txn.cursor() as cursor:
        return dict(cursor)


def shorter_than_it_says(path: Path) -> dict[bytes, bytes]:
    """Write, in ordinary transactions, until LMDB has a last page that it never wrote. Returns the entries."""
    rng, entries = random.Random(1), dict[bytes, bytes]()
    with closing(open_environment(path, MAP_BYTES)) as env:
        for _ in range(1000):
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(200)):
                    key = b"%05d" % rng.randrange(20_000)
                    entries[key] = b"x" * rng.randrange(200, 900)
                    txn.put(key, entries[key])
                for key in rng.sample(sorted(entries), min(len(entries), rng.randrange(190))):
                    del entries[key]
                    txn.delete(key)
            if missing_bytes(path) > 0:
                return entries
    raise AssertionError("it never was")


def missing_bytes(path: Path) -> int:
    meta = read_meta(path / DATA_FILE)
    assert meta is not None
    return (meta.last_page + 1) * meta.page_size - (path / DATA_FILE).stat().st_size


def test_pages_that_were_never_written_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "d"
    entries = shorter_than_it_says(path)
    with closing(open_readonly(path)) as env:
        assert entries_in(env) == entries
    with closing(open_environment(path, MAP_BYTES)) as env:
        assert missing_bytes(path) > 0, "it was made anew"
        assert entries_in(env) == entries
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


def test_a_page_that_was_written_and_is_missing_is_damage(tmp_path: Path) -> None:
    fill(tmp_path / "d", ENTRIES)
    file = tmp_path / "d" / DATA_FILE
    os.truncate(file, file.stat().st_size - 4096)
    with pytest.raises(lmdb.CorruptedError, match="its own header says"):
        open_readonly(tmp_path / "d")
    with closing(open_environment(tmp_path / "d", MAP_BYTES)) as env:
        assert entries_in(env).items() <= ENTRIES.items()
    assert (tmp_path / "d.damaged").exists()


def die_at_every_step(source: str, copies: str) -> None:
    """In a process of its own, without threads: opens a copy a step, killed before that change of a folder; the last is not."""
    for steps in range(MOST_STEPS):
        copy = Path(copies) / str(steps)
        shutil.copytree(source, copy)
        if not (child := os.fork()):
            _open_and_die(copy / "d", steps)
            os._exit(0)
        if not os.waitpid(child, 0)[1]:
            return


def _open_and_die(path: Path, steps: int) -> None:
    left = steps

    def watch(event: str, _: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    open_environment(path, MAP_BYTES).close()


@pytest.mark.parametrize("readable", [True, False])
def test_killed_while_it_salvages(tmp_path: Path, *, readable: bool) -> None:
    source, copies = tmp_path / "source", tmp_path / "copies"
    copies.mkdir()
    fill(source / "d", ENTRIES)
    shutil.copytree(source / "d", source / "d.damaged")
    if readable:
        mark_damaged(source / "d")
    else:
        (source / "d" / DATA_FILE).write_bytes(b"no file of LMDB's" * 1000)
    process = forking().Process(target=die_at_every_step, args=(str(source), str(copies)))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    found = list(copies.iterdir())
    assert 4 < len(found) < MOST_STEPS
    for copy in found:
        with closing(open_environment(copy / "d", MAP_BYTES)) as env:
            assert entries_in(env) == (ENTRIES if readable else {}), copy.name
