"""A link between an engine and a real daemon that can be slow, or break at a chosen byte."""

import select
import socket
import threading
import time
from collections.abc import Callable

_CHUNK = 1 << 16


class Link:
    """Forwards TCP connections to `upstream`, HOST:PORT, which may be changed. `endpoint` is its own address."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.delay_s = 0.0
        """How long each answer of the daemon is held back."""
        self._left = -1
        self._break: Callable[[], None] | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, nbytes: int, action: Callable[[], None]) -> None:
        """Once so many more bytes have come from the daemon, do something to it, and forward nothing more until it is mended."""
        self._break, self._left = action, nbytes

    @property
    def broken(self) -> bool:
        """Whether it did."""
        return self._break is None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                host, _, port = self.upstream.rpartition(":")
                server = socket.create_connection((host, int(port)))
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    if not (data := client.recv(_CHUNK)):
                        return
                    server.sendall(data)
                if server in ready:
                    if self.delay_s:
                        time.sleep(self.delay_s)
                    if not (data := server.recv(_CHUNK if not self.delay_s else 1 << 24)):
                        return
                    self._count(len(data))
                    client.sendall(data)
        except OSError:
            return
        finally:
            client.close()
            server.close()

    def _count(self, nbytes: int) -> None:
        if self._break is None or self._left < 0:
            return
        self._left -= nbytes
        if self._left < 0:
            action, self._break = self._break, None
            action()
            raise ConnectionResetError

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        for one in list(self._open):  # connections come and go in other threads
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed
        self._open.clear()

    def close(self) -> None:
        """Close all."""
        self._listener.close()
        self.cut()
