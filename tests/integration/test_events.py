"""KV events of a real daemon, followed over real ZeroMQ sockets."""

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvstore.api.wire import KVStoreError
from kvstore.config import load_config
from kvstore.errors import BadRequest
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.event_follower import BlockStored, Follower, hashes
from tests.integration.pages import SPEC, Tokens, content, context, fetch_checked, open_namespace

SMALL = ("--dram", "1MiB", "--ssd", "64MiB")
TOPIC = "kv@default@pages"


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """Settings for events over Unix sockets."""
    return {"KVSTORE_EVENTS": f"ipc://{tmp_path}/events", "KVSTORE_EVENTS_REPLAY": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def daemon(data_dir: Path, place: dict[str, str]) -> Iterator[DaemonProcess]:
    with DaemonProcess(data_dir, *SMALL, environment=place) as running:
        yield running


@pytest.fixture
def follower(daemon: DaemonProcess, place: dict[str, str]) -> Iterator[Follower]:
    with joined(place) as following:
        yield following


def joined(place: dict[str, str], **options: Any) -> Follower:
    """A follower that has heard all that was said so far. Its subscription takes a moment: what comes meanwhile is replayed."""
    following = Follower(place["KVSTORE_EVENTS"], place["KVSTORE_EVENTS_REPLAY"], **options)
    following.catch_up()
    return following


def ask(http: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{http}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())


def why(daemon: DaemonProcess, tokens: Tokens) -> tuple[set[int | bytes], set[int | bytes]]:
    """The hashes of a prompt's pages in DRAM, and on SSD."""
    pages = ask(daemon.http, "/v1/namespaces/pages/why", {"tokens": tokens.tolist()})["found"]
    names = hashes(tokens)
    return {names[p["page"]] for p in pages if p["in_dram"]}, {names[p["page"]] for p in pages if p["on_ssd"]}


def test_a_put_is_told_in_the_form_of_vllm(daemon: DaemonProcess, follower: Follower, place: dict[str, str]) -> None:
    tokens = context(1)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens[:8], content(tokens[:8]))
        follower.until(lambda f: f.where() == {"CPU": set(hashes(tokens[:8]))})
        namespace.put(tokens, content(tokens, 2), first_page=2, durable=True)
        follower.until(lambda f: f.where() == {"CPU": set(hashes(tokens)), "STORAGE": set(hashes(tokens))})
    first, *events = [event for topic, _, batch in follower.messages for event in batch.events if topic == TOPIC]
    assert first == BlockStored(hashes(tokens)[:2], None, [], SPEC.page_tokens, None, "CPU", None)
    on_disk = [event for event in events if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    assert [block for event in on_disk for block in event.block_hashes] == hashes(tokens), "parents come first"
    added = [event for event in events if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert [event.parent_block_hash for event in added] == [hashes(tokens)[1]]
    files = [Path(place[name].removeprefix("ipc://")) for name in ("KVSTORE_EVENTS", "KVSTORE_EVENTS_REPLAY")]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 2, "others can't connect"
    assert all(batch.data_parallel_rank == 0 for _, _, batch in follower.messages)
    assert all(later == number + 1 for (_, number, _), (_, later, _) in pairwise(follower.messages))


def test_pages_that_leave_dram_come_back_and_are_deleted(daemon: DaemonProcess, follower: Follower) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        contexts = [context(10 * seed, 4) for seed in range(24)]  # 1.5 MiB
        for tokens in contexts:
            namespace.put(tokens, content(tokens))
        every = {block for tokens in contexts for block in hashes(tokens)}
        demoted = next(tokens for tokens in contexts if not why(daemon, tokens)[0])
        blocks = set(hashes(demoted))
        follower.until(lambda f: f.where().get("STORAGE", set()) | f.where().get("CPU", set()) == every)
        follower.until(lambda f: f.where()["STORAGE"].issuperset(blocks) and f.where()["CPU"].isdisjoint(blocks))
        assert fetch_checked(namespace, demoted) == 4
        follower.until(lambda f: f.where()["CPU"].issuperset(blocks))
        namespace.delete(demoted, from_page=1)
        gone = set(hashes(demoted)[1:])
        follower.until(lambda f: all(medium.isdisjoint(gone) for medium in f.where().values()))
        assert hashes(demoted)[0] in follower.where()["STORAGE"]


def test_a_namespace_that_is_dropped_takes_only_its_own_along(daemon: DaemonProcess, follower: Follower) -> None:
    tokens = context(3)
    with Client(daemon.endpoint) as client:
        open_namespace(client).put(tokens, content(tokens), durable=True)
        client.namespace("other@one", "rev-2", SPEC).put(tokens, content(tokens))
        follower.until(lambda f: len(f.where()) == 2 and bool(f.where("other%40one")))
        other = follower.where("other%40one")
        urllib.request.urlopen(urllib.request.Request(f"{daemon.http}/v1/namespaces/pages", method="DELETE"), timeout=10).close()
        follower.until(lambda f: not f.where())
        assert follower.where("other%40one") == other


def test_after_a_restart_all_is_told_anew(data_dir: Path, place: dict[str, str]) -> None:
    """Also to one who was there before: its numbers are over, and what it knew is cleared."""
    tokens, lost = context(5), context(65)
    with DaemonProcess(data_dir, *SMALL, environment=place) as daemon, Client(daemon.endpoint) as client:
        old = joined(place)
        open_namespace(client).put(tokens, content(tokens), durable=True)
        open_namespace(client).put(lost, content(lost))
        old.until(lambda f: len(f.where()["CPU"]) == 8)
        daemon.kill()
    before = len(old.messages)
    with DaemonProcess(data_dir, *SMALL, environment=place) as daemon, joined(place) as new, old:
        new.until(lambda f: f.where() == {"STORAGE": set(hashes(tokens))})
        assert [type(event).__name__ for _, _, batch in new.messages for event in batch.events][:2] == ["AllBlocksCleared"] * 2
        old.catch_up()
        old.until(lambda f: f.where() == new.where())
        assert old.messages[before][1] > old.messages[before - 1][1] + 1, "the restart shows in the numbers"
        with Client(daemon.endpoint) as client:
            assert fetch_checked(open_namespace(client), tokens) == 4
        old.until(lambda f: f.where() == {"CPU": set(hashes(tokens)), "STORAGE": set(hashes(tokens))})


def test_what_was_missed_is_repeated(daemon: DaemonProcess, follower: Follower, place: dict[str, str]) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in range(0, 50, 10):
            namespace.put(context(seed), content(context(seed)), durable=True)
            done = set(hashes(context(seed)))
            follower.until(lambda f, done=done: f.where().get("STORAGE", set()).issuperset(done))  # type: ignore[misc]
        client.namespace("other", "rev-2", SPEC).put(context(5), content(context(5)))
        follower.until(lambda f: bool(f.where("other")))
    numbers = [number for _, number, _ in follower.messages]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert len(numbers) >= 6, "one at least for each"
    for first in (0, numbers[0], numbers[4], numbers[-1]):
        assert [m[1] for m in follower.ask(first)] == [n for n in numbers if n >= first]
    assert [(m[0], m[1]) for m in follower.ask(numbers[2])] == [m[:2] for m in follower.messages[2:]]
    assert not follower.ask(numbers[-1] + 1)
    assert {m[0] for m in follower.ask(0, "kv@default@other")} == {"kv@default@other"}
    with Follower(place["KVSTORE_EVENTS"], place["KVSTORE_EVENTS_REPLAY"]) as late:
        late.catch_up()
        assert late.where() == follower.where()
    asking = zmq.Context()
    dealer = asking.socket(zmq.DEALER)
    dealer.connect(place["KVSTORE_EVENTS_REPLAY"])
    for frames in ([b"x"], [b"", b"short"], [b"", b"8" * 8, b"t", b"more"], [b"", b"9" * 9]):  # not understood: passed over
        dealer.send_multipart(frames)
    dealer.send_multipart([b"", b"\xfe" * 8])
    assert dealer.poll(10_000)
    assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""], "of a number to come there is nothing but the end"
    asking.destroy(linger=0)


def test_one_who_does_not_read_holds_up_nobody(daemon: DaemonProcess, follower: Follower, place: dict[str, str]) -> None:
    with Follower(place["KVSTORE_EVENTS"], place["KVSTORE_EVENTS_REPLAY"], high_water=1) as slow, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        asked = zmq.Context()
        stuck = asked.socket(zmq.DEALER)  # asks for everything, and takes nothing
        stuck.set_hwm(1)
        stuck.connect(place["KVSTORE_EVENTS_REPLAY"])
        for _ in range(20):
            stuck.send_multipart([b"", bytes(8)])
        for seed in range(0, 400, 10):
            namespace.put(context(seed), content(context(seed)), durable=True)
        every = {block for seed in range(0, 400, 10) for block in hashes(context(seed))}
        follower.until(lambda f: f.where().get("STORAGE") == every)
        slow.catch_up()
        assert slow.where()["STORAGE"] == every
        asked.destroy(linger=0)


def test_the_view_of_a_follower_is_that_of_the_daemon(daemon: DaemonProcess, follower: Follower) -> None:
    """After random puts, fetches and deletions, by match and by tier."""
    rng = random.Random(7)
    prompts = [context(10 * seed + rng.randrange(3), rng.randint(1, 9)) for seed in range(12) for _ in range(3)]
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for _ in range(80):
            tokens = rng.choice(prompts)
            try:
                match rng.choice(("put", "put", "durable", "fetch", "delete")):
                    case "fetch":
                        fetch_checked(namespace, tokens)
                    case "delete":
                        namespace.delete(tokens, from_page=rng.randrange(len(tokens) // SPEC.page_tokens))
                    case ack:
                        namespace.put(tokens, content(tokens), durable=ack == "durable")
            except KVStoreError:
                pass
            follower.read(0)
        for tokens in prompts:
            names = hashes(tokens)
            with namespace.match(tokens, parts=False) as hit:
                follower.until(lambda f, names=names, pages=hit.pages: _hit(f, names) == pages)  # type: ignore[misc]
        follower.until(lambda f: all(_same(f, daemon, tokens) for tokens in prompts))
        assert follower.where()["STORAGE"]
    assert not follower.replayed or follower.messages


def _hit(follower: Follower, names: list[bytes | int]) -> int:
    there = set().union(*follower.where().values())
    return next((at for at, name in enumerate(names) if name not in there), len(names))


def _same(follower: Follower, daemon: DaemonProcess, tokens: Tokens) -> bool:
    names, (in_dram, on_ssd) = set(hashes(tokens)), why(daemon, tokens)
    return (follower.where().get("CPU", set()) & names, follower.where().get("STORAGE", set()) & names) == (in_dram, on_ssd)


def test_over_tcp_with_whole_keys_tokens_and_a_topic(tmp_path: Path) -> None:
    environment = {
        "KVSTORE_EVENTS": "tcp://127.0.0.1:0", "KVSTORE_EVENTS_REPLAY": "tcp://[::1]:0", "KVSTORE_EVENTS_HASHES": "bytes",
        "KVSTORE_EVENTS_TOKENS": "true", "KVSTORE_EVENTS_TOPIC": "kv@10.0.0.1:8000@{namespace}",
    }  # fmt: skip
    tokens, pod = context(1), "10.0.0.1:8000"
    with DaemonProcess(tmp_path / "data", *SMALL, environment=environment) as daemon, Client(daemon.endpoint) as client:
        found = re.search(r"KV events on (\S+), replay on (\S+)", "\n".join(daemon.lines))
        assert found is not None
        with Follower(found[1], found[2]) as following:
            following.catch_up()
            for name, recipes in (("with", True), ("without", False)):
                client.namespace(name, f"rev-{2 - recipes}", SPEC, recipes=recipes).put(tokens, content(tokens), durable=True)
            following.until(lambda f: len(f.where("with", pod)) == 2 == len(f.where("without", pod)))
            assert following.where("with", pod)["CPU"] == set(hashes(tokens, whole=True))
            events = [(t, e) for t, _, b in following.messages for e in b.events if isinstance(e, BlockStored)]
    told = [event.token_ids for topic, event in events if topic.endswith("with") and event.medium == "CPU"]
    assert np.array_equal(np.concatenate(told), tokens)
    assert all(not event.token_ids for topic, event in events if topic.endswith("without"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"events": "tcp://0.0.0.0:5557"}, "events_insecure"),
        ({"events": "tcp://*:5557"}, "events_insecure"),
        ({"events": "tcp://127.0.0.1:1", "events_replay": "tcp://10.0.0.1:5558"}, "events_replay is tcp://10.0.0.1:5558, which others"),
        ({"events": "inproc://events"}, "give tcp://"),
        ({"events": "tcp://127.0.0.1"}, "give tcp://"),
        ({"events": "ipc://"}, "give tcp://"),
        ({"events_replay": "tcp://127.0.0.1:1"}, "go with events"),
        ({"events_tokens": True}, "go with events"),
        ({"events_topic": "kv@{pod}"}, "only {tenant} and {namespace}"),
        ({"events_topic": "kv@{tenant.__class__}"}, "neither tenant nor namespace"),
        ({"events_topic": "kv@{"}, "only {tenant} and {namespace}"),
        ({"events_hashes": "hex"}, "events_hashes"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        load_config(settings, environment={})


def test_settings_that_are_taken() -> None:
    for settings in (
        {"events": "tcp://127.0.0.1:5557"}, {"events": "tcp://localhost:5557"}, {"events": "tcp://[::1]:5557"}, {"events": "ipc:///run/events"},
        {"events": "tcp://*:5557", "events_insecure": True}, {"events": "tcp://127.9.9.9:5557", "events_tokens": True},
    ):  # fmt: skip
        assert load_config(settings, environment={}).event_settings().endpoint == settings["events"]
    assert not load_config({}, environment={}).store_config().events


def test_an_address_that_is_taken_is_named(data_dir: Path) -> None:
    taken = zmq.Context()
    there = taken.socket(zmq.PUB)
    port = there.bind_to_random_port("tcp://127.0.0.1")
    daemon = DaemonProcess(data_dir, *SMALL, environment={"KVSTORE_EVENTS": f"tcp://127.0.0.1:{port}"})
    try:
        assert daemon.wait_exit() != 0
        assert f"events: can't listen on tcp://127.0.0.1:{port}" in "\n".join(daemon.lines)
    finally:
        daemon.kill()
        taken.destroy(linger=0)
