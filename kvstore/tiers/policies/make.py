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

SSD_LOSS = 0.002
"""Hits, as a share of all pages looked up, that fewer writes to SSD may cost."""

_Pair = tuple[Policy, Policy]
_MAKERS: dict[str, Callable[[int, int, float | None], _Pair]] = {
    "lru": lambda _dram, _ssd, _loss: (LeafLRU(), LeafLRU()),
    "arc": lambda dram, ssd, _loss: (ARC(dram), ARC(ssd)),
    "classifier": lambda dram, _ssd, loss: (Classifier(dram, loss), LeafLRU()),
    "s3fifo": lambda dram, ssd, _loss: (S3FIFO(dram), S3FIFO(ssd)),
}
NAMES = tuple(_MAKERS)


def make_policies(name: str, dram_pages: int, ssd_pages: int, ssd_loss: float | None = SSD_LOSS) -> _Pair:
    """The policies of DRAM and SSD, for tiers of about so many pages. Raises BadRequest for a name that nobody knows.

    `ssd_loss` is for those that choose what is written to SSD; None writes all.
    """
    if name not in _MAKERS:
        raise BadRequest(f"no policy {name!r}: one of {', '.join(NAMES)}")
    return _MAKERS[name](max(1, dram_pages), max(1, ssd_pages), ssd_loss)
