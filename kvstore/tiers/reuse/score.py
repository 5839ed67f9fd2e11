"""Will a page be used again within the horizon? Logistic regression over pairs of bins, learned with every answer that time gives.

One weight for each pair of values of each pair of features; steps by AdaGrad (J. Duchi et al., JMLR 2011), whose sums decay, so that what
was learned long ago can be unlearned. Pages of one request are one example: their gradients are summed.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.tiers.reuse.features import HINT_PAIRS, PAIRS, Field
from kvstore.tiers.reuse.runs import MANY, grouped

_RATE = 0.3
_WIDTH = 256
"""Values of a pair of features."""
_REQUESTS_AT_A_TIME = 32
_USED = np.uint64(1 << 63)
"""A bit that codes do not have: the page was used again."""

_LOW, _WIDTH_OF_ONE = np.uint64(15), np.uint64(4)

_Codes = npt.NDArray[np.uint64]


class Score:
    """Log-odds of reuse. Hints are looked at from the first that comes."""

    def __init__(self) -> None:
        self._weights = np.zeros(0)
        self._sums = np.zeros(0)
        self._first = self._second = np.zeros(0, np.uint64)
        self._bases = np.zeros((1, 0), np.uint64)
        self.hinted = False
        self._look_at(PAIRS)

    def _look_at(self, pairs: list[tuple[Field, Field]]) -> None:
        more = np.zeros(_WIDTH * len(pairs) - len(self._weights))
        self._weights, self._sums = np.append(self._weights, more), np.append(self._sums, more)
        self._first = np.array([4 * one for one, _ in pairs], np.uint64)
        self._second = np.array([4 * other for _, other in pairs], np.uint64)
        self._bases = (_WIDTH * np.arange(len(pairs), dtype=np.uint64))[np.newaxis, :]

    def look_at_hints(self) -> None:
        """A client gives hints: learn what they are worth."""
        if not self.hinted:
            self.hinted = True
            self._look_at(PAIRS + HINT_PAIRS)

    def _places(self, codes: _Codes) -> npt.NDArray[np.int64]:
        column = codes[:, np.newaxis]
        pairs = column >> self._first
        pairs &= _LOW
        pairs <<= _WIDTH_OF_ONE
        second = column >> self._second
        second &= _LOW
        pairs |= second
        pairs += self._bases
        return pairs.view(np.int64)

    def of(self, codes: _Codes) -> npt.NDArray[np.float64]:
        """The log-odds for pages with these codes (see features)."""
        if len(codes) < MANY:
            return self._of(codes)
        lengths, different, which = grouped(codes)
        return np.repeat(self._of(different)[which], lengths)

    def _of(self, codes: _Codes) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._weights.take(self._places(codes)).sum(1)
        return found

    def learn(self, codes: _Codes, *, used_again: bool | npt.NDArray[np.bool_]) -> None:
        """What became of pages of one request that had these codes: of all the same, or of each."""
        if not len(codes):
            return
        pages: int | npt.NDArray[Any] = 1
        if len(codes) >= MANY:
            if not isinstance(used_again, bool):
                codes = np.where(used_again, codes | _USED, codes)
            lengths, codes, which = grouped(codes)
            pages = np.bincount(which, lengths)
            if not isinstance(used_again, bool):
                used_again, codes = codes >= _USED, codes & ~_USED
        self._step(self._places(codes), used_again, pages)

    def learn_and_rate(self, before: _Codes, used_again: npt.NDArray[np.bool_], codes: _Codes) -> npt.NDArray[np.float64]:
        """Pages of one request had the codes `before`, and this became of them: `learn`, then `of` the codes that pages have now."""
        if not len(before) or len(before) >= MANY or len(codes) >= MANY:
            self.learn(before, used_again=used_again)
            return self.of(codes)
        places = self._places(np.concatenate((before, codes)))
        self._step(places[: len(before)], used_again, 1)
        rated: npt.NDArray[np.float64] = self._weights.take(places[len(before) :]).sum(1)
        return rated

    def _step(self, places: npt.NDArray[np.int64], used_again: bool | npt.NDArray[np.bool_], pages: int | npt.NDArray[Any]) -> None:
        """Learn what became of so many pages for each row of places of weights."""
        weights = self._weights.take(places)
        error = (1 / (1 + np.exp(-weights.sum(1))) - used_again) * pages
        pairs, touched = places.shape[1], places.ravel()
        gradient = np.bincount(touched, error.repeat(pairs), len(self._weights)).take(touched)
        sums = self._sums.take(touched)
        sums += gradient * gradient
        self._sums[touched] = sums  # one that is touched twice gets the same twice
        sums += 1
        self._weights[touched] = weights.ravel() - _RATE / math.sqrt(pairs) * gradient / np.sqrt(sums, out=sums)

    def learn_by_request(self, codes: npt.NDArray[np.uint64], requests: npt.NDArray[np.float64], *, used_again: bool) -> None:
        """What became of pages of several requests, each an example of its own; told apart by a number (their time)."""
        order = np.argsort(requests, kind="stable")
        request = np.empty(len(requests), np.int64)
        request[order] = np.cumsum(np.diff(requests[order], prepend=requests[order[:1]]) != 0)
        for first in range(0, int(request.max(initial=-1)) + 1, _REQUESTS_AT_A_TIME):
            mine = (request >= first) & (request < first + _REQUESTS_AT_A_TIME)
            places = self._places(codes[mine])
            error = 1 / (1 + np.exp(-self._weights[places].sum(1))) - used_again
            pairs, weights = places.shape[1], len(self._weights)
            place = (places + ((request[mine] - first) * weights)[:, np.newaxis]).ravel()
            gradients = np.bincount(place, np.repeat(error, pairs), _REQUESTS_AT_A_TIME * weights).reshape(-1, weights)
            self._sums += (gradients * gradients).sum(0)
            self._weights -= _RATE / np.sqrt(pairs) * gradients.sum(0) / np.sqrt(self._sums + 1)

    def forget(self, share_kept: float) -> None:
        """Let what was learned weigh less against what comes."""
        self._sums *= share_kept
