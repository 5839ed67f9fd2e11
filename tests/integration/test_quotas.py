"""Quotas of a real daemon: a tenant at its limit gives up its own, is told so, and takes nothing from the others."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import PROTOCOL_VERSION, FrameType, pack_runs
from kvstore.api.wire.messages import CreateNamespace, ErrorReply, FetchRequest, Hello, MatchRequest, NamespaceInfo
from kvstore.api.wire.messages import unpack as read
from kvstore.api.wire.put_messages import PutHandle, PutReady, PutStart
from kvstore.api.wire.runs import Run
from kvstore_client import Busy, Client, DeadlineExceeded, NoSpace
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked
from tests.integration.raw import RawClient, stat, wait_for_baseline
from tests.integration.secured import ADMIN, ALICE, BOB, TOKENS, write_tokens

DRAM, SSD, IN_FLIGHT, CONNECTIONS = 1 << 20, 1 << 20, 512 << 10, 4
QUOTAS = f"""
[tenants.alice]
dram = {DRAM}
ssd = "{SSD >> 20}MiB"
in_flight = "{IN_FLIGHT >> 10}KiB"
connections = {CONNECTIONS}
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("limited")
    tokens = write_tokens(folder / "tokens.toml", TOKENS + QUOTAS)
    environment = {"KVSTORE_PUT_WAIT": "0.3"}
    arguments = ("--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(tokens))
    with DaemonProcess(folder / "data", *arguments, environment=environment) as running:
        yield running


@pytest.fixture
def alice(limited: DaemonProcess) -> Iterator[Client]:
    wait_for_baseline(limited.http, token=ADMIN)
    with Client(limited.endpoint, token=ALICE, connections=1) as client:
        yield client
        for namespace in client.namespaces():
            namespace.drop()


def used(daemon: DaemonProcess, tier: str, token: str = ALICE) -> int:
    found: int = stat(daemon.http, token)["tiers"][tier]["used"]
    return found


def fill(namespace: Namespace, contexts: int, *, durable: bool = False, first: int = 0) -> None:
    for n in range(first, first + contexts):
        namespace.put(context(10 * n), content(context(10 * n)), durable=durable)


def start_put(raw: RawClient, space: str, seed: int, pages: int) -> int | ErrorReply:
    start = PutStart(namespace=space, put_id=bytes(16), first_page=0, parts=[(0, 0, 8, 0, 2)])
    header, meta, _ = raw.ask(FrameType.PUT, start, context(seed, pages).tobytes())
    return read(PutReady, meta).handle if header.type is FrameType.PUT_READY else read(ErrorReply, meta)


def test_dram(limited: DaemonProcess, alice: Client) -> None:
    with Client(limited.endpoint, token=BOB) as bob:
        his = bob.namespace("his", "f", SPEC)
        fill(his, 10)
        hers = alice.namespace("hers", "f", SPEC)
        for n in range(0, 40, 4):  # 160 pages, where a bit over 60 fit
            fill(hers, 4, first=n)
            assert used(limited, "dram") <= DRAM
        for n in range(10):
            with his.match(context(10 * n)) as match:
                assert match.dram_pages == 4, "bob's pages made room for alice's"
        assert fetch_checked(hers, context(10 * 39)) == 4
        newest = hers.match(context(10 * 39))
        assert newest.dram_pages == 4
        newest.release()
        his.drop()


def test_dram_that_is_all_leased_is_busy(limited: DaemonProcess, alice: Client) -> None:
    hers = alice.namespace("hers", "f", SPEC)
    fill(hers, 14)
    leases = [hers.match(context(10 * n)) for n in range(14)]
    with RawClient(limited.endpoint, token=ALICE) as raw:
        refused = start_put(raw, hers.id, 10 * 99, 12)
        assert isinstance(refused, ErrorReply)
        assert (refused.code, bool(refused.retry_after_ms)) == ("busy", True)
        assert "quota" in refused.message
    with pytest.raises(DeadlineExceeded):  # the SDK tries again until its deadline
        hers.put(context(990, 12), content(context(990, 12)), timeout=0.5)
    with Client(limited.endpoint, token=BOB) as bob:
        his = bob.namespace("his", "f", SPEC)
        fill(his, 2)
        his.drop()
    for lease in leases:
        lease.release()
    hers.put(context(990, 12), content(context(990, 12)))


def test_ssd_makes_room_among_its_own(limited: DaemonProcess, alice: Client) -> None:
    with Client(limited.endpoint, token=BOB) as bob:
        his = bob.namespace("his", "f", SPEC, retention_s=0)  # could be evicted: it is older than all of hers, and larger
        fill(his, 25, durable=True)
        before = used(limited, "ssd", BOB)
        hers = alice.namespace("hers", "f", SPEC, retention_s=0)
        for n in range(20):  # 80 pages, where 51 fit
            fill(hers, 1, durable=True, first=n)
            assert 0 < used(limited, "ssd") <= SSD
        assert used(limited, "ssd", BOB) == before > 0
        assert fetch_checked(hers, context(190)) == 4
        his.drop()


def test_ssd_that_is_all_retained_is_no_space(limited: DaemonProcess, alice: Client) -> None:
    hers = alice.namespace("hers", "f", SPEC)
    with pytest.raises(NoSpace, match=r"the quota of \d+ bytes on SSD \(`ssd` of alice\) is full"):
        fill(hers, 20, durable=True)
    assert used(limited, "ssd") <= SSD
    fill(hers, 2, first=20)  # memory is another matter
    assert fetch_checked(hers, context(200)) == 4
    with Client(limited.endpoint, token=BOB) as bob:
        his = bob.namespace("his", "f", SPEC)
        fill(his, 10, durable=True)
        his.drop()


def test_puts_in_flight(limited: DaemonProcess, alice: Client) -> None:
    hers = alice.namespace("hers", "f", SPEC)
    with RawClient(limited.endpoint, token=ALICE) as raw:
        first = start_put(raw, hers.id, 10, 20)
        assert isinstance(first, int)
        second = start_put(raw, hers.id, 20, 20)
        assert isinstance(second, ErrorReply)
        assert (second.code, bool(second.retry_after_ms)) == ("busy", True)
        too_large = start_put(raw, hers.id, 30, 40)
        assert isinstance(too_large, ErrorReply)
        assert too_large.code == "no_space"
        assert raw.ask(FrameType.ABORT, PutHandle(handle=first))[0].type is FrameType.OK
        assert isinstance(start_put(raw, hers.id, 20, 20), int)
    wait = context(40, 20)
    hers.put(wait, content(wait))  # the put of the closed connection is over
    assert fetch_checked(hers, wait) == 20


def test_fetches_in_flight(limited: DaemonProcess, alice: Client) -> None:
    """A fetch larger than the quota goes, but alone; others are told to wait, and do."""
    hers = alice.namespace("hers", "f", SPEC)
    fill(hers, 1)
    with RawClient(limited.endpoint, token=ALICE) as raw:
        _, _, ids = raw.ask(FrameType.MATCH, MatchRequest(namespace=hers.id, parts=True), context(0).tobytes())
        runs = pack_runs([Run(0, 0, 4096 * 4, 0, 1)] * 2000)  # 32 MB, which nobody reads
        raw.send(FrameType.FETCH, 1, FetchRequest(namespace=hers.id, blobs=1), ids[:16] + runs)
        raw.read(1)  # it is under way: a small one on another connection would overtake it
        with RawClient(limited.endpoint, token=ALICE) as other:
            message = FetchRequest(namespace=hers.id, blobs=1)
            header, meta, _ = other.ask(FrameType.FETCH, message, ids[:16] + pack_runs([Run(0, 0, 4096 * 4, 0, 1)]))
            assert header.type is FrameType.ERROR
            assert (read(ErrorReply, meta).code, bool(read(ErrorReply, meta).retry_after_ms)) == ("busy", True)
    with hers.match(context(0)) as match:
        out = np.zeros(match.pages * SPEC.page_bytes, np.uint8)
        hers.fetch(match, out)  # the SDK waits until the daemon has noticed that the other is gone
        assert np.array_equal(out, content(context(0)))


def test_connections(limited: DaemonProcess) -> None:
    wait_for_baseline(limited.http, token=ADMIN)
    with RawClient(limited.endpoint, token=ALICE) as first, ExitStack() as more:
        for _ in range(CONNECTIONS - 2):
            more.enter_context(RawClient(limited.endpoint, token=ALICE, session=first.session))
        with (
            Client(limited.endpoint, token=ALICE, connections=1),
            pytest.raises(Busy, match=rf"quota of {CONNECTIONS} connections \(`connections` of alice\)"),
        ):
            Client(limited.endpoint, token=ALICE, connections=1)
        with RawClient(limited.endpoint, hello=False) as refused:
            for _ in range(CONNECTIONS):  # whoever was refused does not count
                with RawClient(limited.endpoint, hello=False) as raw:
                    raw.send(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], token="wrong-0123456789abcdef"))
                    assert raw.error().code == "unauthenticated"
            refused.send(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], token=BOB))
            assert refused.receive()[0].type is FrameType.WELCOME, "alice's connections count against bob"
    wait_for_baseline(limited.http, token=ADMIN)


def test_quotas_change_without_a_restart(limited: DaemonProcess, tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.toml", TOKENS + QUOTAS)
    arguments = ("--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(file))
    with DaemonProcess(tmp_path / "data", *arguments) as daemon, RawClient(daemon.endpoint, token=ALICE) as raw:
        created = CreateNamespace(name="n", fingerprint="f", spec=SPEC.to_dict())
        space = read(NamespaceInfo, raw.ask(FrameType.NAMESPACE_CREATE, created)[1]).id
        assert isinstance(start_put(raw, space, 1, 40), ErrorReply)
        write_tokens(file, TOKENS)
        while isinstance(start_put(raw, space, 1, 40), ErrorReply):
            time.sleep(0.05)
