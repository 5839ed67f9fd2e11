"""Ours beside Valkey, Redis, Mooncake and LMCache's server, iperf3 and memcpy, on this machine, in one interleaved run.

Over TCP: gets and puts of 1, 4, 16 and 64 MiB and of 32 pages of 1.5 MiB at once, over 1, 2, 4 and 8 connections; 4 KiB, one and 64
at a time. On the same host: bench.same_host. From SSD: bench.ssd_fetch. Every repetition measures all of them next to each other;
ratios are medians over repetitions. A peer that is not here is left out with a word. See docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np

from bench import same_host, ssd_fetch
from bench.peers import alone, markdown, picture, ratios, tcp
from bench.peers.peer import MIB, ROTATION
from bench.report import Report, arguments

SECTIONS = ("tcp", "small", "same-host", "ssd")


def plan_of(settings: argparse.Namespace) -> tcp.Plan:
    """How much to measure."""
    big, batch = tcp.large(64), tcp.BATCH
    if settings.quick:
        return tcp.Plan([[tcp.large(16)], [big, batch]], [1], [1], 3, 0.2, settings.peers)
    groups = [[big, batch] if mib == 64 else [tcp.large(mib)] for mib in settings.sizes]
    few = [number for number in settings.connections if number in (1, 4)]
    return tcp.Plan(groups, settings.connections, few, settings.repetitions, settings.seconds, settings.peers)


def over_tcp(report: Report, plan: tcp.Plan, sections: list[str]) -> dict[str, str]:
    """Large and small transfers. Returns what was left out, and why."""
    source = np.random.default_rng(1).integers(0, 256, ROTATION, dtype=np.uint8)
    stores = tcp.Stores(source, plan.peers)
    try:
        transfers = tcp.Transfers(report, plan, source, stores)
        try:
            if "tcp" in sections:
                transfers.run()
            if "small" in sections:
                transfers.small()
        finally:
            transfers.close()
    finally:
        stores.stop()
    return stores.left_out


def on_same_host(report: Report, settings: argparse.Namespace) -> None:
    """Through shared memory, 16 MiB."""
    own = argparse.Namespace(sizes=[16], repetitions=3 if settings.quick else settings.repetitions, seconds=0.1 if settings.quick else 0.4)
    own.peer_python = sys.executable
    asyncio.run(same_host.measure(report, own))


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables for the docs")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement, at least")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 4, 1], metavar="MIB", help="64 brings the batches of 1.5 MiB")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--add", type=Path, metavar="FILE", help="start from the rows of an earlier run that measured other things")
    names = [kind.name for kind in tcp.KINDS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=f"over TCP: {', '.join(names)}")
    parser.add_argument("--folder", type=Path, help="on the file system to measure the SSD tier on (default: the system's temporary one)")
    settings = parser.parse_args()
    settings.peers = list(dict.fromkeys(["ours", *settings.peers]))
    if settings.png is not None:
        picture.can_draw()
    alone.enter("bench.peers", sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    plan, began = plan_of(settings), time.monotonic()
    report = Report("peers", _settings(plan, settings))
    if settings.add is not None:
        report.rows = json.loads(settings.add.read_text())["rows"]
    left_out: dict[str, str] = {}
    if {"tcp", "small"} & set(settings.sections):
        left_out = over_tcp(report, plan, settings.sections)
    if "same-host" in settings.sections:
        on_same_host(report, settings)
    if "ssd" in settings.sections:
        report.settings["ssd"] = ssd_fetch.measure(report, ssd_fetch.Plan.of(quick=settings.quick, folder=settings.folder))
    ratios.all_of(report)
    report.settings |= {
        "left_out": left_out,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "took_s": round(time.monotonic() - began),
    }
    report.show("ours beside peers")
    report.write(settings.json)
    if settings.markdown is not None:
        settings.markdown.write_text(markdown.tables(report))
    if settings.png is not None:
        picture.draw(report, settings.png)
    print(markdown.goals(report))


def _settings(plan: tcp.Plan, settings: argparse.Namespace) -> dict[str, object]:
    return {
        "shapes": [shape.label for group in plan.groups for shape in group],
        "connections": plan.connections,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "sections": settings.sections,
        "rotation_MiB": ROTATION // MIB,
        "rotation_MiB_of_64x4KiB_and_4KiB": [tcp.MANY.bound // MIB, tcp.ONE.bound // MIB],
        "outstanding": "ours: one transfer, striped over all connections; peers: one on each connection",
        "cached": "blobs in the servers' DRAM, none in a CPU cache (4 KiB: they may be)",
        "verified": "ours: both ends, every slice; peers: nothing while measured; all: every byte once, after a group of shapes",
    }


if __name__ == "__main__":
    main()
