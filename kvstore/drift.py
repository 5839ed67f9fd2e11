"""How far two computations of the same state lie apart: largest and mean absolute difference of their elements, by dtype. Pure.

float64, float32 and float16 are numpy's own; bfloat16 is the upper half of a float32; the two 8-bit floats are looked up in
a table of their 256 values (OCP 8-bit floating point, 2023). Integers are compared as the numbers they are: what a
quantised 1 stands for is in scales that the store does not know.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.kvspec import DTYPE_BYTES

SAMPLE_ELEMENTS = 64
"""Elements of a part that are kept with its recipe, so that drift can be told once the part itself is gone."""
_CHUNK = 1 << 18
_NUMPY = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<u2", "f8e4m3": "u1", "f8e5m2": "u1", "i8": "i1", "u8": "u1"}

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Drift:
    """Of `elements` compared, `differing` were not the same bits; `not_finite` of these were no numbers, and are in no figure."""

    elements: int = 0
    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference over all elements that are numbers."""
        counted = self.elements - self.not_finite
        return self.sum_abs / counted if counted else 0.0

    def add(self, other: "Drift") -> None:
        """Take in what was measured elsewhere."""
        self.elements += other.elements
        self.differing += other.differing
        self.not_finite += other.not_finite
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sum_abs += other.sum_abs


def measure(dtype: str, old: Any, new: Any) -> Drift:
    """The drift between two buffers of as many elements of a dtype."""
    drift, width = Drift(), DTYPE_BYTES[dtype]
    before, after = (np.frombuffer(memoryview(data).cast("B"), f"<u{width}") for data in (old, new))
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} elements can't be compared")
    for at in range(0, len(before), _CHUNK):
        one, other = before[at : at + _CHUNK], after[at : at + _CHUNK]
        drift.elements += len(one)
        unequal = one != other
        if not unequal.any():
            continue
        drift.differing += int(np.count_nonzero(unequal))
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(_numbers(dtype, one[unequal]) - _numbers(dtype, other[unequal]))
        finite = distance[np.isfinite(distance)]
        drift.not_finite += len(distance) - len(finite)
        if len(finite):
            drift.max_abs = max(drift.max_abs, float(finite.max()))
            drift.sum_abs += float(finite.sum())
    return drift


def sample(dtype: str, payload: memoryview) -> bytes:
    """Some elements of a part, spread evenly over it: the same places for every payload of this size."""
    elements = np.frombuffer(payload, f"<u{DTYPE_BYTES[dtype]}")
    stride = max(1, len(elements) // SAMPLE_ELEMENTS)
    return elements[stride // 2 :: stride][:SAMPLE_ELEMENTS].tobytes()


def _numbers(dtype: str, raw: npt.NDArray[Any]) -> Floats:
    raw = np.ascontiguousarray(raw)
    if dtype == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in ("f8e4m3", "f8e5m2"):
        looked_up: Floats = _table(dtype)[raw]
        return looked_up
    return raw.view(_NUMPY[dtype]).astype(np.float64)


@cache
def _table(dtype: str) -> Floats:
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "f8e4m3" else (5, 2, 15)
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if dtype == "f8e4m3":  # no infinities, and one pattern that is no number
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        value[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.where(code & 0x80, -value, value)
