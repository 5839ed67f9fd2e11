"""Benchmarks: each runs the peer or the physical limit beside ours, interleaved, and prints medians and ratios."""
