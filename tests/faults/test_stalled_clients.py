"""Clients that are slow, stall in the middle, or just sit there: others are served meanwhile, and their time is bounded."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvstore.api.wire import FrameType, Run, encode, pack, pack_runs, unpack
from kvstore.api.wire.messages import FetchRequest, Matched, MatchRequest
from kvstore_client import Client
from kvstore_client.endpoints import parse_endpoint
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, rss_bytes, wait_for_baseline
from tests.faults.conftest import Faulty, serves
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.raw import RawClient
from tests.integration.raw_put import page_slices, slices_frame, start_put

PAGES = 256
"""Pages of the context that stalled readers fetch: 4 MiB, more than the sockets' buffers hold."""


def frame(kind: FrameType, message: object, payload: bytes = b"") -> bytes:
    return b"".join(bytes(b) for b in encode(kind, 9, pack(message), payload))  # type: ignore[arg-type]


def long_fetch(raw: RawClient) -> bytes:
    """A FETCH frame over a long context, which is put first."""
    tokens = context(777, PAGES)
    _, meta, ids = raw.ask(FrameType.MATCH, MatchRequest(namespace="pages", parts=True), tokens.tobytes())
    assert unpack(Matched, meta).pages == PAGES
    runs = [Run(blob, 0, SPEC.page_bytes) for blob in range(PAGES)] * 16
    return frame(FrameType.FETCH, FetchRequest(namespace="pages", blobs=PAGES), ids + pack_runs(runs))


@contextmanager
def stalled_fetch(daemon: DaemonProcess, read: int = 0) -> Iterator[RawClient]:
    """A client that stops reading in the middle of a fetch of which the daemon is seen to hold blobs."""
    while True:
        with RawClient(daemon.endpoint) as stalled:
            stalled.send_raw(long_fetch(stalled))
            stalled.read(read)
            while (held := Held.by(daemon)).connections and not held.pinned_blobs:
                time.sleep(0.01)
            if held.pinned_blobs:  # it was not cut off before that could be seen
                yield stalled
                return


def put_long(endpoint: str) -> None:
    with Client(endpoint, connections=1) as client:
        open_namespace(client).put(context(777, PAGES), content(context(777, PAGES)))


def cut_off(sock: socket.socket, within: float) -> None:
    """The daemon must end this connection within a bound, whatever it still sends."""
    sock.settimeout(within)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


def test_a_client_that_stops_reading_in_the_middle_of_a_fetch(start: Faulty) -> None:
    daemon = start(client_timeout=1)
    put_long(daemon.endpoint)
    baseline = Held.by(daemon)
    with stalled_fetch(daemon, read=100_000) as stalled:
        serves(daemon)
        wait_for_baseline(daemon, baseline)  # while the client is still there: it was cut off
        cut_off(stalled.sock, within=20)


def test_garbage_while_a_fetch_is_stalled(start: Faulty) -> None:
    daemon = start(client_timeout=1)
    put_long(daemon.endpoint)
    baseline = Held.by(daemon)
    with stalled_fetch(daemon) as stalled:
        stalled.send_raw(bytes(64))
        wait_for_baseline(daemon, baseline)
        cut_off(stalled.sock, within=20)


def test_a_client_that_reads_a_byte_at_a_time(start: Faulty) -> None:
    daemon = start(client_timeout=1)
    put_long(daemon.endpoint)
    baseline = Held.by(daemon)
    with RawClient(daemon.endpoint) as slow:
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.send_raw(long_fetch(slow))
        deadline = time.monotonic() + 20
        while Held.by(daemon).over(baseline):
            assert time.monotonic() < deadline, "a client that reads a byte at a time holds its blobs for ever"
            try:
                slow.sock.recv(1)
            except ConnectionResetError:
                pass  # it was cut off since it was looked at
            time.sleep(0.02)
        serves(daemon)


def test_half_a_frame_and_then_nothing(start: Faulty) -> None:
    daemon = start(client_timeout=0.5)
    baseline = Held.by(daemon)
    match = frame(FrameType.MATCH, MatchRequest(namespace="pages"), context(0).tobytes())
    stalled: list[RawClient] = []
    for kind in (FrameType.MATCH, FrameType.SLICES):
        for cut in (1, 31, 32, 40, -1):
            stalled.append(client := RawClient(daemon.endpoint))
            whole = match
            if kind is FrameType.SLICES:
                ready = start_put(client, 555)
                whole = slices_frame(ready.handle, ready.first_needed, 0, 0, page_slices(555, ready.first_needed))
            client.send_raw(whole[:cut])
    serves(daemon)
    for client in stalled:
        cut_off(client.sock, within=20)
    wait_for_baseline(daemon, baseline)
    for client in stalled:
        client.sock.close()


def test_no_word_at_all_is_cut_off_too(start: Faulty) -> None:
    daemon = start(client_timeout=0.5)
    with RawClient(daemon.endpoint, hello=False) as silent:
        cut_off(silent.sock, within=20)


def test_large_requests_that_stall_do_not_cut_off_the_next_one(start: Faulty) -> None:
    """Only a few large payloads are received at a time. Waiting for a place is not on the waiting client's time."""
    daemon = start(client_timeout=2)
    tokens = np.zeros(600_000, np.uint32)
    whole = frame(FrameType.MATCH, MatchRequest(namespace="pages"), tokens.tobytes())
    stalled = [RawClient(daemon.endpoint) for _ in range(16)]
    try:
        for client in stalled:
            client.send_raw(whole[: 1 << 20])
        with RawClient(daemon.endpoint) as honest:
            honest.send_raw(whole[: 1 << 20])
            cut_off(stalled[0].sock, within=20)
            time.sleep(0.3)
            honest.send_raw(whole[1 << 20 :])
            assert honest.receive()[0].type is FrameType.MATCHED
    finally:
        for client in stalled:
            client.sock.close()


def idle_connections(daemon: DaemonProcess, count: int) -> list[socket.socket]:
    """So many open connections: half of them shook hands, the others said nothing."""
    family, address = parse_endpoint(daemon.endpoint)
    idle: list[socket.socket] = []
    for number in range(count):
        if number % 2:
            idle.append(RawClient(daemon.endpoint).sock)
        else:
            idle.append(socket.socket(family, socket.SOCK_STREAM))
            idle[-1].connect(address)
    deadline = time.monotonic() + 60
    while (found := Held.by(daemon)).connections < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert found.sessions == count // 2
    return idle


def test_a_thousand_idle_connections(start: Faulty) -> None:
    daemon = start(client_timeout=60)
    baseline, memory = Held.by(daemon), 0
    for _ in range(2):
        idle = idle_connections(daemon, 1000)
        serves(daemon)
        for sock in idle:
            sock.close()
        wait_for_baseline(daemon, baseline)
        grown, memory = rss_bytes(daemon) - memory, rss_bytes(daemon)
    assert grown < 8 << 20, f"a thousand connections that are gone left {grown} bytes"
