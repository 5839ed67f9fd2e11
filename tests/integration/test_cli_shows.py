"""What the commands print of namespaces, of a store by its configuration file, and of what is not there."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvstore.cli import watch
from kvstore.cli.common import table_console
from kvstore_client import Client, Component, KVSpec, fingerprint_revision
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.secured import ADMIN, ALICE, BOB, TOKENS, write_tokens
from tests.integration.test_check import check
from tests.integration.test_cli import as_json, kvstore


def test_admin_access_shows_the_namespaces_of_all_by_tenant(data_dir: Path) -> None:
    tokens = write_tokens(data_dir.parent / "tokens.toml")
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(tokens)) as daemon:
        assert "no namespaces yet" in kvstore(daemon, "--token", ADMIN, "ns", "list").stdout
        for token, name in ((ALICE, "of-alice"), (BOB, "of-bob")):
            with Client(daemon.endpoint, token=token) as client:
                open_namespace(client, name)
        for command in (("ns", "list"), ("status",)):
            shown = kvstore(daemon, "--token", ADMIN, *command).stdout
            assert all(words in shown for words in ("tenant", "alice", "of-alice", "bob", "of-bob")), shown
            shown = kvstore(daemon, "--token", ALICE, *command).stdout
            assert "of-alice" in shown
            assert "bob" not in shown
            assert "tenant" not in shown
        listed = as_json(kvstore(daemon, "--token", ADMIN, "ns", "list", "--json"))
        assert {(item["tenant"], item["name"]) for item in listed} == {("alice", "of-alice"), ("bob", "of-bob")}


def test_a_namespace_is_shown_in_rows_that_fit_a_screen(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        client.namespace("shown", "rev-of-shown", SPEC, recipes=True)
    shown = kvstore(daemon, "ns", "show", "shown").stdout
    assert "full: 8 layers, 2 KV heads of 64 bf16, 2 planes" in shown
    assert "{" not in shown
    assert max(map(len, shown.splitlines())) < 100


@pytest.mark.parametrize("command", [("ns", "show", "nope"), ("ns", "drop", "nope", "--yes"), ("match", "nope", "-t", "1,2,3,4")])
def test_a_namespace_that_is_not_there_is_said_so(daemon: DaemonProcess, command: tuple[str, ...]) -> None:
    done = kvstore(daemon, *command)
    assert done.returncode == 2
    assert "there is no namespace 'nope': `kvstore ns list` shows those that there are, `kvstore ns create` makes one" in done.stderr


def test_a_stopped_store_is_found_by_the_configuration_of_its_daemon(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint) as client:
        open_namespace(client).put(context(1), content(context(1)), durable=True)
    file = data_dir.parent / "kvstore.toml"
    file.write_text(f'data_dir = "{data_dir}"\n')
    done = check("--config", str(file))
    assert (done.returncode, "4 pages" in done.stdout) == (0, True), done.stdout + done.stderr
    assert check("--config", str(data_dir / "nowhere.toml")).returncode == 2


@pytest.mark.parametrize("ttl", ["0", "-1", "nan"])
def test_a_pin_without_a_time_names_the_argument(daemon: DaemonProcess, ttl: str) -> None:
    done = kvstore(daemon, "pin", "pages", "-t", "1,2,3,4", "--ttl", ttl)
    assert (done.returncode, "--ttl is" in done.stderr) == (2, True), done.stderr


def test_what_is_there_before_the_pages_asked_about_is_told(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client).put(context(7_000), content(context(7_000)))
    tokens = ",".join(map(str, context(7_000).tolist()))
    done = kvstore(daemon, "why", "pages", "-t", tokens, "--first-page", "9")
    assert (done.returncode, "4 pages of this prefix are in pages, but none from page 9 on" in done.stderr) == (1, True), done.stderr


def test_there_are_no_rates_over_a_restart(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--dram", "16MiB", "--ssd", "16MiB")
    with DaemonProcess(data_dir, *place) as first:
        with Client(first.endpoint) as client:
            open_namespace(client).put(context(1), content(context(1)), durable=True)
        looks = watch.looks(first.http, 0.1, 0)
        before = next(looks)
        assert watch.rates(*before)["put_pages"] == 0
        port = urlsplit(first.http).port
    with DaemonProcess(data_dir, *place, "--http-port", str(port)):
        look = next(looks)
        assert look[0]["totals"]["put_pages"] == 0 < before[0]["totals"]["put_pages"]
        assert watch.rates(*look) == {}
        table_console().print(watch.shown(*look))
        words = capsys.readouterr().out
        assert "restarted" in words
        assert "/s" not in words.replace("matches/s", "")
        assert watch.rates(*next(looks))["put_pages"] == 0
        looks.close()


HYBRID = KVSpec(
    16,
    (
        Component("full", 8, 2, 64),
        Component("window", 24, 2, 64, window=1024),
        Component("state", 12, 1, 4096, dtype="f32", planes=1),
    ),
)


def test_a_hybrid_namespace_is_the_one_that_the_sdk_makes(daemon: DaemonProcess) -> None:
    shape = ("--kv-heads", "2", "--head-dim", "64", "--page-tokens", "16", "--model", "hybrid@v1.0")
    others = (
        "--component",
        "window,layers=24,window=1024",
        "--component",
        "state, layers=12, kv-heads=1, head_dim=4096, planes=1, dtype=f32",
    )
    made = kvstore(daemon, "ns", "create", "hybrid", "--layers", "8", *shape, *others)
    assert made.returncode == 0, made.stderr
    assert "window over 1,024 tokens: 24 layers" in made.stdout
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("hybrid")
        assert namespace.spec == HYBRID
        model = fingerprint_revision("hybrid", "v1.0", settings={"kv_dtype": "bf16"})
        assert client.namespace("hybrid", model, HYBRID).id == namespace.id
        assert (
            as_json(kvstore(daemon, "ns", "create", "hybrid", *shape, "--component", "full,layers=8", *others, "--json"))["id"]
            == namespace.id
        )


def test_why_it_was_done_to_no_page_is_said(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client).put(context(8810), content(context(8810)))
    ids = ",".join(map(str, context(8810).tolist()))
    front = ",".join(map(str, context(8810)[:4].tolist()))
    for command, why in (
        (("abandon", "pages", "-t", front), "contexts that are there go on from it"),
        (("abandon", "pages", "--session", "unheard-of"), "no use by this session is known"),
        (("delete", "pages", "-t", "9,9,9,9"), "nothing of it is there"),
        (("delete", "pages", "-t", front, "--from-token", "4"), "nothing of it is there from that token on"),
    ):
        done = kvstore(daemon, *command)
        assert (done.returncode, done.stdout.startswith("0 pages "), why in done.stdout) == (1, True, True), done.stdout
    assert kvstore(daemon, "delete", "pages", "-t", ids).stdout == "4 pages deleted\n"


def test_a_prompt_that_fills_no_page_is_told_of(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client)
    assert "3 tokens fill no page: one has 4" in kvstore(daemon, "match", "pages", "-t", "1,2,3").stdout
    assert "fill no page" not in kvstore(daemon, "match", "pages", "-t", "1,2,3,4").stdout


def test_a_tenant_is_shown_no_more_room_than_there_is(data_dir: Path) -> None:
    tokens = write_tokens(data_dir.parent / "tokens.toml", f'{TOKENS}\n[tenants.alice]\ndram = "64GiB"\nssd = "8MiB"\n')
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(tokens)) as daemon:
        tiers = as_json(kvstore(daemon, "--token", ALICE, "status", "--json"))["tiers"]
        assert (tiers["dram"]["capacity"], tiers["ssd"]["capacity"]) == (16 << 20, 8 << 20)
