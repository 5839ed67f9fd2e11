"""TLS on both planes of a real daemon, with certificates made here."""

import asyncio
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import trustme

from kvstore.api.wire import FrameType
from kvstore.api.wire.messages import Empty
from kvstore_client import AsyncClient, BadRequest, Client, Component, ConnectionLost, KVSpec, Unauthenticated
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import Tokens, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, stat
from tests.integration.secured import ADMIN, ALICE, TOKENS, write_tokens


@dataclass
class Authority:
    """A certificate authority, and the files that a daemon and a client need."""

    ca: trustme.CA
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        made = cls(trustme.CA(), folder)
        made.ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        made.issue()
        return made

    def issue(self) -> None:
        """A server certificate, in place of the one before."""
        server = self.ca.issue_cert("127.0.0.1", "localhost")
        for name, blobs in (("cert.pem", server.cert_chain_pems), ("key.pem", [server.private_key_pem])):
            (self.folder / name).write_bytes(b"".join(blob.bytes() for blob in blobs))

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.folder / "cert.pem"), "--tls-key", str(self.folder / "key.pem"))

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("secure")
    tokens = write_tokens(folder / "tokens.toml")
    arguments = ("--dram", "128MiB", "--ssd", "256MiB", "--tokens-file", str(tokens), *authority.arguments)
    with DaemonProcess(folder / "data", *arguments) as running:
        yield running


def test_pages_go_and_come(secure: DaemonProcess, authority: Authority) -> None:
    assert secure.endpoint.startswith("tls://")
    assert secure.http.startswith("https://")
    with Client(secure.endpoint, token=ALICE, tls=authority.client(), connections=2) as alice:
        namespace = open_namespace(alice)
        namespace.put(context(1), content(context(1)), durable=True)
        assert fetch_checked(namespace, context(1)) == 4
    by_name = "tls://localhost:" + secure.endpoint.rpartition(":")[2]
    with Client(by_name, token=ALICE, tls=authority.client()) as alice, Client(secure.unix_endpoint, token=ALICE) as local:
        assert fetch_checked(open_namespace(alice), context(1)) == 4
        assert fetch_checked(open_namespace(local), context(1)) == 4


async def test_large_pages_both_ways_at_once(secure: DaemonProcess, authority: Authority) -> None:
    """Records, chunks and pieces of different sizes: nothing gets out of step."""
    spec = KVSpec(4, (Component("full", 16, 1, 40_000),), max_slice_bytes=700_000)
    rng = np.random.default_rng(1)
    async with AsyncClient(secure.endpoint, token=ALICE, tls=authority.client(), connections=3) as client:
        namespace = await client.namespace("large", "large", spec)
        prompts = [rng.integers(0, 9, 8, dtype=np.uint32) + 10 * n for n in range(3)]
        pages = [rng.integers(0, 256, 2 * spec.page_bytes, dtype=np.uint8) for _ in prompts]

        async def round_trip(prompt: Tokens, data: npt.NDArray[np.uint8]) -> None:
            await namespace.put(prompt, data)
            async with await namespace.match(prompt) as match:
                out = np.zeros_like(data)
                await namespace.fetch(match, out)
                assert np.array_equal(out, data)

        await asyncio.gather(*(round_trip(*pair) for pair in zip(prompts, pages, strict=True)))
        await namespace.drop()


def test_http(secure: DaemonProcess, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_cli import kvstore

    ca = str(authority.folder / "ca.pem")
    assert kvstore(secure, "--tls-ca", ca, "--token", ALICE, "status").returncode == 0
    refused = kvstore(secure, "--token", ALICE, "status")
    assert "connection_lost" in refused.stderr
    assert "certificate" in refused.stderr.lower()
    monkeypatch.setenv("SSL_CERT_FILE", ca)  # what urllib trusts
    assert stat(secure.http, ADMIN)["tenant"] == "ops"


def test_who_is_trusted(secure: DaemonProcess, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Authority.make(tmp_path)
    with pytest.raises(ConnectionLost, match="certificate"), Client(secure.endpoint, token=ALICE, tls=stranger.client()):
        pass
    monkeypatch.setenv("KVSTORE_TLS_CA", str(authority.folder / "ca.pem"))
    with Client(secure.endpoint, token=ALICE):
        pass
    other_name = secure.endpoint.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(ConnectionLost), Client(other_name, token=ALICE):
        pass
    with pytest.raises(Unauthenticated), Client(secure.endpoint, token="wrong-0123456789abcdef"):
        pass
    with pytest.raises(BadRequest, match="Unix"), Client(secure.unix_endpoint, token=ALICE, tls=True):
        pass


def test_who_speaks_no_tls_is_told(secure: DaemonProcess, authority: Authority) -> None:
    from kvstore.cli.common import http_json

    with pytest.raises(ConnectionLost, match=r"tls://HOST:PORT"):
        Client(secure.endpoint.removeprefix("tls://"))
    with pytest.raises(ConnectionLost, match=r"is it https://"):
        http_json(secure.http.replace("https:", "http:"), "/v1/stat")
    with pytest.raises(ConnectionLost, match=r"does not verify: .*; --tls-ca names a file"):
        http_json(secure.http, "/v1/stat")
    with pytest.raises(ConnectionLost, match=r"does not verify: .*KVSTORE_TLS_CA names a file"):
        Client(secure.endpoint, token=ALICE)
    with Client(secure.endpoint, token=f" {ALICE}\n", tls=authority.client()) as client:
        client.ping()


def test_plain_and_broken_handshakes_leave_nothing(secure: DaemonProcess, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = secure.endpoint.removeprefix("tls://").rsplit(":", 1)
    with pytest.raises((ConnectionLost, OSError)), Client(f"{host}:{port}", token=ALICE, timeout=5):
        pass  # plain to a TLS port
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", bytes(5000)):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(data)
    old = authority.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((host, int(port))) as sock, pytest.raises(ssl.SSLError), old.wrap_socket(sock, server_hostname=host):
        pass
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.folder / "ca.pem"))
    deadline = time.monotonic() + 10
    while (found := stat(secure.http, ADMIN))["connections"] or found["sessions"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_clients_with_certificates_and_a_new_one_for_the_daemon(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.make(tmp_path)
    ca = str(tmp_path / "ca.pem")
    arguments = ("--dram", "16MiB", "--ssd", "64MiB", *authority.arguments, "--tls-client-ca", ca)
    with DaemonProcess(data_dir, *arguments) as daemon:
        with pytest.raises(ConnectionLost), Client(daemon.endpoint, tls=authority.client()):
            pass
        mine = authority.client()
        authority.ca.issue_cert("worker@example.org").configure_cert(mine)
        with Client(daemon.endpoint, tls=mine) as client:
            open_namespace(client)
            before = served(daemon, mine)
            (tmp_path / "key.pem").write_text("nonsense")
            daemon.send_signal(signal.SIGHUP)
            wait_for(daemon, "the certificate stays as it was")
            assert served(daemon, mine) == before
            authority.issue()
            daemon.send_signal(signal.SIGHUP)
            wait_for(daemon, "certificate re-read")
            assert served(daemon, mine) != before
            assert served(daemon, mine, plane="http") == served(daemon, mine)
            client.ping()
        with pytest.raises(ConnectionLost), Client(daemon.endpoint, tls=authority.client()):
            pass


def served(daemon: DaemonProcess, context: ssl.SSLContext, plane: str = "data") -> bytes:
    """The certificate that the daemon shows."""
    address = daemon.endpoint.removeprefix("tls://") if plane == "data" else daemon.http.removeprefix("https://")
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as sock, context.wrap_socket(sock, server_hostname=host) as secured:
        shown = secured.getpeercert(binary_form=True)
        assert shown
        return shown


def wait_for(daemon: DaemonProcess, words: str) -> None:
    deadline = time.monotonic() + 10
    while not any(words in line for line in daemon.lines):
        assert time.monotonic() < deadline, list(daemon.lines)[-5:]
        time.sleep(0.02)


def test_an_expelled_client_hears_why_over_tls(data_dir: Path, authority: Authority, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml")
    with (
        DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(tokens), *authority.arguments) as daemon,
        RawClient(daemon.endpoint, token=ALICE, tls=authority.client()) as raw,
    ):
        assert raw.ask(FrameType.PING, Empty())[0].type is FrameType.OK
        write_tokens(tokens, TOKENS.replace(ALICE, "x" * 32))
        assert raw.error().code == "unauthenticated"
        assert raw.closed()


def test_a_bad_certificate_is_named_at_start(data_dir: Path, authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    daemon = DaemonProcess(data_dir, "--tls-cert", str(tmp_path / "bad.pem"), "--tls-key", str(authority.folder / "key.pem"))
    assert daemon.wait_exit(20) == 2
    assert "bad.pem" in daemon.lines[-1]
