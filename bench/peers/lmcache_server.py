"""LMCache's own server (lm://), and a client by hand that speaks its protocol and receives into the caller's memory.

The server acknowledges no put, so each is followed by EXIST, whose answer comes after it. It deletes nothing: puts here replace values,
and to forget everything it is started anew. It has no batches. As it needs torch, it has its own environment: bench/peers/lmcache.txt.
"""

import socket
import struct
import sys
from pathlib import Path

from bench.peers.peer import Bytes, Link, ThreadPeer, Unavailable
from bench.peers.servers import Servers, free_port

_KEY_BYTES = 150
_REQUEST = struct.Struct(f"9i{_KEY_BYTES}s")
_REPLY = struct.Struct("9i")
_PUT, _GET, _EXIST = 1, 2, 3
_BINARY, _UINT8, _FOUND = 4, 6, 200


class LMCache(ThreadPeer):
    """The server, values in memory."""

    name = "lmcache"

    def start(self) -> None:
        python = Path(sys.executable).parent.parent / "lmcache" / "bin" / "python"
        if not python.exists():
            raise Unavailable(f"LMCache is not installed ({python} is made by bench/peers/install.sh)")
        self._servers = Servers(self.folder)
        self.port = free_port()
        environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        self._servers.run(str(python), "-m", "lmcache.v1.server", "127.0.0.1", str(self.port), "cpu", environment=environment)
        self._servers.wait_for(self.port)

    def servers(self) -> list[int]:
        return self._servers.pids()

    def link(self, kind: str) -> Link:
        return _Link(self.port, self.source, self.target)

    def forget(self, keys: list[str]) -> None:
        """The next puts replace them."""

    def clear(self) -> None:
        self._servers.stop()
        self._links.clear()
        self.start()

    def stop(self) -> None:
        self._servers.stop()


class _Link:
    def __init__(self, port: int, source: Bytes, target: Bytes) -> None:
        self._source, self._target = source.data, target.data
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply = bytearray(_REPLY.size)

    def get(self, key: str, at: int, nbytes: int) -> None:
        self._socket.sendall(_request(_GET, key, 0))
        self._answer(nbytes)
        self._receive(self._target[at : at + nbytes])

    def put(self, key: str, at: int, nbytes: int) -> None:
        self._socket.sendall(_request(_PUT, key, nbytes))
        self._socket.sendall(self._source[at : at + nbytes])
        self._socket.sendall(_request(_EXIST, key, 0))
        self._answer(0)

    def get_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        for index, key in enumerate(keys):
            self.get(key, at + index * nbytes, nbytes)

    def put_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        for index, key in enumerate(keys):
            self.put(key, at + index * nbytes, nbytes)

    def _answer(self, nbytes: int) -> None:
        self._receive(memoryview(self._reply))
        code, length, *_ = _REPLY.unpack(self._reply)
        if (code, length) != (_FOUND, nbytes):
            raise ValueError(f"LMCache's server answers {code} with {length} bytes")

    def _receive(self, out: memoryview) -> None:
        while len(out):
            got = self._socket.recv_into(out, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("LMCache's server closed the connection")
            out = out[got:]


def _request(command: int, key: str, nbytes: int) -> bytes:
    """Its message: values are bytes, of shape [n, 0, 0, 0]. Its keys have a hash of at most 64 bits in them."""
    prefix, _, rest = key.partition("-")
    if prefix.startswith("p"):
        prefix = "p"  # the next turn of puts replaces this one
    number = int.from_bytes(f"{prefix}-{rest}".encode(), "little") % ((1 << 61) - 1)
    name = f"bench@1@0@{number:x}@uint8".encode().ljust(_KEY_BYTES)
    return _REQUEST.pack(command, nbytes, _BINARY, _UINT8, 0, nbytes, 0, 0, 0, name)
