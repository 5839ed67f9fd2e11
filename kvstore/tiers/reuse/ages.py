"""What idle time says: how likely pages of a class are to be used again at each age, and so what keeping one is worth. Pure.

Hazards by age are estimated as survival analysis does it (E. Kaplan, P. Meier, 1958): pages that are still idle, or were
forgotten, have been at risk up to their age. Thin data shrinks towards coarser classes, and at last to a hazard of 1/age, under
which the least recently used is worth least. What keeping is worth is the best rate of reuse that can be had from an age on, over
all times to give up: hit density (N. Beckmann et al., LHD, NSDI '18) with its horizon maximised: the Gittins index of the page.
"""

import numpy as np
import numpy.typing as npt

from kvstore.tiers.reuse.runs import MANY, by_runs

SCORES, RHYTHMS = 24, 6
CLASSES = SCORES * RHYTHMS
_AGES = 64
_PER_OCTAVE, _FIRST_OCTAVE = 2.0, -8.0
_SHRINK = 20.0
"""Observations that the coarser class counts for."""

_ROWS = np.arange(CLASSES) * (_AGES + 1)
"""Where the rows of classes begin in the index."""

Floats = npt.NDArray[np.float64]


class AgeTables:
    """Reuses, losses and what follows, by class (score and rhythm) and age: half an octave of seconds a bin."""

    def __init__(self) -> None:
        self._reused: Floats = np.zeros((CLASSES, _AGES))
        self._lost: Floats = np.zeros((CLASSES, _AGES))
        self._index: Floats = np.zeros((CLASSES, _AGES + 1))
        self._surviving: Floats = np.ones((CLASSES, _AGES + 1))
        self._pooled: Floats = np.ones(_AGES + 1)
        self._edges: Floats = np.exp2(np.arange(_AGES + 1) / _PER_OCTAVE + _FIRST_OCTAVE)
        self._edges[0] = 0.0

    def reused(self, classes: npt.NDArray[np.uint8], ages: Floats) -> None:
        """Pages were used again at these ages (seconds)."""
        places = classes.astype(np.int64)
        places *= _AGES
        places += by_runs(_bins, ages)
        if len(places) < MANY:
            np.add.at(self._reused.ravel(), places, 1.0)
        else:
            self._reused += np.bincount(places, minlength=CLASSES * _AGES).reshape(CLASSES, _AGES)

    def lost(self, classes: npt.NDArray[np.uint8], ages: Floats) -> None:
        """Pages were forgotten at these ages: they were not used up to then."""
        np.add.at(self._lost.ravel(), classes.astype(np.int64) * _AGES + _bins(ages), 1.0)

    def forget(self, share_kept: float) -> None:
        """Let what was seen count less."""
        self._reused *= share_kept
        self._lost *= share_kept

    def rebuild(self, classes: npt.NDArray[np.uint8], ages: Floats, pages: npt.NDArray[np.int64]) -> None:
        """Estimate anew; the arguments are of all pages and ghosts that are idle now: so many of each class and age."""
        idle = np.bincount(classes.astype(np.int64) * _AGES + _bins(ages), pages, CLASSES * _AGES).reshape(CLASSES, _AGES)
        gone = self._lost + idle
        reached = (self._reused + gone)[:, ::-1].cumsum(1)[:, ::-1]
        hazards = self._hazards(reached - gone / 2)
        surviving = np.ones((CLASSES, _AGES + 1))
        np.cumprod(1 - hazards, axis=1, out=surviving[:, 1:])
        held = np.zeros((CLASSES, _AGES + 1))
        np.cumsum((surviving[:, 1:] + surviving[:, :-1]) / 2 * np.diff(self._edges), axis=1, out=held[:, 1:])
        self._surviving = surviving
        seen = np.flatnonzero(reached[:, 0] > 0)
        last = min(_AGES, int(np.flatnonzero(reached.sum(0) > 0).max(initial=0)) + 2)
        alive, time = surviving[seen], held[seen]
        self._index[seen, : last - 1] = _best_rates(alive[:, : last + 1].T.copy(), time[:, : last + 1].T.copy()).T
        rest = slice(last - 1, None)  # beyond what was seen only the next age counts
        self._index[seen, last - 1 : _AGES] = -np.diff(alive[:, rest]) / np.maximum(np.diff(time[:, rest]), 1e-300)
        self._index[:, _AGES] = self._index[:, _AGES - 1]

    def _hazards(self, at_risk: Floats) -> Floats:
        """The chance of reuse within each age bin for who reaches it, by class."""
        reused, total = self._reused.sum(0), at_risk.sum(0)
        flat = (reused.sum() + 0.1) / (total.sum() + 10)
        pool = ((reused + _SHRINK * flat) / (total + _SHRINK))[np.newaxis, :]
        np.cumprod(1 - pool[0], out=self._pooled[1:])
        scores = (RHYTHMS, SCORES, _AGES)
        by_score = _shrunk(self._reused.reshape(scores).sum(0), at_risk.reshape(scores).sum(0), pool)
        return _shrunk(self._reused, at_risk, np.tile(by_score, (RHYTHMS, 1)))

    def worth(self, classes: npt.NDArray[np.uint8], ages: Floats) -> Floats:
        """Reuses for each second of keeping pages, at best."""
        return by_runs(self._worth, classes, ages)

    def _worth(self, classes: npt.NDArray[np.uint8], ages: Floats) -> Floats:
        place = _position(ages)
        low = place.astype(np.int64)
        place -= low
        low += _ROWS.take(classes)
        table = self._index.ravel()
        found: Floats = table.take(low) * (1 - place)
        low += 1
        found += table.take(low) * place
        return found

    def chance(self, classes: npt.NDArray[np.uint8], ages: Floats, within: float) -> Floats:
        """The chance that pages, idle up to these ages, are used within so many seconds from now."""
        now = self._surviving[classes, _bins(ages)]
        then = self._surviving[classes, _bins(ages + within) + 1]
        found: Floats = 1 - then / np.maximum(now, 1e-12)
        return found

    def chance_of_any(self, age: float, within: float) -> float:
        """The chance that a page of whatever class, idle up to this age, is used within so many seconds from then."""
        now, then = _bins(np.array([age, age + within]))
        return float(1 - self._pooled[then] / max(self._pooled[now], 1e-12))


def _best_rates(alive: Floats, time: Floats) -> Floats:
    """The best rate from each age (a row; not from the last two) to any later one, by class (a column).

    `alive` is who gets so far, `time` how long keeping has been paid for.
    """
    best = np.empty((len(alive) - 2, alive.shape[1]))
    for start in range(len(best)):
        rates = alive[start] - alive[start + 1 :]
        paid = time[start + 1 :] - time[start]
        rates /= np.maximum(paid, 1e-300, out=paid)
        rates.max(0, out=best[start])
    return best


def _shrunk(reused: Floats, at_risk: Floats, coarser: Floats) -> Floats:
    """Hazards of classes, where there is little to see by those of a coarser class, scaled to what there is."""
    scale = (reused.sum(1, keepdims=True) + 1) / ((at_risk * coarser).sum(1, keepdims=True) + 1)
    found: Floats = np.minimum(0.99, (reused + _SHRINK * np.minimum(0.95, scale * coarser)) / (at_risk + _SHRINK))
    return found


def _position(ages: Floats) -> Floats:
    place: Floats = np.maximum(ages, 0.0)
    place += 1e-9
    np.log2(place, out=place)
    place -= _FIRST_OCTAVE
    place *= _PER_OCTAVE
    np.maximum(place, 0, out=place)
    return np.minimum(place, _AGES - 1.001, out=place)


def _bins(ages: Floats) -> npt.NDArray[np.int64]:
    return _position(ages).astype(np.int64)
