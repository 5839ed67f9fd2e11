"""Ours beside other stores and the machine's limits, in one interleaved run: see docs/benchmarks.md."""
