"""`kvstore put` and `get` where pages are more than one component, or labelled with digests."""

from pathlib import Path

import numpy as np

from kvstore_client import Client, Component, KVSpec
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.test_cli import as_json, kvstore

HYBRID = KVSpec(4, (Component("full", 2, 1, 8), Component("window", 1, 1, 8, window=5), Component("state", 1, 1, 16)))
FULL, WINDOW, STATE = (HYBRID.part_bytes(HYBRID.whole(component)) for component in range(3))
CHAIN = KVSpec(64, (Component("full", 2, 1, 8),), hash_bytes=16)


def made(daemon: DaemonProcess, name: str, spec: KVSpec) -> None:
    with Client(daemon.endpoint) as client:
        client.namespace(name, "rev-1", spec)


def test_what_is_put_of_a_hybrid_model_is_found_with_all_its_components(daemon: DaemonProcess, tmp_path: Path) -> None:
    made(daemon, "cli-hybrid", HYBRID)
    pages = np.random.default_rng(1).integers(0, 256, (4, HYBRID.page_bytes), dtype=np.uint8)
    pages.tofile(tmp_path / "in")
    tokens = ",".join(map(str, range(16)))
    done = kvstore(daemon, "put", "cli-hybrid", "-t", tokens, "-d", str(tmp_path / "in"), "--json")
    assert (as_json(done)["new_pages"], done.stderr) == (4, "")
    got = as_json(kvstore(daemon, "get", "cli-hybrid", "-t", tokens, "-o", str(tmp_path / "out"), "--json"))
    wanted = [pages[0, :FULL], pages[1, :FULL], pages[2, : FULL + WINDOW], pages[3]]
    assert (got["pages"], (tmp_path / "out").read_bytes()) == (4, np.concatenate(wanted).tobytes())
    pages[:1, :FULL].tofile(tmp_path / "short")
    done = kvstore(daemon, "put", "cli-hybrid", "-t", "9,9,9,9", "-d", str(tmp_path / "short"))
    assert done.returncode == 2
    assert f"not the {HYBRID.page_bytes} of a page" in done.stderr
    assert f"{FULL} (full) + {WINDOW} (window) + {STATE} (state)" in done.stderr


def test_pages_that_are_labelled_with_digests(daemon: DaemonProcess, tmp_path: Path) -> None:
    made(daemon, "cli-digests", CHAIN)
    (tmp_path / "digests").write_bytes(bytes(range(32)))
    np.random.default_rng(2).integers(0, 256, 2 * CHAIN.page_bytes, dtype=np.uint8).tofile(tmp_path / "in")
    labels = ("-t", f"@{tmp_path / 'digests'}")
    assert as_json(kvstore(daemon, "put", "cli-digests", *labels, "-d", str(tmp_path / "in"), "--json"))["new_pages"] == 2
    assert as_json(kvstore(daemon, "get", "cli-digests", *labels, "-o", str(tmp_path / "out"), "--json"))["pages"] == 2
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert kvstore(daemon, "match", "cli-digests", *labels).stdout.startswith("128 of 128 tokens: 2 pages")
    assert as_json(kvstore(daemon, "pin", "cli-digests", *labels, "--ttl", "1", "--json"))["pages"] == 2
    assert as_json(kvstore(daemon, "prefetch", "cli-digests", *labels, "--json"))["pages"] == 2
    done = kvstore(daemon, "put", "cli-digests", "-t", "1,2,3", "-d", str(tmp_path / "in"))
    assert "3 tokens do not fill the digest of a page, which is 4 such numbers" in done.stderr
