"""Fetches from a daemon whose bytes are on SSD only, over TCP: large blobs, of which a part may be bad."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, NotFound
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat
from tests.store.test_arriving import DATA, LARGE, MIB

SIZES = ("--dram", "64MiB", "--ssd", "128MiB")
TOKENS = np.arange(3 * LARGE.page_tokens, dtype=np.uint32)
CONTENT = np.random.default_rng(6).integers(0, 256, 3 * len(DATA), dtype=np.uint8)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    with DaemonProcess(tmp_path / "data", *SIZES) as daemon, Client(daemon.endpoint, shared_memory=False) as client:
        client.namespace("large", "model", LARGE).put(TOKENS, CONTENT, durable=True)
    return tmp_path / "data"


def test_large_blobs_come_from_ssd(cold: Path) -> None:
    with DaemonProcess(cold, *SIZES) as daemon, Client(daemon.endpoint, shared_memory=False) as client:
        namespace = client.namespace("large")
        out = np.zeros(len(CONTENT), np.uint8)
        with namespace.match(TOKENS) as match:
            assert (match.pages, match.dram_pages) == (3, 0)
            namespace.fetch(match, out)
        assert np.array_equal(out, CONTENT)
        assert stat(daemon.http)["totals"]["promoted_blobs"] == 3


def test_a_page_whose_last_slice_is_bad_is_an_error_and_then_a_miss(cold: Path) -> None:
    file = cold / "blobs.extents"
    data = file.read_bytes()
    place = data.find(CONTENT[2 * len(DATA) - MIB + 5000 : 2 * len(DATA) - MIB + 5064].tobytes())  # in the last slice of the second page
    assert place > 0
    with file.open("r+b") as changed:
        changed.seek(place)
        changed.write(bytes([data[place] ^ 1]))
    quiet = {"KVSTORE_SCRUB_RATE": "0"}  # or the scrubber might be there first
    with DaemonProcess(cold, *SIZES, environment=quiet) as daemon, Client(daemon.endpoint, shared_memory=False) as client:
        namespace = client.namespace("large")
        with namespace.match(TOKENS) as match:
            assert match.pages == 3
            with pytest.raises(NotFound):
                namespace.fetch(match, np.zeros(len(CONTENT), np.uint8))
        assert stat(daemon.http)["totals"]["corrupt_blobs"] == 1
        out = np.zeros(len(DATA), np.uint8)
        with namespace.match(TOKENS) as match:
            assert match.pages == 1
            namespace.fetch(match, out)
        assert np.array_equal(out, CONTENT[: len(DATA)])
        namespace.put(TOKENS, CONTENT)
        out = np.zeros(len(CONTENT), np.uint8)
        with namespace.match(TOKENS) as match:
            namespace.fetch(match, out)
        assert np.array_equal(out, CONTENT)
