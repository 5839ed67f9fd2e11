"""Talks to a real daemon in conversations that are mostly fair and partly wrong, over many connections.

After each batch the daemon must answer, hold nothing more than before, have no bug to tell of, and serve the right bytes.
"""

import contextlib
import select
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from kvstore.api.wire import FrameType, decode_header, encode, pack, unpack
from kvstore.api.wire.frames import HEADER_BYTES
from kvstore.api.wire.messages import Empty, ErrorReply, Hello, Message, Welcome
from kvstore.errors import BY_CODE, ProtocolError
from kvstore_client import Client, KVStoreError
from kvstore_client.endpoints import parse_endpoint
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, nothing_left, rss_bytes, wait_for_baseline
from tests.fuzz import grammar
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace

SETTINGS = {
    "KVSTORE_CLIENT_TIMEOUT": "1", "KVSTORE_PUT_WAIT": "0.05", "KVSTORE_PUT_IDLE": "2",
    "KVSTORE_MAX_PAGES": "10000", "KVSTORE_SEGMENT": "1MiB",
}  # fmt: skip
SIZES = ("--dram", "8MiB", "--ssd", "32MiB")
BATCH = 100
"""Conversations between two looks at the baseline."""
MAX_GROWTH = 128 << 20
"""Bytes that the daemon's resident memory may grow by: both tiers' sizes, and a good deal for the allocator."""
_PUT_SEEDS = range(1000, 1300)
_SMALL = 1 << 20
_THREADS = 8
_HANG_S = 30.0
_QUIET_S = 0.03
_SAID = [kind for kind in grammar.REQUEST_TYPES if kind is not FrameType.HELLO]
_LAST = (1 << 64) - 2
"""Number of the request that ends a conversation."""


@dataclass(slots=True)
class LiveReport:
    """What was sent and what came back. A failure says how to have it again."""

    inputs: int = 0
    conversations: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    replies: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Conversation:
    """One connection: a handshake, some frames, and then an end of one kind or another."""

    def __init__(self, endpoint: str, rng: Random, report: LiveReport) -> None:
        self._rng = rng
        self._report = report
        self._world = grammar.World(put_seed=rng.choice(_PUT_SEEDS))
        self._ready: dict[int, int] = {}
        self._received = bytearray()
        self._ended = False
        self._finished = False
        family, address = parse_endpoint(endpoint)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.settimeout(_HANG_S)
        self._sock.connect(address)

    def run(self) -> None:
        """Talk to the end. Raises AssertionError if the daemon neither answers nor hangs up."""
        try:
            self._greet()
            for _ in range(self._rng.choice([1, 3, 8, 20])):
                chance = self._rng.random()
                if chance < 0.15:
                    self._put()
                elif chance < 0.3:
                    self._fetch()
                else:
                    self._say()
                self._take(0.002 if self._rng.random() < 0.7 else 0.0)
                if self._ended:
                    return
            self._end()
        finally:
            self._sock.close()

    def _greet(self) -> None:
        if self._rng.random() < 0.93:
            self._send("HELLO", b"".join(bytes(b) for b in encode(FrameType.HELLO, 0, pack(Hello(versions=[1], client="fuzz")))))
        else:
            self._say(FrameType.HELLO)
        self._take(0.2)

    def _say(self, kind: FrameType | None = None) -> None:
        rng = self._rng
        kind = kind or rng.choice(_SAID)
        if rng.random() < 0.01:
            kind = rng.choice(list(FrameType))
        request = rng.choice([rng.randrange(1, 1 << 20), *self._world.requests[-2:]]) if rng.random() < 0.03 else rng.randrange(1, 1 << 40)
        frame = grammar.request_frame(kind, request, rng, self._world)
        self._world.requests.append(request)
        self._pass_on(kind.name, frame)

    def _put(self) -> None:
        """A put from its beginning to its commit, each frame of it passed on as badly as any other."""
        rng, world = self._rng, self._world
        layers = rng.choice([(0, 8), (0, 8), (0, 4), (4, 8)])
        frame = grammar.fair_put(rng, world, layers)
        self._pass_on("PUT", frame)
        self._take(0.2)
        handle = self._ready.get(grammar.request_of(frame))  # an earlier put, of other layers, may be answered only now
        if self._ended or handle is None:
            return
        pages = list(range(4))
        if rng.random() < 0.1:
            rng.shuffle(pages)
        for page in pages:
            self._pass_on("SLICES", grammar.fair_slices(handle, world.put_seed, page, layers))
        self._pass_on("COMMIT", grammar.fair_commit(rng, handle))
        self._take(0.05)

    def _fetch(self) -> None:
        """A match and its fetch; some are cancelled at once, some not read until later."""
        self._pass_on("MATCH", grammar.fair_match(self._rng))
        self._take(0.2)
        if self._ended:
            return
        self._pass_on("FETCH", grammar.fair_fetch(self._rng, self._world))
        if self._rng.random() < 0.2:
            self._pass_on("CANCEL", grammar.request_frame(FrameType.CANCEL, 1, self._rng, self._world))
        if self._rng.random() < 0.7:
            self._take(0.02)

    def _pass_on(self, name: str, frame: bytes) -> None:
        """Send a frame; a few get lost, come twice, or are spoilt."""
        chance = self._rng.random()
        if chance < 0.03:
            frame = grammar.spoil(frame, self._rng)
        for _ in range(0 if chance > 0.98 else 2 if chance > 0.96 else 1):
            self._send(name, frame)

    def _send(self, name: str, frame: bytes) -> None:
        self._report.inputs += 1
        self._report.sent[name] += 1
        try:
            self._sock.sendall(frame)
        except (BrokenPipeError, ConnectionResetError):
            self._ended = True

    def _end(self) -> None:
        """Leave abruptly, in the middle of a frame, or after a last request that must be answered."""
        how = self._rng.random()
        if how < 0.15:
            return
        if how < 0.3:
            whole = grammar.request_frame(self._rng.choice(grammar.REQUEST_TYPES), 5, self._rng, self._world)
            self._send("cut off", whole[: self._rng.randrange(len(whole))])
            return
        self._send("PING", b"".join(bytes(b) for b in encode(FrameType.PING, _LAST, pack(Empty()))))
        self._take(_QUIET_S)
        if not self._finished and not self._ended:
            with contextlib.suppress(OSError):  # the daemon may be hanging up in this moment
                self._sock.shutdown(socket.SHUT_WR)  # a spoilt length may have swallowed it: then the end must be understood
        deadline = time.monotonic() + _HANG_S
        while not self._finished and not self._ended:
            self._take(0.5)
            assert time.monotonic() < deadline, "the daemon neither answered nor hung up"

    def _take(self, seconds: float) -> None:
        """Read what is there, waiting for the first of it."""
        while not self._ended and select.select([self._sock], [], [], seconds)[0]:
            try:
                piece = self._sock.recv(1 << 18)
            except ConnectionResetError:
                piece = b""
            self._ended = not piece
            self._received += piece
            self._understand()
            seconds = 0.0

    def _understand(self) -> None:
        while len(self._received) >= HEADER_BYTES:
            raw = bytes(self._received[:HEADER_BYTES])
            header = decode_header(raw)
            end = HEADER_BYTES + header.meta_bytes + header.payload_bytes + header.trailer_bytes
            if len(self._received) < end:
                return
            meta = bytes(self._received[HEADER_BYTES : HEADER_BYTES + header.meta_bytes])
            payload = bytes(self._received[HEADER_BYTES + header.meta_bytes : end])
            header.verify(raw, meta, b"" if header.bulk else payload)
            del self._received[:end]
            self._learn(header.type, header.request, meta, payload)

    def _learn(self, kind: FrameType, request: int, meta: bytes, payload: bytes) -> None:
        self._report.replies[kind.name] += 1
        world = self._world
        self._finished |= request == _LAST
        if kind is FrameType.WELCOME:
            world.session = unpack(Welcome, meta).session
        elif kind is FrameType.ERROR:
            error = unpack(ErrorReply, meta)
            assert error.code in BY_CODE, f"an error of no known kind: {error}"
            assert error.code != "internal", f"the daemon failed: {error}"
            self._report.replies[error.code] += 1
        elif kind not in (FrameType.DATA, FrameType.NAMESPACES):
            for name, value in msgspec.msgpack.decode(meta).items():
                if isinstance(value, bytes) or (type(value) is int and value > _SMALL):
                    world.known[name] = [*world.known.get(name, [])[-3:], value]
            found = unpack(_Anything, meta)
            if found.handle:
                world.handles = [*world.handles[-3:], found.handle]
            if kind is FrameType.PUT_READY:
                self._ready[request] = found.handle
            if found.lease:
                world.leases = [*world.leases[-3:], found.lease]
            if kind is FrameType.MATCHED and payload:
                world.blobs = [payload[i : i + 16] for i in range(0, len(payload), 16)][:8]


class _Anything(Message):
    """The fields of any reply that later requests may name."""

    handle: int = 0
    lease: int = 0


class LiveFuzzer:
    """A daemon, and the conversations with it."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        self.report = LiveReport()
        self.daemon = DaemonProcess(data_dir, *SIZES, environment=SETTINGS)
        self._seed = seed
        self._baseline: Held
        self._memory = 0

    def __enter__(self) -> "LiveFuzzer":
        self.daemon.wait_ready()
        self._tidy()
        wait_for_baseline(self.daemon, Held(0, 0, 0, 0, 0, 0, tasks=1 << 30, descriptors=1 << 30))
        self._baseline = Held.by(self.daemon)
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()

    def run(self, first: int, conversations: int) -> LiveReport:
        """Have conversations number `first` and on, in batches, until one shows a failure."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(first, first + conversations, BATCH):
                numbers = range(start, min(start + BATCH, first + conversations))
                reports = list(pool.map(self._talk, numbers))
                for report in reports:
                    self._add(report)
                try:
                    wait_for_baseline(self.daemon, self._baseline, timeout=30)
                    self._look()
                    nothing_left(self.daemon)
                    self._tidy()
                    wait_for_baseline(self.daemon, self._baseline, timeout=30)
                    self._memory = self._memory or rss_bytes(self.daemon)
                    grown = rss_bytes(self.daemon) - self._memory
                    assert grown < MAX_GROWTH, f"the daemon has grown by {grown} bytes since the first batch"
                except (AssertionError, OSError, KVStoreError) as error:
                    self._fail(f"after conversations {numbers.start} to {numbers.stop - 1} of seed {self._seed}", error)
                if self.report.failures:
                    break
        return self.report

    def _talk(self, number: int) -> LiveReport:
        report = LiveReport(conversations=1)
        try:
            Conversation(self._endpoint(number), Random(f"{self._seed}:{number}"), report).run()
        except (AssertionError, OSError, ProtocolError) as error:
            report.failures.append(f"conversation {number} of seed {self._seed}: {type(error).__name__}: {error}")
        return report

    def _endpoint(self, number: int) -> str:
        return self.daemon.endpoint if number % 2 else self.daemon.unix_endpoint or self.daemon.endpoint

    def _add(self, report: LiveReport) -> None:
        mine = self.report
        mine.inputs += report.inputs
        mine.conversations += report.conversations
        mine.sent += report.sent
        mine.replies += report.replies
        mine.failures += report.failures

    def _fail(self, where: str, error: BaseException) -> None:
        words = "\n".join(list(self.daemon.lines)[-30:])
        self.report.failures.append(f"{where}: {type(error).__name__}: {error}\nthe daemon's last words:\n{words}")

    def _look(self) -> None:
        """As another client: whatever is there of what the conversations put, in bits and pieces, is right."""
        with Client(self.daemon.endpoint, connections=1, timeout=20) as client:
            for namespace in client.namespaces():
                if namespace.info.fingerprint == "rev-1" and namespace.spec == SPEC:
                    for seed in (*range(5), *range(_PUT_SEEDS.start, _PUT_SEEDS.stop)):
                        fetch_checked(namespace, context(seed))

    def _tidy(self) -> None:
        """Put what the conversations may find."""
        with Client(self.daemon.endpoint, connections=1, timeout=20) as client:
            pages = open_namespace(client)
            for seed in range(5):
                pages.put(context(seed), content(context(seed)))


def fuzz(data_dir: Path, seed: int, first: int, conversations: int) -> LiveReport:
    """Start a daemon and fuzz it."""
    with LiveFuzzer(data_dir, seed) as fuzzer:
        return fuzzer.run(first, conversations)
