"""A client that fetches a prefix piece by piece from a daemon that has it on SSD only: what comes next is read before it is asked for."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import DIGEST_BYTES, FrameType, Run, pack_runs, slice_digest, unpack
from kvstore.api.wire.messages import ErrorReply, FetchRequest
from kvstore.digests import blob_id
from kvstore_client import AsyncClient, Client, Component, KVSpec
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import RawClient, stat
from tests.waiting import wait_until

PAGES = 12
SIZES = ("--dram", "64MiB", "--ssd", "128MiB")
SMALL = KVSpec(4, (Component("full", 2, 2, 1024, "u8", planes=1),))
LARGE = KVSpec(16, (Component("full", 4, 2, 8 << 10, "u8", planes=1),), max_slice_bytes=1 << 20)
SPECS = {"small": SMALL, "large": LARGE}
"""Pages of 16 KiB and of a MiB."""


def tokens_of(spec: KVSpec) -> npt.NDArray[np.uint32]:
    return np.arange(PAGES * spec.page_tokens, dtype=np.uint32)


def content_of(spec: KVSpec) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(9).integers(0, 256, (PAGES, spec.page_bytes), dtype=np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cold") / "data"
    with DaemonProcess(folder, *SIZES) as daemon, Client(daemon.endpoint, shared_memory=False) as client:
        for name, spec in SPECS.items():
            client.namespace(name, "model", spec).put(tokens_of(spec), content_of(spec), durable=True)
    return folder


def totals(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = stat(daemon.http)["totals"]
    return found


def _wait_for(daemon: DaemonProcess, blobs: int) -> None:
    wait_until(lambda: totals(daemon)["read_ahead_blobs"] == blobs, f"not {blobs} were read ahead")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shared_memory", [False, True])
def test_pages_in_order_are_read_before_they_are_asked_for(data: Path, name: str, shared_memory: bool) -> None:
    spec, content = SPECS[name], content_of(SPECS[name])
    with DaemonProcess(data, *SIZES) as daemon, Client(daemon.endpoint, shared_memory=shared_memory) as client:
        namespace = client.namespace(name)
        with namespace.match(tokens_of(spec)) as match:
            assert (match.pages, match.dram_pages) == (PAGES, 0)
            for page in range(PAGES):
                out = np.zeros(spec.page_bytes, np.uint8)
                namespace.fetch(match, out, pages=(page, page + 1))
                assert np.array_equal(out, content[page])
                _wait_for(daemon, min(page + 2, PAGES - 1))
        assert totals(daemon)["promoted_blobs"] == PAGES, "something was read twice"


def test_without_an_order_nothing_is_read_ahead(data: Path) -> None:
    content = content_of(LARGE)
    with DaemonProcess(data, *SIZES) as daemon, Client(daemon.endpoint, shared_memory=False) as client:
        namespace = client.namespace("large")
        with namespace.match(tokens_of(LARGE)) as match:
            for page in (7, 3, 9, 0, 5):
                out = np.zeros(LARGE.page_bytes, np.uint8)
                namespace.fetch(match, out, pages=(page, page + 1))
                assert np.array_equal(out, content[page])
        assert (totals(daemon)["promoted_blobs"], totals(daemon)["read_ahead_blobs"]) == (5, 0)


async def test_what_is_named_follows_what_was_asked_for(data: Path) -> None:
    with DaemonProcess(data, *SIZES) as daemon:
        async with AsyncClient(daemon.endpoint, shared_memory=False) as client:
            namespace = await client.namespace("large")
            whole, ids = LARGE.whole(), DIGEST_BYTES
            async with await namespace.match(tokens_of(LARGE)) as match:
                all_ids = match.ids_of(0, PAGES, whole)
                assert len(all_ids) == PAGES * ids
                assert match.in_order.after(match, 0, 1, whole) == all_ids[ids : 3 * ids], "twice as much as was asked for"
                assert match.in_order.after(match, 1, 4, whole) == all_ids[4 * ids : 10 * ids]
                assert match.in_order.after(match, 4, 9, whole) == all_ids[9 * ids :], "to the end of what was matched"
                assert match.in_order.after(match, 9, PAGES, whole) == b""
                assert match.in_order.after(match, 2, 3, whole) == b"", "after a jump nothing is known"
                assert match.in_order.after(match, 3, 4, whole) == all_ids[4 * ids : 6 * ids]
                await namespace.fetch(match, np.zeros(LARGE.page_bytes * PAGES, np.uint8))
            async with await namespace.match(tokens_of(LARGE)) as match:
                assert match.in_order.after(match, 0, 1, whole) == b"", "all of it is in DRAM"


@pytest.mark.parametrize("ahead", [b"?" * 15, b"?" * 17, b"?" * DIGEST_BYTES * 65])
def test_what_is_no_list_of_ids_is_a_bad_request(data: Path, ahead: bytes) -> None:
    with DaemonProcess(data, *SIZES) as daemon, RawClient(daemon.endpoint) as raw:
        payload = blob_id(slice_digest(content_of(SMALL)[0])) + pack_runs([Run(0, 0, SMALL.page_bytes)])
        header, meta, _ = raw.ask(FrameType.FETCH, FetchRequest(namespace="small", blobs=1, ahead=ahead), payload)
        assert header.type is FrameType.ERROR
        error = unpack(ErrorReply, meta)
        assert error.code == "bad_request"
        assert "read ahead" in error.message
        header, _, _ = raw.ask(FrameType.FETCH, FetchRequest(namespace="small", blobs=1, ahead=b"?" * DIGEST_BYTES * 64), payload)
        assert header.type is FrameType.DATA, "ids that nobody knows are passed over"
