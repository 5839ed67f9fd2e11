"""A prefix that is larger than DRAM: what is put of it needs the pages before to be in the tree, not their bytes in DRAM."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, context, open_namespace
from tests.integration.raw import stat

_STEP = 128


@pytest.mark.parametrize("durable", [False, True])
def test_a_prefix_larger_than_dram_is_put_step_by_step(tmp_path: Path, durable: bool) -> None:
    pages = 12 * _STEP
    tokens = context(3, pages)
    data = np.random.default_rng(4).integers(0, 256, (pages, SPEC.page_bytes), dtype=np.uint8)
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "256MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for first in range(0, pages, _STEP):
            upto = tokens[: (first + _STEP) * SPEC.page_tokens]
            assert namespace.put(upto, data[first : first + _STEP], first_page=first, durable=durable, timeout=20).new_pages == _STEP
        assert stat(daemon.http)["tiers"]["dram"]["used"] < pages * SPEC.page_bytes
        out = np.zeros(pages * SPEC.page_bytes, np.uint8)
        with namespace.match(tokens) as match:
            assert match.pages == pages
            namespace.fetch(match, out)
        assert np.array_equal(out, data.reshape(-1))
