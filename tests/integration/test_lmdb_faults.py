"""Pages that LMDB ends the process at: the next start salvages the file they are in. What ends it otherwise is no damage."""

import contextlib
import signal
from pathlib import Path

import lmdb
import pytest

from kvstore.lmdb_files import mark_damaged
from kvstore.lmdb_walk import LEAF, NODE, Walk, page_flags, page_nodes
from kvstore_client import Client, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.apart import DEADLY
from tests.integration.pages import SPEC, content, context, fetch_checked
from tests.store.test_verify import edit

SIZES = ("--dram", "4MiB", "--ssd", "16MiB")
SEEDS = range(0, 50, 10)
MORE = range(0, 150, 10)
"""Their recipes are in several leaf pages."""
PAGES = 4 * len(SEEDS)


def with_recipes(client: Client) -> Namespace:
    return client.namespace("pages", "rev-1", SPEC, recipes=True)


def fill(data_dir: Path, seeds: range = SEEDS) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        for seed in seeds:
            with_recipes(client).put(context(seed), content(context(seed)), durable=True)


def fetch_what_is_left(namespace: Namespace, seed: int) -> int:
    """A page whose blob is found lost at a fetch is a miss from then on."""
    for _ in range(4):
        with contextlib.suppress(NotFound):
            return fetch_checked(namespace, context(seed))
    return fetch_checked(namespace, context(seed))


def move_leaves_to_the_end(folder: Path) -> None:
    """Write a key and delete it until LMDB has used up what was free: what it writes then comes at the end of the file."""
    with lmdb.open(str(folder), map_size=64 << 20) as env, env.begin():  # a reader: nothing more becomes free
        for _ in range(150):
            with env.begin(write=True) as txn:
                txn.put(b"\0", b"")
            with env.begin(write=True) as txn:
                txn.delete(b"\0")


def point_behind_the_end(file: Path, first: bytes, but: bytes = b"") -> None:
    """Let the leaf pages whose first key begins so, but that of one key, say that their entries are 64 KiB on, where the file is over."""
    raw, moved = bytearray(file.read_bytes()), 0
    for at in range(2 * 4096, len(raw), 4096):
        page = bytes(raw[at : at + 4096])
        nodes = page_nodes(page, at // 4096) if page_flags(page) & LEAF else []
        if nodes and page.startswith(first, nodes[0] + NODE.size) and at + 0xFF00 > len(raw) and not (but and but in page):
            moved += 1
            for entry in range(len(nodes)):
                raw[at + 16 + 2 * entry : at + 18 + 2 * entry] = (0xFF00).to_bytes(2, "little")
    assert moved, "no leaf page is near enough to the end"
    file.write_bytes(raw)


@pytest.mark.parametrize(("name", "first"), [("recipes", b"R"), ("recipes", b""), ("blobs", b""), ("journal", b"")])
def test_a_page_that_lmdb_dies_of_is_salvaged_at_the_next_start(data_dir: Path, name: str, first: bytes) -> None:
    fill(data_dir)
    if name == "blobs":
        move_leaves_to_the_end(data_dir / name)
    point_behind_the_end(data_dir / name / "data.mdb", first)
    daemon = DaemonProcess(data_dir, *SIZES)
    assert daemon.wait_exit() in DEADLY, "LMDB lives"
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        words = [line for line in daemon.lines if "was damaged:" in line]
        assert len(words) == 1
        assert f"/{name} was damaged:" in words[0]
        namespace = with_recipes(client)
        found = [fetch_what_is_left(namespace, seed) for seed in SEEDS]
        if name == "recipes":
            assert sum(found) == PAGES
        namespace.put(context(1000), content(context(1000)), durable=True)
        assert namespace.drop_to_text(context(1000), from_page=0) == 4
        assert namespace.match(context(1000), lease_s=0, rebuildable=True).rebuildable_pages == 4
        assert daemon.stop() == 0
    assert not (data_dir / "fault").exists()
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        assert not any("fault" in line or "damaged" in line for line in daemon.lines)
        assert with_recipes(client).recipes()[0] >= 4


def test_a_run_that_was_killed_salvages_nothing(data_dir: Path) -> None:
    fill(data_dir)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, None):
        with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
            assert [fetch_checked(with_recipes(client), context(seed)) for seed in SEEDS] == [4] * len(SEEDS)
            assert not any("damaged" in line or "salvage" in line for line in daemon.lines)
            if number is not None:
                daemon.send_signal(number)
                assert daemon.wait_exit() == -number
    assert any("the last run was ended by a fault: Segmentation fault in" in line for line in daemon.lines)


def test_a_damaged_file_without_room_for_its_copy_is_named_and_kept(data_dir: Path) -> None:
    fill(data_dir)
    mark_damaged(data_dir / "blobs")
    size = (data_dir / "blobs" / "data.mdb").stat().st_size
    daemon = DaemonProcess(data_dir, *SIZES, within=("prlimit", f"--fsize={size // 4}"))
    assert daemon.wait_exit() == 2
    assert str(data_dir / "blobs") in daemon.lines[-1]
    assert f"{size} bytes" in daemon.lines[-1]
    assert not (data_dir / "blobs.salvaged").exists(), "it takes up the room that is lacking"
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        assert [fetch_checked(with_recipes(client), context(seed)) for seed in SEEDS] == [4] * len(SEEDS)


def test_recipes_that_their_counts_do_not_account_for_are_salvaged_before_they_are_counted_anew(data_dir: Path) -> None:
    """That is damage, and to read on might end the process."""
    fill(data_dir, MORE)
    edit(data_dir / "recipes", b"C", "delete")
    file = data_dir / "recipes" / "data.mdb"
    point_behind_the_end(file, b"R", but=max(key for key, _ in Walk(file)))
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = with_recipes(client)
        assert [fetch_checked(namespace, context(seed)) for seed in MORE] == [4] * len(MORE)
        namespace.drop_to_text(context(10), from_page=0)
        assert namespace.match(context(10), lease_s=0, rebuildable=True).rebuildable_pages == 4
    with DaemonProcess(data_dir, *SIZES) as daemon:
        assert not any("damaged" in line for line in daemon.lines)
