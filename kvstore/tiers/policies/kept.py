"""The columns that policies keep beside those of a tree's pages: their names there, and what each policy sees."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.tiers.policies.policy import Columns, Policy


def specs_of(policies: Mapping[int, Policy]) -> list[ColumnSpec]:
    """What a tree has to keep for the policies of its tiers: each tier's have its own names, unless one policy serves both."""
    specs = {}
    for tier, policy in policies.items():
        for spec in policy.columns:
            name = _kept_name(policies, tier, spec.name)
            specs[name] = ColumnSpec(name, spec.dtype)
    return list(specs.values())


def columns_of(kept: Mapping[str, npt.NDArray[Any]], recency: npt.NDArray[np.int64], policies: Mapping[int, Policy], tier: int) -> Columns:
    """What the policy of a tier sees of a tree's pages."""
    own = {spec.name: kept[_kept_name(policies, tier, spec.name)] for spec in policies[tier].columns}
    return {"recency": recency, **own}


def _kept_name(policies: Mapping[int, Policy], tier: int, name: str) -> str:
    owner = next(other for other, policy in policies.items() if policy is policies[tier])
    return f"{owner}.{name}"
