"""What a put of a page of one blob, of 16 MiB or `--page-bytes`, costs a store whose code and tables are in no cache, in process.

Bulk pushes everything else out of a processor's caches, so each request finds them cold: here 48 MiB are copied before each step. What
lies between the last byte of a put and its answer is `answer`; `begin` is the PUT, which its bytes overlap, and `enter` what comes behind
the answer. It is the second put of a namespace that is measured; then its slots are free again, so that no segment has to be made.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.peers.ours import spec_of, tokens
from bench.peers.peer import MIB, Shape
from bench.report import Report, arguments
from kvstore.digests import slice_digest
from kvstore.kvspec import PartRange
from kvstore.store import Ack, PutRequest, Space, Store
from kvstore.store.puts.put import Put
from kvstore.store.settings import NamespaceSettings
from kvstore.store.store_config import StoreConfig

_OWNER = 1
_FROM, _TO = np.ones(24 * MIB, np.uint8), np.ones(24 * MIB, np.uint8)


class Clock:
    """Times steps that each begin with cold caches."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.repetition = -1
        """Those below 0 are not counted."""

    def cold(self) -> float:
        """Now, with cold caches."""
        _TO[:] = _FROM
        return time.perf_counter()

    def took(self, what: str, since: float) -> None:
        """A step is over."""
        seconds = time.perf_counter() - since
        if self.repetition >= 0:
            self._report.add(what, self.repetition, 1e6 * seconds, "µs")


def receive(put: Put, part: PartRange, number: int) -> None:
    """All of a put arrives."""
    layout = put.space.spec.slice_layout(part)
    view, sizes = put.locate(0, 0, 0, layout.payload_bytes, layout.count)
    view[:8] = number.to_bytes(8, "little")
    digests, at = [], 0
    for size in sizes:
        digests.append(slice_digest(view[at : at + size]))
        at += size
    put.received(0, 0, 0, digests, b"".join(digests))


async def one(store: Store, space: Space, clock: Clock, number: int) -> None:
    """One put, step by step."""
    part = space.spec.whole()
    request = PutRequest(secrets.token_bytes(16), tokens(Shape(space.spec.page_bytes), number).tobytes(), {}, 0, (part,), Ack.MEMORY)
    since = clock.cold()
    put = await store.begin_put(_OWNER, space, request)
    clock.took("begin", since)
    receive(put, part, number)
    later: list[Callable[[], None]] = []
    since = clock.cold()
    done = store.commit_put_now(put, later.append)
    clock.took("answer", since)
    assert done is not None
    since = clock.cold()
    later[0]()
    clock.took("enter", since)


async def measure(folder: Path, report: Report, repetitions: int, page_bytes: int) -> None:
    """Puts of a page of one blob each."""
    clock = Clock(report)
    async with Store(StoreConfig(folder, dram_bytes=512 * MIB, ssd_bytes=512 * MIB)) as store:
        for number in range(-3, repetitions):
            settings = NamespaceSettings(tenant="default", name=f"cold-{number}", fingerprint="model", spec=spec_of(page_bytes))
            space = await store.create_namespace(settings)
            for clock.repetition, its in ((-1, 0), (number, 1)):
                await one(store, space, clock, 2 * (number + 3) + its)
            await store.drop_namespace(space)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--page-bytes", type=int, default=16 * MIB, help="bytes of the page (default: %(default)s)")
    settings = parser.parse_args()
    repetitions = 20 if settings.quick else 60
    report = Report("cold_put", {"repetitions": repetitions, "page_bytes": settings.page_bytes})
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "data", report, repetitions, settings.page_bytes))
    report.show("µs, caches cold")
    report.write(settings.json)
    report.draw(settings.png, "µs, caches cold")


if __name__ == "__main__":
    main()
