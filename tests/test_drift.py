"""Drift between two computations: figures against plain arithmetic, for every dtype."""

import math

import numpy as np
import pytest

from kvstore.drift import SAMPLE_ELEMENTS, Drift, measure, sample
from kvstore.kvspec import DTYPE_BYTES

VALUES = np.array([0.0, 1.0, -2.5, 3.0, 100.0], np.float32)
OTHERS = np.array([0.0, 1.5, -2.5, 2.0, 96.0], np.float32)


def raw(values: "np.ndarray[tuple[int], np.dtype[np.float32]]", dtype: str) -> bytes:
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"f64": "<f8", "f32": "<f4", "f16": "<f2"}[dtype]).tobytes()


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_floats(dtype: str) -> None:
    found = measure(dtype, raw(VALUES, dtype), raw(OTHERS, dtype))
    assert (found.elements, found.differing, found.not_finite) == (5, 3, 0)
    assert found.max_abs == 4.0
    assert found.mean_abs == pytest.approx((0.5 + 1.0 + 4.0) / 5)


@pytest.mark.parametrize(("dtype", "one", "other", "distance"), [
    ("f8e4m3", 0x38, 0x39, 0.125),  # 1.0 and 1.125
    ("f8e4m3", 0x7E, 0xFE, 896.0),  # 448 and -448, the largest
    ("f8e4m3", 0x01, 0x00, 2.0**-9),  # the least above 0
    ("f8e5m2", 0x3C, 0x3D, 0.25),  # 1.0 and 1.25
    ("f8e5m2", 0x7B, 0xFB, 114688.0),
    ("f8e5m2", 0x01, 0x81, 2.0**-15),
    ("i8", 0xFF, 0x01, 2.0),  # -1 and 1
    ("u8", 0xFF, 0x01, 254.0),
])  # fmt: skip
def test_bytes(dtype: str, one: int, other: int, distance: float) -> None:
    assert measure(dtype, bytes([one]), bytes([other])).max_abs == distance


@pytest.mark.parametrize(("dtype", "odd"), [("f8e4m3", 0x7F), ("f8e5m2", 0x7C), ("f8e5m2", 0x7E)])
def test_what_is_no_number_is_counted_apart(dtype: str, odd: int) -> None:
    found = measure(dtype, bytes([odd, 0, odd]), bytes([0, 0, odd]))
    assert (found.elements, found.differing, found.not_finite, found.max_abs) == (3, 1, 1, 0.0)
    nan = np.array([math.nan, 1], np.float32).tobytes()
    assert measure("f32", nan, np.array([1, 1], np.float32).tobytes()).not_finite == 1
    assert measure("f32", nan, nan) == Drift(2)


def test_large_ones_are_cut_and_sums_add_up() -> None:
    old = np.zeros(600_000, np.float32)
    new = np.full(600_000, 0.5, np.float32)
    found = measure("f32", old, new)
    assert (found.elements, found.max_abs, found.mean_abs) == (600_000, 0.5, 0.5)
    found.add(Drift(600_000))
    assert found.mean_abs == 0.25
    with pytest.raises(ValueError, match="can't be compared"):
        measure("f32", old[:3], new)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_samples_are_spread(dtype: str) -> None:
    width = DTYPE_BYTES[dtype]
    for count in (1, 63, 64, 100, 4096):
        payload = np.arange(count * width, dtype=np.uint64).astype(np.uint8).tobytes()
        few = sample(dtype, memoryview(payload))
        assert len(few) == width * min(count, SAMPLE_ELEMENTS) or (count == 100 and len(few) == width * 64)
        assert sample(dtype, memoryview(payload)) == few
