"""What the scheduler's side tells the workers' side at each step, and what it hears back."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = tuple[npt.NDArray[np.int64], ...]
"""For each cache group, the blocks of consecutive pages; 0 is vLLM's null block: there is none."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pages [first, last) of a prefix are wanted in the blocks given. Tokens (bytes of uint32) and extras are those of the whole prefix."""

    request: str
    tokens: bytes
    extras: dict[int, bytes]
    first: int
    last: int
    blocks: BlockIds
    layerwise: bool
    """Whether this very step computes with them."""


@dataclass(frozen=True, slots=True)
class Save:
    """Pages [first, last) of a prefix are in the blocks given after this step. All ranks put their parts under one put id."""

    request: str
    tokens: bytes
    extras: dict[int, bytes]
    first: int
    last: int
    blocks: BlockIds
    put_id: bytes


@dataclass(slots=True)
class Step:
    """One step's loads and saves. `idle`: no forward pass runs."""

    namespace: str
    fingerprint: str
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
