"""A client made of a plain socket, so that a test can send what the SDK never would."""

import json
import socket
import ssl
import time
import urllib.request
from types import TracebackType
from typing import Any

from kvstore.api.wire import PROTOCOL_VERSION, FrameType, Header, decode_header, encode, pack, unpack
from kvstore.api.wire.frames import HEADER_BYTES
from kvstore.api.wire.messages import Empty, ErrorReply, Hello, Message, Welcome
from kvstore_client.endpoints import parse_endpoint


class RawClient:
    """Frames by hand. `hello=False` leaves out the handshake."""

    def __init__(
        self, endpoint: str, *, hello: bool = True, token: str = "", session: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        family, address = parse_endpoint(endpoint)
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(address)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname=address[0])
        if hello:
            self.send(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], client="raw", token=token, session=session))
            header, meta, _ = self.receive()
            assert header.type is FrameType.WELCOME, unpack(ErrorReply, meta)
            self.session = unpack(Welcome, meta).session

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.sock.close()

    def send_raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send(self, kind: FrameType, request: int, message: Message, payload: bytes = b"") -> None:
        self.send_raw(b"".join(bytes(b) for b in encode(kind, request, pack(message), payload)))

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise EOFError(f"closed after {len(data)} of {count} bytes")
            data += piece
        return data

    def receive(self) -> tuple[Header, bytes, bytes]:
        """The next frame: header, meta, payload with the digests of a bulk frame."""
        header = decode_header(self.read(HEADER_BYTES))
        return header, self.read(header.meta_bytes), self.read(header.payload_bytes + header.trailer_bytes)

    def error(self) -> ErrorReply:
        """The next frame, which must be an error."""
        header, meta, _ = self.receive()
        assert header.type is FrameType.ERROR, header
        return unpack(ErrorReply, meta)

    def ask(self, kind: FrameType, message: Message, payload: bytes = b"", request: int = 77) -> tuple[Header, bytes, bytes]:
        self.send(kind, request, message, payload)
        return self.receive()

    def alive(self) -> bool:
        return self.ask(FrameType.PING, Empty())[0].type is FrameType.OK

    def closed(self) -> bool:
        """Whether the daemon closes the connection."""
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True


def code(frame: tuple[Header, bytes, bytes]) -> str:
    """The code of a frame that must be an error."""
    assert frame[0].type is FrameType.ERROR, frame[0]
    return unpack(ErrorReply, frame[1]).code


def stat(http: str, token: str = "") -> Any:
    request = urllib.request.Request(f"{http}/v1/stat", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())


_HELD = ("leases", "puts_open", "sessions", "connections", "pinned_blobs")


def wait_for_baseline(http: str, dram_used: int | None = None, timeout: float = 20.0, token: str = "") -> int:
    """Wait until nothing is held for anybody, and DRAM is used as given. Returns how much of it is used.

    The daemon learns of a client that is gone when its socket says so: those of tests before may be there yet when one begins.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = stat(http, token)
        held, used = {name: found[name] for name in _HELD if found[name]}, int(found["tiers"]["dram"]["used"])
        if not held and dram_used in (used, None):
            return used
        assert time.monotonic() < deadline, f"still held: {held}; {used} bytes of DRAM, not {dram_used}"
        time.sleep(0.02)
