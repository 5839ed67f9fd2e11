"""What the classifier's column `state` says of a page, in bits."""

import numpy as np

from kvstore.tiers.policies.policy import Pages

KNOWN, WAITS, ABANDONED, IN, SHADOW, OFFERED, REFUSED = 1, 2, 4, 8, 16, 32, 64
"""It was used; it is not known yet whether within the horizon again; given up; in the tier; in the rival's shadow; it left for SSD,
and it is not known yet whether it is used while SSD would hold it; it was not written there."""


def pages_with(pages: Pages, state: int) -> Pages:
    """All pages and ghosts of a tree that have a bit of the state."""
    slots = np.flatnonzero((pages.columns["state"][: pages.high] & state) != 0).astype(np.int32)
    return Pages(pages.columns, slots, pages.high, pages.raised)
