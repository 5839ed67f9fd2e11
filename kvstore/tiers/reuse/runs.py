"""Equal values in a row: along a path there are few different ones, so that what is made of them is asked once for each run. Pure."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import runs_of

MANY = 256
"""Of fewer values it costs more to look for runs than it saves."""

_Array = npt.NDArray[Any]


def by_runs(function: Callable[..., _Array], *columns: _Array) -> _Array:
    """What `function` makes of each row of some columns."""
    if len(columns[0]) < MANY:
        return function(*columns)
    starts, lengths = runs_of(*columns)
    return np.repeat(function(*(column.take(starts) for column in columns)), lengths)


def grouped(values: _Array) -> tuple[npt.NDArray[np.int64], _Array, npt.NDArray[np.int64]]:
    """Runs of equal values: how long they are; the different values, ascending; and which of them each run has."""
    starts, lengths = runs_of(values)
    heads = values[starts]
    order = np.argsort(heads, kind="stable")
    heads = heads[order]
    first = np.append(True, heads[1:] != heads[:-1])
    which = np.empty(len(heads), np.int64)
    which[order] = np.cumsum(first) - 1
    return lengths, heads[first], which
