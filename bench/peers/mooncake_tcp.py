"""Mooncake Store over TCP, tuned: a master, a process that lends its memory, and a client that has none, so that bytes cross a socket.

Its ports listen on all interfaces, so this runs only where there are none but loopback (see bench/peers/alone.py).
"""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.alone import only_loopback
from bench.peers.peer import MIB, ROTATION, Bytes, Link, Shape, ThreadPeer, Unavailable
from bench.peers.servers import Servers, free_port

_TUNED = {"MC_STORE_MEMCPY": "0", "MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_SLICE_SIZE": str(MIB), "MC_LOG_LEVEL": "ERROR"}
_SEGMENT = 4 * ROTATION


class Mooncake(ThreadPeer):
    """The client and its servers. All threads share one client, as its makers mean it."""

    name = "mooncake"

    def start(self) -> None:
        if not only_loopback():
            raise Unavailable("Mooncake listens on all interfaces, and there are others than loopback (unshare --net does not work here)")
        os.environ.update(_TUNED)
        try:
            self._store: Any = import_module("mooncake.store").MooncakeDistributedStore()
        except ImportError as error:
            raise Unavailable(f"there is no Mooncake (pip install mooncake-transfer-engine-non-cuda): {error}") from None
        program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if program is None:
            raise Unavailable("there is no mooncake_master beside this Python")
        master, segment = free_port(), free_port()
        self._servers = Servers(self.folder)
        self._servers.run(
            program, "--rpc_address=127.0.0.1", f"--rpc_port={master}", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}",
            "--eviction_high_watermark_ratio=1.0",
        )  # fmt: skip
        self._servers.wait_for(master)
        lender = str(Path(__file__).with_name("mooncake_segment.py"))
        self._servers.run(sys.executable, "-P", lender, f"127.0.0.1:{segment}", f"127.0.0.1:{master}", str(_SEGMENT), environment=_TUNED)
        self._servers.wait_for_word(b"ready")
        failed = self._store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", f"127.0.0.1:{master}")
        if failed:
            self._servers.fail(f"the client's setup returns {failed}")
        for memory in (self.source, self.target):
            if self._store.register_buffer(memory.ctypes.data, memory.nbytes):
                raise Unavailable("Mooncake can't register memory")

    def servers(self) -> list[int]:
        return self._servers.pids()

    def link(self, kind: str) -> Link:
        return _Link(self._store, self.source, self.target)

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            if code := self._store.remove(key, True):
                raise ValueError(f"remove returns {code}")

    def clear(self) -> None:
        self._store.remove_all(True)

    def stop(self) -> None:
        try:
            self._store.close()
        finally:
            self._servers.stop()

    def fill(self, shape: Shape) -> None:
        super().fill(shape)
        self._puts(shape, 1, 0.3, "")  # its segment's pages are touched for the first time


class _Link:
    def __init__(self, store: Any, source: Bytes, target: Bytes) -> None:
        self._store = store
        self._source, self._target = source.ctypes.data, target.ctypes.data

    def get(self, key: str, at: int, nbytes: int) -> None:
        if (got := self._store.get_into(key, self._target + at, nbytes)) != nbytes:
            raise ValueError(f"get_into returns {got}")

    def put(self, key: str, at: int, nbytes: int) -> None:
        if code := self._store.put_from(key, self._source + at, nbytes):
            raise ValueError(f"put_from returns {code}")

    def get_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        got = self._store.batch_get_into(keys, [self._target + at + i * nbytes for i in range(len(keys))], [nbytes] * len(keys))
        if any(size != nbytes for size in got):
            raise ValueError(f"batch_get_into returns {got}")

    def put_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        codes = self._store.batch_put_from(keys, [self._source + at + i * nbytes for i in range(len(keys))], [nbytes] * len(keys))
        if any(codes):
            raise ValueError(f"batch_put_from returns {codes}")
