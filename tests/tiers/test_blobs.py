"""Many blobs are found as each of them is."""

import numpy as np
import pytest

from kvstore.errors import NoSpace
from kvstore.kvspec import SliceLayout
from kvstore.tiers.blobs import NO_SLOT, BlobTable


def test_many_are_found_as_one_is() -> None:
    table = BlobTable(1 << 10)
    ids = [row.tobytes() for row in np.random.default_rng(1).integers(0, 256, (300, 16), dtype=np.uint8)]
    ids += [ids[0][:8] + bytes(8), ids[0][:8] + bytes([1] * 8)]  # that share what the index looks at
    rows = [table.add(blob, SliceLayout((1 + number % 3,))) for number, blob in enumerate(ids)]
    absent = [bytes(16), ids[0][:8] + bytes([2] * 8)]
    asked = [*reversed(ids), *absent, ids[0], ids[0]]
    assert table.find_many(b"".join(asked)).tolist() == [table.find(blob) for blob in asked] == [*reversed(rows), -1, -1, rows[0], rows[0]]
    assert [layout.sizes[0] for layout in table.layouts_of(rows)] == [1 + number % 3 for number in range(len(ids))]


def test_many_are_added_as_one_by_one_are_into_rows_that_were_others() -> None:
    names = [bytes([n]) * 8 + bytes(7) + bytes([n % 3]) for n in range(60)]
    layouts = [SliceLayout((4096,) * (1 + n % 2)) for n in range(60)]
    many, single = BlobTable(64), BlobTable(64)
    for table in (many, single):
        for n in range(20):
            table.add(names[n], layouts[n])
        for row in (3, 7, 11):
            table.pins[row] = 9
            table.pins[row] = 0
            table.remove(row)
    rows = many.add_many(names[20:], layouts[20:]).tolist()
    one_by_one = [single.add(name, layout) for name, layout in zip(names[20:], layouts[20:], strict=True)]
    assert sorted(rows) == sorted(one_by_one)
    for n, row in zip(range(20, 60), rows, strict=True):
        assert many.find(names[n]) == row
        assert many.id_of(row) == names[n]
        assert many.layout_of(row) == layouts[n]
        assert (many.pages[row], many.durable_pages[row], many.pins[row], many.slot[row], many.on_ssd[row]) == (0, 0, 0, NO_SLOT, False)
    assert many.find_many(names[5] + names[30] + names[59]).tolist() == [many.find(names[5]), many.find(names[30]), many.find(names[59])]
    assert many.find_many(b"n" * 16 + b"m" * 16).tolist() == [-1, -1]
    with pytest.raises(NoSpace):
        many.add_many([bytes([n]) * 16 for n in range(100, 120)], layouts[:20])
    assert many.count == 57, "some of what does not fit was added"


def test_neighbours_are_found_by_one_look_and_only_while_they_are_there() -> None:
    table = BlobTable(1 << 10)
    ids = [bytes([number]) * 16 for number in range(1, 9)]
    layout = SliceLayout((64,))
    rows = [table.add(blob, layout) for blob in ids]
    table.slot[rows] = rows
    assert table.find_many(b"".join(ids[2:6])).tolist() == rows[2:6]
    assert table.find_many(b"".join(ids) + bytes(16)).tolist() == [*rows, -1], "behind the last row there is no blob of zeros"
    table.slot[rows[3]] = NO_SLOT
    assert table.find_many(b"".join(ids)).tolist() == rows, "one that is not in DRAM is looked up"
    table.remove(rows[3])
    assert table.find_many(b"".join(ids)).tolist() == [*rows[:3], -1, *rows[4:]], "a row that was given back has its id still"
    assert table.common_layout(table.find_many(b"".join(ids[:3]))) is layout
    rows.append(table.add(bytes(15) + b"x", SliceLayout((32, 32))))
    assert table.common_layout(np.array([rows[0], rows[-1]], np.int32)) is None
    assert table.find_many(b"").tolist() == []


def test_few_are_found_as_many_are() -> None:
    table = BlobTable(100)
    names = [bytes([number]) * 16 for number in range(30)]
    rows = [table.add(name, SliceLayout((1,))) for name in names[:20]]
    assert table.find_each([]) == []
    assert table.find_each(names[18:23]) == [*rows[18:20], -1, -1, -1]
    assert table.find_each(names) == [*rows, *[-1] * 10]
