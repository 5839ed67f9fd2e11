"""`python -m tests.oracle`: kvstore's hybrid match against SGLang's UnifiedRadixCache, on random sequences.

Exit status: 0 if they agree apart from the oracle's known fault, 1 if not, 2 if the oracle can't be had.
"""

import argparse
import logging
import sys
import time
import warnings
from dataclasses import replace

from tests.oracle.compare import Cache, Comparison, LookUp, Tally, failure
from tests.oracle.content import Setting
from tests.oracle.steps import Step, describe, make_steps, shrink

CORES = ("python", "rust")
FULL = [(1, 0, False), (4, 0, False)]
WINDOW = [(page, window, False) for page, window in ((1, 1), (1, 3), (1, 8), (2, 2), (2, 5), (4, 4), (4, 10), (4, 13), (16, 24))]
STATE = [(page, 0, True) for page in (1, 2, 4)]
BOTH = [(page, window, True) for page, window in ((1, 3), (2, 5), (4, 10))]
SETTINGS = [Setting(*shape, core) for shape in (*FULL, *WINDOW, *STATE, *BOTH) for core in CORES]
CONTROL = Setting(4, 10, False, "rust")
CONTROL_SEQUENCES = 100


class Runner:
    """Makes the oracle's caches, one a setting, and runs sequences on them."""

    def __init__(self, seed: str) -> None:
        from tests.oracle.sglang_cache import OracleCache
        from tests.oracle.sglang_storage import OracleStorage

        self._seed = seed
        self._cache_of, self._storage_of = OracleCache, OracleStorage

    def control(self) -> bool:
        """Whether a wrong rule of ours (a window one page too long) is found out: a comparison that can't fail says nothing."""
        cache, wrong = self._cache_of(CONTROL), replace(CONTROL, window=CONTROL.window + CONTROL.page_tokens)

        def fails(steps: list[Step]) -> bool:
            return failure(Comparison(cache, CONTROL, wrong), steps) is not None

        for number in range(CONTROL_SEQUENCES):
            steps = make_steps(CONTROL, f"{self._seed}/control/{number}")
            if fails(steps):
                least = shrink(CONTROL, steps, fails)
                print(f"control: a wrong rule is found out by sequence {number}, and that is shrunk to {len(least)} of {len(steps)} steps")
                return True
        print(f"control: a wrong rule was not found out in {CONTROL_SEQUENCES} sequences: the comparison is blind")
        return False

    def compare(self, setting: Setting, sequences: int) -> tuple[Tally, bool]:
        """Run sequences in one setting, until one fails."""
        cache, storage, total = self._cache_of(setting), self._storage_of(setting), Tally()
        for number in range(sequences):
            seed = f"{self._seed}/{setting.name}/{number}"
            comparison, steps = Comparison(cache, setting, setting, storage), make_steps(setting, seed)
            if failed := failure(comparison, steps):
                report_failure(cache, storage, setting, steps, seed, failed)
                return total, False
            total.add(comparison.tally)
        return total, True


def report_failure(cache: Cache, storage: LookUp, setting: Setting, steps: list[Step], seed: str, failed: tuple[str, str]) -> None:
    """Print the least part of a sequence that fails in the same way."""

    def again(part: list[Step]) -> tuple[str, str] | None:
        return failure(Comparison(cache, setting, setting, storage), part)

    least = shrink(setting, steps, lambda part: (found := again(part)) is not None and found[0] == failed[0])
    print(f"\nDISAGREEMENT ({setting.name}; sequence {seed!r})\n  {failed[1]}\n  The least that fails so:")
    for at, step in enumerate(least):
        print(f"    {at}: {describe(step)}")
    print(f"  {(again(least) or failed)[1]}\n", flush=True)


def report_row(setting: Setting, tally: Tally) -> None:
    """Print what was compared in one setting."""
    counts = f"{tally.sequences:9,} {tally.steps:10,} {tally.comparisons:9,} {tally.short:9,} {tally.known_faults:11,}"
    print(f"{setting.name:48} {counts}", flush=True)


def report_total(total: Tally, seconds: float) -> None:
    """Print what was compared in all of them."""
    print(
        f"\n{total.sequences:,} sequences of {total.steps:,} operations in {seconds:.0f} s"
        f" ({total.inserts:,} inserts, {total.evictions:,} evictions).\n"
        f"{total.comparisons:,} comparisons: {total.longest:,} longest boundaries ({total.short:,} of them short of the full pages)"
        f" and {total.boundaries:,} single\nones against the tree, {total.stored_boundaries:,} against the storage look-up.\n"
        f"{total.comparisons - total.known_faults:,} agreements. {total.known_faults:,} answers of the look-up are left out for its"
        f" known fault: it accepts\na window shorter than w where it begins, be that the root or not. In the tree nothing is left out."
    )


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(prog="make test-oracle ARGS=…", description=__doc__)
    parser.add_argument("--sequences", type=int, default=6000, help="in all settings together (6000)")
    parser.add_argument("--seed", default="1", help="what the sequences are made from (1)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        runner = Runner(options.seed)
    except ImportError as error:
        print(f"The oracle can't be had: {error}. It is installed by `make test-oracle`; see docs/testing.md.", file=sys.stderr)
        return 2
    each = -(-options.sequences // len(SETTINGS))
    print(f"seed {options.seed!r}: {each} sequences in each of {len(SETTINGS)} settings", flush=True)
    good, total, start = runner.control(), Tally(), time.monotonic()
    print(f"\n{'setting':48} {'sequences':>9} {'operations':>10} {'compared':>9} {'cut short':>9} {'known fault':>11}")
    for setting in SETTINGS:
        tally, agreed = runner.compare(setting, each)
        report_row(setting, tally)
        total.add(tally)
        good = good and agreed
    report_total(total, time.monotonic() - start)
    print("They agree." if good else "They do NOT agree.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
