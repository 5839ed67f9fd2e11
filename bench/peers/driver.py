"""A peer's client in a process of its own, so that its CPU time, its memory and its end are its own."""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.peers.peer import Bytes, Moved, Peer, Shape, Unavailable

_ANSWER_S = 180.0


class Driver:
    """Starts a peer and passes calls on. Raises Unavailable if it does not start, or ends."""

    def __init__(self, kind: type[Peer], source: Bytes) -> None:
        self.name = kind.name
        self._folder = Path(tempfile.mkdtemp(prefix=f"kvstore-bench-{kind.name}-"))
        context = multiprocessing.get_context("fork")  # the source is shared, and not copied
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, source, self._folder), daemon=False)
        self._process.start()
        theirs.close()
        self._call("start")

    def fill(self, shape: Shape) -> None:
        """See Peer."""
        self._call("fill", shape)

    def move(self, what: str, shape: Shape, connections: int, seconds: float) -> Moved:
        """A get or a put, or what else a peer measures."""
        moved = self._call(what, shape, connections, seconds)
        assert isinstance(moved, Moved)
        return moved

    def verify(self, shape: Shape) -> bool:
        """See Peer."""
        return bool(self._call("verify", shape))

    def clear(self) -> None:
        """See Peer."""
        self._call("clear")

    def stop(self) -> None:
        """End the servers and the process."""
        try:
            self._call("stop")
        except Unavailable:
            pass  # it has ended already
        self._end()

    def _call(self, what: str, *arguments: Any) -> object:
        try:
            self._pipe.send((what, arguments))
            if not self._pipe.poll(_ANSWER_S):
                raise Unavailable(f"{self.name} does not answer")
            error, result = self._pipe.recv()
        except (EOFError, OSError) as lost:
            error, result = f"its client ended ({lost or type(lost).__name__}): {self._last_words()}", None
        if error:
            self._end()
            raise Unavailable(f"{self.name}: {error}")
        return result

    def _last_words(self) -> str:
        said = (self._folder / "driver.log").read_text(errors="replace").splitlines()
        return " | ".join(said[-2:])[:400]

    def _end(self) -> None:
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(pipe: Connection, kind: type[Peer], source: Bytes, folder: Path) -> None:
    """The process: what is asked for until `stop`."""
    log = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, lambda *_: None)  # meant for all: the parent says `stop` then. Servers have the default again
    peer = kind(source, folder)
    try:
        while True:
            what, arguments = pipe.recv()
            result = getattr(peer, what)(*arguments)
            pipe.send(("", result))
            if what == "stop":
                break
    except (EOFError, KeyboardInterrupt):
        peer.stop()
    except Exception as error:  # noqa: BLE001  (whatever a peer raises, the run goes on without it)
        traceback.print_exc()
        try:
            peer.stop()
        except Exception:  # noqa: BLE001  (it is in the log, and what failed first is what the run is told)
            traceback.print_exc()
        pipe.send((f"{error}" or type(error).__name__, None))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's threads are of no interest any more
