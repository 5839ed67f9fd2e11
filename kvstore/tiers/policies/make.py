"""Policies by name."""

from collections.abc import Callable

from kvstore.errors import BadRequest
from kvstore.tiers.classifier import Classifier
from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.lru import LeafLRU
from kvstore.tiers.policies.policy import Policy
from kvstore.tiers.policies.s3fifo import S3FIFO

BASELINES = ("lru", "arc", "s3fifo")
"""What every policy is compared with."""

_Pair = tuple[Policy, Policy]
_MAKERS: dict[str, Callable[[int, int], _Pair]] = {
    "lru": lambda _dram, _ssd: (LeafLRU(), LeafLRU()),
    "arc": lambda dram, ssd: (ARC(dram), ARC(ssd)),
    "classifier": lambda dram, ssd: (Classifier(dram, ssd), LeafLRU()),
    "s3fifo": lambda dram, ssd: (S3FIFO(dram), S3FIFO(ssd)),
}
NAMES = tuple(_MAKERS)


def make_policies(name: str, dram_pages: int, ssd_pages: int) -> _Pair:
    """The policies of DRAM and SSD, for tiers of about so many pages. Raises BadRequest for a name that nobody knows."""
    if name not in _MAKERS:
        raise BadRequest(f"no policy {name!r}: one of {', '.join(NAMES)}")
    return _MAKERS[name](max(1, dram_pages), max(1, ssd_pages))
