"""Pages of 3 MiB, which go through shared memory."""

import numpy as np
import numpy.typing as npt

from kvstore_client import Component, KVSpec
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

SPEC = KVSpec(4, (Component("full", 6, 2, 16384),), max_slice_bytes=1 << 20)
"""Pages of 3 MiB in 3 slices."""
SLICE = 1 << 20

Bytes = npt.NDArray[np.uint8]


def copied(daemon: DaemonProcess) -> int:
    return int(stat(daemon.http)["totals"]["copied_put_bytes"])


def random_pages(seed: int, pages: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, pages * SPEC.page_bytes, dtype=np.uint8)


def tokens(seed: int, pages: int) -> npt.NDArray[np.uint32]:
    return np.arange(seed * 1000, seed * 1000 + 4 * pages, dtype=np.uint32)


async def fetched(namespace: Namespace, seed: int, pages: int) -> Bytes:
    async with await namespace.match(tokens(seed, pages)) as match:
        out = np.zeros(match.pages * SPEC.page_bytes, np.uint8)
        await namespace.fetch(match, out)
        return out
