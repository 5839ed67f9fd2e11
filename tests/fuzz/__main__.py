"""`make fuzz`: at least a million inputs to the decoders and to a live daemon. See docs/testing.md."""

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.fuzz import decoder, live

_CHUNK = 20_000
_ROUND = 1000
"""Conversations with one daemon; then a new one is started."""


def _chunk(seed: int, first: int, count: int) -> decoder.DecoderReport:
    report = decoder.DecoderReport()
    decoder.fuzz(seed, first, count, report)
    return report


def fuzz_decoders(seed: int, first: int, inputs: int) -> tuple[int, list[str]]:
    """Feed the decoders from all cores. Returns the inputs fed and the failures."""
    started, total = time.monotonic(), decoder.DecoderReport()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        starts = range(first, first + inputs, _CHUNK)
        jobs = [pool.submit(_chunk, seed, at, min(_CHUNK, first + inputs - at)) for at in starts]
        for job in jobs:
            report = job.result()
            total.inputs += report.inputs
            total.accepted += report.accepted
            total.refused += report.refused
            total.failures += report.failures
    print(f"decoders: {total.inputs:,} inputs in {time.monotonic() - started:.0f} s, {len(total.failures)} failures")
    for name in decoder.TARGETS:
        print(f"  {name:8} accepted {total.accepted[name]:>9,}, refused {total.refused[name]:>9,}")
    return total.inputs, total.failures


def fuzz_live(seed: int, first: int, conversations: int) -> tuple[int, list[str]]:
    """Talk to live daemons, one after another. Returns the frames sent and the failures."""
    started, inputs, failures = time.monotonic(), 0, []
    sent: Counter[str] = Counter()
    replies: Counter[str] = Counter()
    for at in range(first, first + conversations, _ROUND):
        with tempfile.TemporaryDirectory(prefix="kvstore-fuzz-", ignore_cleanup_errors=True) as folder:
            report = live.fuzz(Path(folder) / "data", seed, at, min(_ROUND, first + conversations - at))
        inputs += report.inputs
        sent += report.sent
        replies += report.replies
        failures += report.failures
        if failures:
            break
    print(
        f"live socket: {inputs:,} inputs in {conversations:,} conversations, {time.monotonic() - started:.0f} s, {len(failures)} failures"
    )
    print("  sent " + ", ".join(f"{name} {count:,}" for name, count in sent.most_common()))
    print("  came back " + ", ".join(f"{name} {count:,}" for name, count in replies.most_common()))
    return inputs, failures


def main() -> int:
    """Run one fuzzer or both. Returns the exit code: 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", choices=["decoder", "live"], help="one of the two fuzzers")
    parser.add_argument("--seed", type=int, help="give it again to have the same inputs again; random by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first input, or conversation")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs to the decoders")
    parser.add_argument("--conversations", type=int, default=5_000, help="conversations with a live daemon, each of about ten frames")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    inputs = 0
    failures: list[str] = []
    if arguments.only != "live":
        fed, failed = fuzz_decoders(seed, arguments.first, arguments.inputs)
        inputs, failures = inputs + fed, failures + failed
    if arguments.only != "decoder":
        fed, failed = fuzz_live(seed, arguments.first, arguments.conversations)
        inputs, failures = inputs + fed, failures + failed
    for failure in failures[:20]:
        print(f"\nFAILED {failure}")
    print(f"seed {seed}: {inputs:,} inputs, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
