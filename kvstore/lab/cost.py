"""What a page costs to compute again."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.prefill import Prefill


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds a token: a constant for the weights, and a part that grows with the tokens before it, for the attention over them.

    The defaults are about those of a model of 70 billion parameters on eight accelerators: 10,000 tokens a second at the
    start, half of that 100,000 tokens in.
    """

    token_s: float = 1e-4
    token_s_per_position: float = 1e-9

    def __post_init__(self) -> None:
        Prefill(self.token_s, self.token_s_per_position)  # which refuses what makes no sense

    def seconds(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """For the tokens from position `first` to before `last`."""
        prefill = Prefill(self.token_s, self.token_s_per_position)
        found: npt.NDArray[np.float64] = prefill.between(first.astype(np.float64), last.astype(np.float64))
        return found
