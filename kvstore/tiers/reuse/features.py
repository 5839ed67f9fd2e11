"""What is known of a page at its last use, as sixteen numbers of four bits in one word. Pure.

Counts and times are binned by octaves, so that no bin is of a certain size of page, context or pause.
"""

import math
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.hints import Ended, Hints, Turn

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint64]


class Field(IntEnum):
    """Where each number is; 4 bits each."""

    __hash__ = int.__hash__  # that of an enum hashes its name, in Python

    USES = 0
    GAP = 1
    """Octave of the seconds between the last two uses; 0 for none."""
    FROM_END = 2
    """How far from the end of the request."""
    NEW_PAGES = 3
    """Pages of the request that nobody had."""
    DEPTH = 4
    CHILDREN = 5
    """Different pages that follow; 8 more if the page was new."""
    KNOWN_PAGES = 6
    """Pages of the request that were known."""
    REQUEST_GAP = 7
    """The gap of the deepest page that was known: the conversation's last pause."""
    TURNS = 8
    """Requests that each went on from the one before, as far as the tree shows."""
    WAS_END = 9
    """How far from its request's end the deepest known page was when it was used before: 1 if the conversation just went on."""
    BASE_USES = 10
    """Uses of the deepest known page; 8 more if the page was new."""
    PAGES = 11
    """Pages of the request."""
    RHYTHM = 12
    """The conversation's pauses, smoothed."""
    HINT = 13
    """What the client said of its turn; 0 for nothing."""
    NOTHING = 14


PAIRS = [
    (Field.USES, Field.GAP), (Field.USES, Field.FROM_END), (Field.USES, Field.NEW_PAGES), (Field.USES, Field.DEPTH),
    (Field.USES, Field.CHILDREN), (Field.NEW_PAGES, Field.KNOWN_PAGES), (Field.REQUEST_GAP, Field.TURNS), (Field.WAS_END, Field.BASE_USES),
    (Field.GAP, Field.REQUEST_GAP), (Field.PAGES, Field.USES), (Field.RHYTHM, Field.REQUEST_GAP), (Field.RHYTHM, Field.TURNS),
    (Field.WAS_END, Field.NEW_PAGES), (Field.USES, Field.BASE_USES), (Field.FROM_END, Field.CHILDREN), (Field.FROM_END, Field.NEW_PAGES),
    (Field.NOTHING, Field.NOTHING), (Field.DEPTH, Field.FROM_END),
]  # fmt: skip
"""What is looked at together."""
HINT_PAIRS = [
    (Field.HINT, Field.NOTHING), (Field.HINT, Field.REQUEST_GAP), (Field.HINT, Field.RHYTHM), (Field.HINT, Field.USES),
    (Field.HINT, Field.TURNS), (Field.HINT, Field.NEW_PAGES),
]  # fmt: skip

_TABLE = 1 << 16


def _octaves(top: int) -> Ints:
    count = np.arange(_TABLE)
    return np.minimum(top, np.where(count == 0, 0, 1 + np.ceil(np.log2(np.maximum(count, 1))))).astype(np.int64)


def _placed(values: Ints, which: Field) -> Codes:
    """Values of a field where codes have them."""
    return values.astype(np.uint64) << np.uint64(4 * which)


_USES = np.array([0, 1, 2, 3, 4, 5, 6, 7, 7] + [8] * 4 + [9] * 4 + [10] * 16 + [11] * 32 + [12] * 191, np.int64)
_USES_CODES, _GAP_CODES = _placed(_USES, Field.USES), _placed(np.arange(16), Field.GAP)
_DEPTH_CODES, _FROM_END_CODES = _placed(_octaves(15), Field.DEPTH), _placed(_octaves(7), Field.FROM_END)
_LOW_OCTAVES = _octaves(7)
_CHILDREN_CODES = _placed(_LOW_OCTAVES, Field.CHILDREN)
_NEW = np.uint64(8 << 4 * Field.CHILDREN | 8 << 4 * Field.BASE_USES)


def octave(count: int, top: int = 15) -> int:
    """0, 1, 2, 3-4, 5-8 ... as 0, 1, 2, 3, 4 ... up to `top`."""
    return min(top, 0 if count <= 0 else 1 + (count - 1).bit_length())


def gap_octaves(seconds: npt.NDArray[np.float64]) -> Ints:
    """Octaves of seconds, 1 to 15."""
    place = seconds + 1e-3
    np.log2(place, out=place)
    place += 4
    np.maximum(place, 1, out=place)
    return np.minimum(place, 15, out=place).astype(np.int64)


def rhythm_octave(rhythm: float) -> int:
    """The bin of a smoothed binary logarithm of seconds, 1 to 15."""
    return min(15, max(1, math.floor(rhythm + 4)))


def rhythm_octaves(rhythms: npt.NDArray[np.float64]) -> Ints:
    """As `rhythm_octave`, of several."""
    found: Ints = np.minimum(np.maximum(np.floor(rhythms + 4), 1), 15).astype(np.int64)
    return found


def hint_code(hints: Hints) -> int:
    """What a client said of its turn, in four bits."""
    if hints.ended is None and hints.turn is None:
        return 0
    ended = 0 if hints.ended is None else 1 + list(Ended).index(hints.ended)
    turn = 0 if hints.turn is None else 1 + list(Turn).index(hints.turn)
    return 1 + 3 * ended + turn


def field(codes: Codes, which: Field) -> Ints:
    """One number of each code."""
    found: Ints = (codes >> np.uint64(4 * which) & np.uint64(15)).astype(np.int64)
    return found


def number_in(code: int, which: Field) -> int:
    """One number of one code."""
    return code >> 4 * which & 15


def request_code(values: dict[Field, int]) -> int:
    """The part of the code that all pages of a request share."""
    code = 0
    for which, value in values.items():
        code |= value << 4 * which
    return code


def page_codes(
    *, uses: npt.NDArray[np.uint8], gaps: Ints, first: int, known: int, end: int, children: npt.NDArray[Any], base_uses: int, shared: int
) -> Codes:
    """The codes of the pages of a path from `first` on, of which those before `known` were known; `shared` is what all have of the request.

    `end` is how many pages the request has. `gaps` are octaves, of the first of these pages: of those that are used again.
    """
    last = first + len(uses)
    found: Codes = _USES_CODES.take(uses)
    found |= _CHILDREN_CODES.take(children, mode="clip")
    found |= _run(_DEPTH_CODES, first, last)
    found |= _run(_FROM_END_CODES, end - last, end - first)[::-1]
    found |= np.uint64(shared | base_uses << 4 * Field.BASE_USES)
    if len(gaps):
        found[: len(gaps)] |= _GAP_CODES.take(gaps)
    found[max(known - first, 0) :] |= _NEW
    return found


def lone_codes(
    *,
    uses: npt.NDArray[np.uint8],
    gaps: Ints,
    children: npt.NDArray[Any],
    turns: Ints,
    was_end: Ints,
    base_uses: Ints,
    rhythms: Ints,
    hint: int,
) -> Codes:
    """As `page_codes`, of pages that are each a path and a request of their own: first those that were known, of which all but `uses` and
    `children` speak, then new ones.
    """
    found: Codes = _USES_CODES.take(uses)
    found |= _CHILDREN_CODES.take(children, mode="clip")
    found |= np.uint64(request_code({Field.PAGES: octave(1), Field.HINT: hint}))
    back = found[: len(gaps)]
    back |= _GAP_CODES.take(gaps)
    back |= np.uint64(request_code({Field.KNOWN_PAGES: octave(1)}))
    back |= _placed(gaps, Field.REQUEST_GAP)
    back |= _placed(_LOW_OCTAVES.take(turns), Field.TURNS)
    back |= _placed(was_end, Field.WAS_END)
    back |= _placed(_LOW_OCTAVES.take(base_uses), Field.BASE_USES)
    back |= _placed(rhythms, Field.RHYTHM)
    found[len(gaps) :] |= _NEW | np.uint64(request_code({Field.NEW_PAGES: octave(1)}))
    return found


def _run(table: Codes, first: int, last: int) -> Codes:
    """What a table has for consecutive numbers; for those beyond its end what it has for its last."""
    return table[first:last] if last <= len(table) else table.take(np.arange(first, last), mode="clip")
