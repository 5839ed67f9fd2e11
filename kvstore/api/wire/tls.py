"""A channel over TLS, and a client's context. The TLS state machine does no I/O of its own (`ssl.MemoryBIO`).

TLS 1.3 only: every Python that runs kvstore speaks it, and it has no renegotiation.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from kvstore.api.wire.channel import Channel
from kvstore.api.wire.reading import Handler
from kvstore.errors import BadRequest, ConnectionLost

_RAW = 256 << 10
"""Bytes received from the socket at a time while bulk is flowing, and encrypted at a time: many records."""
_RECORD = 16 << 10
"""The most that a TLS record holds."""


def client_context(ca: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """For a client: trusts the system's certificate authorities, or only those in `ca`. Blocking. Raises BadRequest."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"the certificates in {ca} can't be read: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class TlsChannel(Channel):
    """Frames over TLS: a client's end if `server_name` is given, else a daemon's."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        super().__init__(sock)
        self._marks = False  # how many bytes a record takes is not known before it is there
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name)
        self._raw = memoryview(bytearray(_RECORD))
        self._flushing = asyncio.Lock()
        self._ready = False

    async def shake_hands(self) -> None:
        """Make the connection a secure one. Raises ConnectionLost, which says what was wrong with whom."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._receive_raw():
                    raise ConnectionLost("the peer closed the connection in the TLS handshake: does it speak TLS there?") from None
            except ssl.SSLError as error:
                with contextlib.suppress(ConnectionLost):
                    await self._flush()  # the alert that tells the peer
                raise ConnectionLost(f"the TLS handshake failed: {_reason(error)}") from error
            else:
                break
        await self._flush()
        self._ready = True

    def close(self) -> None:
        """Say goodbye, if that is possible at once, and close the socket."""
        if self._ready and not self._flushing.locked():
            self._ready = False
            with contextlib.suppress(OSError, ssl.SSLError):
                with contextlib.suppress(ssl.SSLWantReadError):
                    self._tls.unwrap()
                self.sock.send(self._outgoing.read())
        super().close()

    def offer_frames(self, handler: Handler, *, bulk: bool = False) -> None:
        """What comes is decrypted by the task that waits for it: nothing can be said of it before."""

    async def _receive(self, target: memoryview, *, or_end: bool = False) -> int:
        filled = 0
        while filled < len(target):
            try:
                count = cast(int, self._tls.read(len(target) - filled, target[filled:]))  # into a buffer it returns how much
            except ssl.SSLWantReadError:
                if filled:
                    break
                if self._outgoing.pending and not self._flushing.locked():  # a reader must never wait for a writer: both ends could
                    await self._flush()
                if not await self._receive_raw():
                    break
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            except ssl.SSLError as error:
                raise ConnectionLost(f"the TLS connection broke: {_reason(error)}") from error
            if not count:
                break
            filled += count
        if not filled and not or_end:
            raise ConnectionLost("the peer closed the connection in the middle of a frame")
        return filled

    async def _receive_scattered(self, targets: list[memoryview]) -> int:
        return await self._receive(targets[0])

    async def _receive_raw(self) -> int:
        """Feed what the socket has into the TLS state. 0 at its end."""
        count = await super()._receive(self._raw, or_end=True)
        if count:
            self._incoming.write(self._raw[:count])
            if count == len(self._raw) < _RAW and self._ready:  # bulk: a large buffer, but not for just anybody
                self._raw = memoryview(bytearray(_RAW))
        else:
            self._incoming.write_eof()
        return count

    def send_now(self, buffers: Sequence[bytes | memoryview]) -> bytes:
        """Nothing is sent before it was encrypted: all is the rest."""
        return b"".join(buffers)

    def _begin(self, buffers: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        return buffers

    async def _send_rest(self, views: Sequence[bytes | memoryview]) -> None:
        await self.send(views)

    async def _send_some(self, views: list[memoryview]) -> None:
        small: list[memoryview] = []  # headers, metas and digests share a record
        for view in views:
            if len(view) < _RECORD:
                small.append(view)
                continue
            self._encrypt(memoryview(b"".join(small)))
            small = []
            for start in range(0, len(view), _RAW):
                self._encrypt(view[start : start + _RAW])
                if self._outgoing.pending >= _RAW:
                    await self._flush()
        self._encrypt(memoryview(b"".join(small)))
        await self._flush()

    def _encrypt(self, view: memoryview) -> None:
        sent = 0
        try:
            while sent < len(view):
                sent += self._tls.write(view[sent:])
        except ssl.SSLError as error:
            raise ConnectionLost(f"the TLS connection broke: {_reason(error)}") from error

    async def _flush(self) -> None:
        """Send what TLS has to say. Reader and writer may both come here; records leave in order."""
        async with self._flushing:
            try:
                while self._outgoing.pending:
                    await self._send_all(self._outgoing.read())
            except BaseException as error:
                self._ready = False  # a record was cut short: there is no goodbye after that
                if isinstance(error, OSError):
                    raise ConnectionLost(f"the connection broke: {error}") from error
                raise


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate does not verify: {error.verify_message}; KVSTORE_TLS_CA names a file of whom to trust"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "what answers does not speak TLS (without it the endpoint is HOST:PORT)"
    return (error.reason or str(error)).replace("_", " ").lower()
