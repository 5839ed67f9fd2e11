"""The radix prefix tree: what exists, under exact labels. Knows nothing of tiers."""
