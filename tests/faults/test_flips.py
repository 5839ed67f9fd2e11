"""Flipped bits in the files of a stopped daemon: it starts, serves no wrong byte, and goes on. `make flips`: 300 trials."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import DiskFailing
from kvstore_client import Client, ConnectionLost, NoSpace, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.apart import DEADLY
from tests.faults.baseline import unexpected
from tests.integration.pages import SPEC, Tokens, content, context, fetch_checked

TRIALS = int(os.environ.get("KVSTORE_TEST_FLIPS", "3"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "11"))
SIZES = ("--dram", "4MiB", "--ssd", "64MiB")
CONTEXTS = range(0, 300, 10)
DROPPED = range(300, 400, 10)
"""Contexts of which only the recipes are there."""
PAGES, RECIPES = 4 * len(CONTEXTS), 4 * len(DROPPED)
_JOURNAL, _INDEX, _EXTENTS, _RECIPES = "journal/data.mdb", "blobs/data.mdb", "blobs.extents", "recipes/data.mdb"
_ALL = (_JOURNAL, _INDEX, _EXTENTS, _RECIPES)
_FILES = ((_JOURNAL, _RECIPES), (_INDEX,), _ALL, (_RECIPES,), (_JOURNAL,), (_EXTENTS,))
_META_BYTES = 2 * 4096


def with_recipes(client: Client) -> Namespace:
    return client.namespace("pages", "rev-1", SPEC, recipes=True)


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


def recipes_left(namespace: Namespace, tokens: Tokens) -> int:
    """Pages of a context that can be computed again. A read that meets damage has the file mended, and fails until then."""
    for _ in range(100):
        with contextlib.suppress(DiskFailing):
            look = namespace.match(tokens, lease_s=0, rebuildable=True)
            return look.pages + look.rebuildable_pages
        time.sleep(0.05)
    raise AssertionError("damaged recipes are not mended")


def read_all(data_dir: Path, fresh: int, *, may_refuse: bool, deaths: int) -> tuple[int, int]:
    """Start a daemon, read everything, put something new, stop it cleanly. Returns the pages found, and recipes of pages that are gone.

    LMDB itself may end it at a damaged page of each file, of which the next start salvages that one: so many `deaths`.
    """
    for start in range(deaths + 1):
        daemon = DaemonProcess(data_dir, *SIZES)
        try:
            with daemon:
                found = _read_and_put(daemon, fresh, may_refuse=may_refuse)
                assert daemon.stop() == 0, "\n".join(list(daemon.lines)[-20:])
                assert not (words := unexpected(daemon)), "\n".join(words)
                return found
        except BaseException as error:
            if isinstance(error, ConnectionLost) and start < deaths and daemon.wait_exit() in DEADLY:
                continue
            print("\n".join(list(daemon.lines)[-30:]))
            raise
    raise AssertionError("unreachable")


def read_again(data_dir: Path) -> tuple[int, int]:
    """What was damaged is salvaged, but for a page that only a delete comes to: met now, it is salvaged at the next start."""
    try:
        return read_all(data_dir, 5010, may_refuse=False, deaths=0)
    except DiskFailing:
        return read_all(data_dir, 5020, may_refuse=False, deaths=0)


def _read_and_put(daemon: DaemonProcess, fresh: int, *, may_refuse: bool) -> tuple[int, int]:
    with Client(daemon.endpoint) as client:
        namespace = with_recipes(client)
        found = sum(pages_left(namespace, seed) for seed in CONTEXTS)
        gone = sum(recipes_left(namespace, context(seed)) for seed in DROPPED)
        try:
            namespace.put(context(fresh), content(context(fresh)), durable=True)
        except (NoSpace, DiskFailing):  # a file too damaged to be written is salvaged at the next start, and until then says so
            assert may_refuse, "what was salvaged refuses writes"
            namespace.put(context(fresh), content(context(fresh)))
        assert fetch_checked(namespace, context(fresh)) == 4, "the daemon does not go on"
        if not may_refuse:
            namespace.drop_to_text(context(fresh), from_page=1)
            assert recipes_left(namespace, context(fresh)) == 4, "no new recipes are found"
        return found, gone


@pytest.mark.timeout(3600 if TRIALS > 20 else 300)
def test_flipped_bits(data_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = with_recipes(client)
        for seed in (*CONTEXTS, *DROPPED):
            namespace.put(context(seed), content(context(seed)), durable=True)
        assert sum(namespace.drop_to_text(context(seed), from_page=0) for seed in DROPPED) == 4 * len(DROPPED)
    found, again = [], []
    for trial in range(TRIALS):
        rng, copy, names = np.random.default_rng([SEED, trial]), tmp_path / "copy", _FILES[trial % len(_FILES)]
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(data_dir, copy)
        for name in names:
            flip(copy / name, rng)
        try:
            found.append(read_all(copy, 5000, may_refuse=True, deaths=len(names)))
            if names == _ALL:
                again.append(read_again(copy))
        except BaseException:
            print(f"trial {trial} of seed {SEED} ({' and '.join(names)})")
            raise
    print(
        f"{TRIALS} trials; (pages, recipes) of ({PAGES}, {RECIPES}): {min(found)} to {max(found)}; next start: {min(again)} to {max(again)}"
    )
    assert min(pages for pages, _ in found) < PAGES, "no flip hit a page: this test shows nothing"
    assert TRIALS < 20 or min(recipes for _, recipes in found) < RECIPES, "no flip hit a recipe: this test shows nothing"
    assert max(found) > (0, 0)
