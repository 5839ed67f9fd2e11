"""`kvstore put` and `get` where pages are more than one component, or labelled with digests."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import BadRequest, Client, Component, KVSpec, Lack
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.test_cli import as_json, kvstore
from tests.integration.test_http import ask

HYBRID = KVSpec(4, (Component("full", 2, 1, 8), Component("window", 1, 1, 8, window=5), Component("state", 1, 1, 16)))
FULL, WINDOW, STATE = (HYBRID.part_bytes(HYBRID.whole(component)) for component in range(3))
WRONG_KIND = "the pages of this namespace are labelled with"
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


def test_which_component_keeps_a_match_short_is_told(daemon: DaemonProcess, tmp_path: Path) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("cli-short", "rev-short", HYBRID)
        tokens, put_id = np.arange(16, dtype=np.uint32), bytes(range(16))
        parts = tuple(HYBRID.whole(component) for component in range(3))
        for part, (first, last) in zip(parts, ((0, 4), (0, 3), (1, 2)), strict=True):
            data = bytes(HYBRID.part_bytes(part) * (last - first))
            namespace.put(tokens[: 4 * last], data, first_page=first, parts=(part,), put_id=put_id)
        found = namespace.match(tokens, lease_s=0, boundaries=True)
        assert (found.pages, found.known_pages) == (2, 4)
        assert found.lacks == (Lack(1, 3, 3, 4, 1), Lack(2, 2, 3, 4, 1))
        assert namespace.match(tokens[:8], lease_s=0, boundaries=True).lacks == ()
        with namespace.match(tokens) as match:
            assert match.lacks == found.lacks, "it is told without boundaries, too"
            with pytest.raises(BadRequest, match=r"match of 2: 4 are there, .* window \(component 1\), state \(component 2\) .*`lacks`"):
                namespace.fetch(match, np.empty(4 * FULL, np.uint8), pages=(0, 4))
            with pytest.raises(BadRequest, match=r"pages \[0, 5\) of a match of 2: "):
                namespace.view(match, pages=(0, 5))
    text = ("-t", ",".join(map(str, range(16))))
    window = "window (component 1) is missing on page 3, so at most 3 can be used"
    state = "state (component 2) is missing on page 3, so at most 2 can be used"
    for command in ("match", "why"):
        shown = kvstore(daemon, command, "cli-short", *text).stdout
        assert f"4 pages are there, of which 2 can be used: {window}; {state}\n" in shown
    got = kvstore(daemon, "get", "cli-short", *text, "-o", str(tmp_path / "out"))
    assert got.stdout.startswith("2 pages (8 of 16 tokens), ")
    assert f"4 pages are there, of which 2 can be used: {window}; {state}\n" in got.stdout
    got = kvstore(daemon, "get", "cli-short", *text, "-o", "-")
    assert f"2 of 4 pages: 4 pages are there, of which 2 can be used: {window}; {state}\n" in got.stderr
    got = as_json(kvstore(daemon, "get", "cli-short", *text, "-o", str(tmp_path / "out"), "--json"))
    assert (got["pages"], got["known_pages"], [lack["kind"] for lack in got["lacks"]]) == (2, 4, ["window", "state"])
    with Client(daemon.endpoint) as client:
        client.namespace("cli-short").put(np.arange(100, 104, dtype=np.uint32), bytes(FULL), parts=parts[:1])
    for line in ("get cli-short -o - -t 100,101,102,103", "prefetch cli-short -t 100,101,102,103"):
        done = kvstore(daemon, *line.split())
        assert (done.returncode, done.stdout) == (1, "")
        assert "1 page is there, of which 0 can be used: window (component 1) is missing on page 0" in done.stderr
    lacks = as_json(kvstore(daemon, "match", "cli-short", *text, "--json"))["lacks"]
    assert [(lack["kind"], lack["first_page"], lack["missing_pages"]) for lack in lacks] == [("window", 3, 1), ("state", 3, 1)]
    why = as_json(kvstore(daemon, "why", "cli-short", *text, "--json"))
    assert (why["pages"], why["usable_pages"], [lack["kind"] for lack in why["lacks"]]) == (4, 2, ["window", "state"])
    body = {"tokens": list(range(16))}
    over_http = json.loads(ask(f"{daemon.http}/v1/namespaces/cli-short/match", "POST", body)[2])
    assert over_http["lacks"] == why["lacks"]
    body = {"tokens": list(range(8))}
    assert "lacks" not in json.loads(ask(f"{daemon.http}/v1/namespaces/cli-short/match", "POST", body)[2])


def test_pages_that_are_labelled_with_digests(daemon: DaemonProcess, tmp_path: Path) -> None:
    made(daemon, "cli-digests", CHAIN)
    (tmp_path / "digests").write_bytes(bytes(range(32)))
    np.random.default_rng(2).integers(0, 256, 2 * CHAIN.page_bytes, dtype=np.uint8).tofile(tmp_path / "in")
    labels = ("--digests", f"@{tmp_path / 'digests'}")
    assert as_json(kvstore(daemon, "put", "cli-digests", *labels, "-d", str(tmp_path / "in"), "--json"))["new_pages"] == 2
    assert as_json(kvstore(daemon, "get", "cli-digests", *labels, "-o", str(tmp_path / "out"), "--json"))["pages"] == 2
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert kvstore(daemon, "match", "cli-digests", *labels).stdout.startswith("128 of 128 tokens: 2 pages")
    assert as_json(kvstore(daemon, "pin", "cli-digests", *labels, "--ttl", "1", "--json"))["pages"] == 2
    assert as_json(kvstore(daemon, "prefetch", "cli-digests", *labels, "--json"))["pages"] == 2
    for command in ("match", "why", "delete"):
        done = kvstore(daemon, command, "cli-digests", "-t", "1,2,3,4")
        assert (done.returncode, done.stderr) == (2, f"kvstore: bad_request: {WRONG_KIND} digests of 16 bytes: give --digests\n")


def test_a_flat_namespace_by_its_digests_in_hex(daemon: DaemonProcess, tmp_path: Path) -> None:
    shape = ("--layers", "1", "--kv-heads", "1", "--head-dim", "8", "--page-tokens", "4", "--hash-bytes", "16", "--flat")
    spec = as_json(kvstore(daemon, "ns", "create", "cli-flat", *shape, "--model", "m@1", "--json"))["spec"]
    assert (spec["hash_bytes"], spec["flat"]) == (16, True)
    one, two, three = (bytes([number] * 16).hex() for number in (1, 2, 0xAB))
    page = "x" * 128
    labels = ("--digests", f"{one},{two},{three.upper()}")
    assert as_json(kvstore(daemon, "put", "cli-flat", *labels, "-d", "-", "--json", stdin=3 * page))["new_pages"] == 3
    listed = f'["{two}",\n "{three}"]'
    assert as_json(kvstore(daemon, "match", "cli-flat", "--digests", "-", "--json", stdin=listed))["asked_tokens"] == 8
    (tmp_path / "list.json").write_text(listed)
    named = ("--digests", f"@{tmp_path / 'list.json'}")
    assert as_json(kvstore(daemon, "get", "cli-flat", *named, "-o", str(tmp_path / "out"), "--json"))["pages"] == 2
    assert (tmp_path / "out").read_text() == 2 * page
    assert as_json(kvstore(daemon, "why", "cli-flat", "--digests", two, "--json"))["pages"] == 1
    pin = as_json(kvstore(daemon, "pin", "cli-flat", *labels, "--ttl", "60", "--json"))
    assert pin["pages"] == 3
    assert kvstore(daemon, "unpin", "cli-flat", pin["pin"]).returncode == 0
    assert as_json(kvstore(daemon, "prefetch", "cli-flat", *labels, "--json"))["pages"] == 3
    said_of_gaps(daemon, tmp_path / "out", [one, two, three], page)
    assert as_json(kvstore(daemon, "abandon", "cli-flat", *labels, "--json"))["abandoned_pages"] == 3
    assert as_json(kvstore(daemon, "delete", "cli-flat", "--digests", one, "--json"))["deleted_pages"] == 1
    assert kvstore(daemon, "match", "cli-flat", "--digests", one).returncode == 1


def said_of_gaps(daemon: DaemonProcess, out: Path, there: list[str], page: str) -> None:
    """What is said where digests of a list are not there: only `prefetch` goes on after them."""
    one, two, three = there
    none = "00" * 16
    for digests, pages in ((f"{none},{one}", "1 of 1 page"), (f"{one},{none},{three},{two}", "3 of 3 pages")):
        done = kvstore(daemon, "prefetch", "cli-flat", "--digests", digests)
        whole = digests.count(",") + 1
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"0 blobs brought up; {pages} in DRAM; 1 of {whole} digests missing\n"
    done = kvstore(daemon, "prefetch", "cli-flat", "--digests", none)
    assert (done.returncode, done.stderr) == (1, "kvstore: not_found: none of these digests is in cli-flat\n")
    done = kvstore(daemon, "get", "cli-flat", "--digests", f"{none},{one}", "-o", str(out))
    assert (done.returncode, "the first of these digests is not in cli-flat" in done.stderr) == (1, True)
    short, ends = ("--digests", f"{one},{none},{three}"), "; it ends before digest 1 (from 0 on), the first that is not there\n"
    assert kvstore(daemon, "match", "cli-flat", *short).stdout.endswith(ends)
    assert "it ends before digest 0" in kvstore(daemon, "match", "cli-flat", "--digests", f"{none},{one}").stdout
    assert kvstore(daemon, "get", "cli-flat", *short, "-o", str(out)).stdout.endswith(ends)
    done = kvstore(daemon, "get", "cli-flat", *short, "-o", "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, page, f"1 of 3 pages{ends}")
    assert kvstore(daemon, "get", "cli-flat", "--digests", one, "-o", "-").stderr == ""
    done = kvstore(daemon, "get", "cli-flat", *short, "-o", "-", "--json")
    assert (done.returncode, "standard output can't be both" in done.stderr) == (2, True)


def test_a_flat_namespace_of_a_hybrid_model_is_brought_up_past_what_is_missing(daemon: DaemonProcess) -> None:
    components = (Component("full", 1, 1, 8), Component("window", 1, 1, 8, window=4))
    made(daemon, "cli-flat-hybrid", KVSpec(4, components, hash_bytes=16, flat=True))
    one, none = "11" * 16, "00" * 16
    done = kvstore(daemon, "put", "cli-flat-hybrid", "--digests", one, "-d", "-", "--json", stdin="z" * 256)
    assert as_json(done)["new_pages"] == 1
    found = as_json(kvstore(daemon, "prefetch", "cli-flat-hybrid", "--digests", f"{none},{one}", "--json"))
    assert (found["pages"], found["dram_pages"]) == (1, 1)


def test_the_front_of_a_list_of_a_hybrid_model_is_fetched(daemon: DaemonProcess, tmp_path: Path) -> None:
    spec = KVSpec(4, (Component("full", 2, 1, 8), Component("window", 1, 1, 8, window=4)), hash_bytes=16, flat=True)
    made(daemon, "cli-flat-front", spec)
    pages = np.random.default_rng(7).integers(0, 256, (2, spec.page_bytes), dtype=np.uint8)
    pages.tofile(tmp_path / "in")
    labels = ("--digests", f"{'11' * 16},{'22' * 16}")
    assert as_json(kvstore(daemon, "put", "cli-flat-front", *labels, "-d", str(tmp_path / "in"), "--json"))["new_pages"] == 2
    assert as_json(kvstore(daemon, "get", "cli-flat-front", *labels, "-o", str(tmp_path / "out"), "--json"))["pages"] == 2
    full = spec.part_bytes(spec.whole(0))
    assert (tmp_path / "out").read_bytes() == pages[0, :full].tobytes() + pages[1].tobytes(), "the window of the last page only"


def test_digests_that_do_not_fit(daemon: DaemonProcess) -> None:
    made(daemon, "cli-tokens", KVSpec(4, (Component("full", 2, 1, 8),)))
    for arguments, words in (
        (("match", "cli-tokens", "--digests", "00" * 16), f"{WRONG_KIND} token ids: give --tokens"),
        (("match", "cli-tokens"), "say which pages: by --tokens or"),
        (("match", "cli-tokens", "-t", "1", "--digests", "00"), "say which pages: by --tokens or"),
        (("put", "cli-tokens", "-t", "-", "-d", "-"), "standard input can't be both"),
        (("put", "cli-tokens", "-t", "1,2,3", "-d", "-"), "3 tokens do not fill a page of 4"),
    ):
        done = kvstore(daemon, *arguments)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_tokens_on_one_line_and_data_on_standard_input(daemon: DaemonProcess) -> None:
    made(daemon, "cli-stdin", KVSpec(4, (Component("full", 2, 1, 4),)))
    done = kvstore(daemon, "put", "cli-stdin", "-t", "1,2,3,4", "--data", "-", stdin="y" * 128)
    assert done.stdout.startswith("1 new page, 0 were there; 128 B"), done.stderr
    done = kvstore(daemon, "put", "cli-stdin", "-t", "1,2,3,4", "--data", "-", stdin="y" * 127)
    assert "the data has 127 bytes, not the 128 of a page" in done.stderr
    done = kvstore(daemon, "put", "cli-stdin", "-t", "1,2,3,4", "--data", "-", stdin="y" * 129)
    assert (done.returncode, "there is more to read from - than the 128 bytes of the pages" in done.stderr) == (2, True)
    done = kvstore(daemon, "put", "cli-stdin", "-t", "1,2,3,4", "--first-page", "1", "--data", "-")
    assert (done.returncode, "--first-page is 1, and what was given fills 1 page" in done.stderr) == (2, True)
