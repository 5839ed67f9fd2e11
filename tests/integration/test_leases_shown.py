"""What holds pages: leases and pins over HTTP and on the command line, and to whom they are shown."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore_client import Client, KVSpec
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.secured import ADMIN, ALICE, ALICE_READS, BOB, ask, write_tokens
from tests.integration.test_cli import as_json, kvstore

FLAT = KVSpec(SPEC.page_tokens, SPEC.components, hash_bytes=16, flat=True)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("leases")
    tokens = write_tokens(folder / "tokens.toml")
    with DaemonProcess(folder / "data", "--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(tokens)) as running:
        yield running


def listed(daemon: DaemonProcess, token: str = "", query: str = "") -> dict[str, Any]:
    status, _, body = ask(f"{daemon.http}/v1/leases{query}", token)
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def filled(client: Client, name: str, seed: int) -> Namespace:
    namespace = open_namespace(client, name)
    namespace.put(context(seed), content(context(seed)))
    return namespace


def test_leases_and_pins_are_listed_the_largest_first(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, name="[red]worker\x1b 7") as client:
        namespace = filled(client, "held", 1)
        number, _ = namespace.pin(context(1)[: 2 * SPEC.page_tokens], 60)
        with namespace.match(context(1), lease_s=30):
            told = listed(daemon, query="?namespace=held")
            assert (told["leases"], told["pins"], told["nbytes"]) == (1, 1, 6 * SPEC.page_bytes)
            lease, pin = told["items"]
            assert (lease["kind"], lease["pages"], lease["client"], 25 < lease["ends_s"] <= 30) == ("lease", 4, "[red]worker\x1b 7", True)
            assert lease["dram_bytes"] >= lease["nbytes"] == 4 * SPEC.page_bytes
            assert (pin["kind"], pin["pages"], pin["pin"], pin["namespace"]) == ("pin", 2, str(number), namespace.id)
            assert [each["kind"] for each in listed(daemon, query="?limit=1")["items"]] == ["lease"]
            shown = kvstore(daemon, "leases", "held").stdout
            assert shown.startswith("1 lease and 1 pin on ")
            assert "[red]worker? 7" in shown
            assert f"unpin with {number}" in shown
            assert "of which the 1 largest are" in kvstore(daemon, "leases", "-n", "1").stdout
        namespace.unpin(number)
    assert as_json(kvstore(daemon, "leases", "held", "--json"))["items"] == []


def test_pages_that_stand_alone_and_equal_bytes_are_counted_once(daemon: DaemonProcess) -> None:
    digests = b"".join(bytes([number] * 16) for number in (1, 2, 3))
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("held-flat", "rev-1", FLAT)
        namespace.put(digests, bytes(3 * FLAT.page_bytes))
        with namespace.match(digests):
            (lease,) = listed(daemon, query="?namespace=held-flat")["items"]
            assert (lease["pages"], lease["nbytes"]) == (3, 3 * FLAT.page_bytes)
            assert FLAT.page_bytes <= lease["dram_bytes"] < 2 * FLAT.page_bytes


def test_nobody_sees_the_leases_of_other_tenants_but_who_watches_the_daemon(secured: DaemonProcess) -> None:
    with Client(secured.endpoint, token=ALICE) as alice, Client(secured.endpoint, token=BOB) as bob:
        numbers = {}
        for client, name in ((alice, "of-alice"), (bob, "of-bob")):
            numbers[name], _ = filled(client, name, 1).pin(context(1), 60)
        with alice.namespace("of-alice").match(context(1)), bob.namespace("of-bob").match(context(1)):
            for token, name in ((ALICE, "of-alice"), (ALICE_READS, "of-alice"), (BOB, "of-bob")):
                told = listed(secured, token)
                assert (told["leases"], told["pins"]) == (1, 1)
                assert {each["name"] for each in told["items"]} == {name}
                assert not any("tenant" in each for each in told["items"])
                assert [each["pin"] for each in told["items"] if "pin" in each] == [str(numbers[name])]
            other = ask(f"{secured.http}/v1/leases?namespace=of-bob", ALICE)
            assert other[0] == 404
            assert other[2].replace(b"of-bob", b"nothere") == ask(f"{secured.http}/v1/leases?namespace=nothere", ALICE)[2]
            told = listed(secured, ADMIN)
            assert {(each["tenant"], each["name"]) for each in told["items"]} == {("alice", "of-alice"), ("bob", "of-bob")}
            assert not any("pin" in each for each in told["items"])
            assert len(listed(secured, ADMIN, "?namespace=of-bob")["items"]) == 2
            assert "tenant" in kvstore(secured, "--token", ADMIN, "leases").stdout
    assert ask(f"{secured.http}/v1/leases")[0] == 401


@pytest.mark.parametrize("query", ["?limit=0", "?limit=201", "?limit=x", "?limit=", "?namespace=", "?namespace=a%20b"])
def test_what_is_asked_is_checked(daemon: DaemonProcess, query: str) -> None:
    assert ask(f"{daemon.http}/v1/leases{query}")[0] == 400


def test_of_a_namespace_that_is_not_there(daemon: DaemonProcess) -> None:
    done = kvstore(daemon, "leases", "nope")
    assert (done.returncode, "there is no namespace 'nope'" in done.stderr) == (2, True)
