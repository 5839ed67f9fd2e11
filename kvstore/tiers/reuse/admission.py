"""What is worth writing to SSD: which of the pages that leave DRAM will be used again while SSD would still hold them. Pure.

A page that is written takes the room of another. So a page pays if the chance that SSD serves it is higher than what its room is worth
to the pages at SSD's edge: the chance that one which SSD gives up now is used within as long again. Pages under that price are
refused: hits are won by it. On top of that, those with the least chance may be refused for the sake of fewer writes, as long as the
hits forgone stay within a budget. What becomes of a page is seen either way, as those refused are ghosts.
"""

import numpy as np
import numpy.typing as npt

from kvstore.tiers.reuse.score import Score

Odds = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_BINS = 256
_PER_BIN, _LOWEST = 1 / 16, -8.0
_CHANCES: Floats = 1 / (1 + np.exp(-(_LOWEST + (np.arange(_BINS) + 0.5) * _PER_BIN)))
_PRIOR = 20.0
"""Pages that the estimates count as right for, before anything is known of how right they are."""


class Admission:
    """`loss` is the share of all pages looked up that may be missed for the sake of fewer writes. Odds are bins of log-odds."""

    def __init__(self, loss: float) -> None:
        self._loss = loss
        self._score = Score()
        self._offered: Floats = np.zeros(_BINS)
        self._any_offered = False
        self._looked_up = 0.0
        self._expected = self._returned = 0.0
        self.floor = 0
        """Odds under which pages were refused the last time."""

    def look_at_hints(self) -> None:
        """A client gives hints: learn what they are worth."""
        self._score.look_at_hints()

    def looked_up(self, pages: int, window: float) -> None:
        """So many pages were asked for; what is older than about `window` pages counts little."""
        kept = 2.0 ** (-pages / window)
        self._looked_up = self._looked_up * kept + pages
        if not self._any_offered:
            return
        self._offered *= kept
        self._expected *= kept
        self._returned *= kept

    def odds(self, codes: npt.NDArray[np.uint64]) -> Odds:
        """How likely pages with these codes (see features), which leave DRAM, are to be used while SSD would hold them."""
        found: Odds = np.clip((self._score.of(codes) - _LOWEST) / _PER_BIN, 0, _BINS - 1).astype(np.uint8)
        return found

    def chances(self, odds: Odds) -> Floats:
        """Odds as chances, corrected by how right those of refused pages were."""
        found: Floats = np.minimum(1.0, _CHANCES[odds] * self._correction)
        return found

    @property
    def floor_chance(self) -> float:
        """The chance under which pages were refused the last time."""
        return float(self.chances(np.array([self.floor - 1], np.uint8))[0]) if self.floor else 0.0

    @property
    def _correction(self) -> float:
        return (self._returned + _PRIOR) / (self._expected + _PRIOR)

    def admits(self, odds: Odds, price: float) -> npt.NDArray[np.bool_]:
        """Which of the pages that leave DRAM are worth writing, at this price of their room."""
        self._any_offered = True
        self._offered += np.bincount(odds, minlength=_BINS)
        forgone = np.cumsum(self._offered * np.maximum(0.0, _CHANCES * self._correction - price))
        self.floor = int(np.flatnonzero(np.append(0.0, forgone) <= self._loss * self._looked_up)[-1])
        return odds >= self.floor

    def came_back(self, codes: npt.NDArray[np.uint64], odds: Odds, refused: npt.NDArray[np.bool_], in_time: npt.NDArray[np.bool_]) -> None:
        """Pages that were offered are used again by one request, some while SSD would have held them."""
        self._expected += float(_CHANCES[odds[refused]].sum())
        self._returned += float(np.count_nonzero(refused & in_time))
        self._score.learn(codes, used_again=in_time)

    def stayed_away(
        self, codes: npt.NDArray[np.uint64], odds: Odds, refused: npt.NDArray[np.bool_], requests: npt.NDArray[np.float64]
    ) -> None:
        """Pages that were offered have not been used for as long as SSD would have held them. `requests` tells their last uses apart."""
        self._expected += float(_CHANCES[odds[refused]].sum())
        self._score.learn_by_request(codes, requests, used_again=False)

    def forget(self, share_kept: float) -> None:
        """Let what was learned weigh less against what comes."""
        self._score.forget(share_kept)
