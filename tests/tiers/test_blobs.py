"""Many blobs are found as each of them is."""

import numpy as np

from kvstore.kvspec import SliceLayout
from kvstore.tiers.blobs import BlobTable


def test_many_are_found_as_one_is() -> None:
    table = BlobTable(1 << 10)
    ids = [row.tobytes() for row in np.random.default_rng(1).integers(0, 256, (300, 16), dtype=np.uint8)]
    ids += [ids[0][:8] + bytes(8), ids[0][:8] + bytes([1] * 8)]  # that share what the index looks at
    rows = [table.add(blob, SliceLayout((1 + number % 3,))) for number, blob in enumerate(ids)]
    absent = [bytes(16), ids[0][:8] + bytes([2] * 8)]
    asked = [*reversed(ids), *absent, ids[0], ids[0]]
    assert table.find_many(asked) == [table.find(blob) for blob in asked] == [*reversed(rows), -1, -1, rows[0], rows[0]]
    assert [layout.sizes[0] for layout in table.layouts_of(rows)] == [1 + number % 3 for number in range(len(ids))]
