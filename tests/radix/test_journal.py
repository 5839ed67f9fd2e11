"""The journal on real LMDB: what is written comes back, and whatever was changed on disk is dropped with its subtree."""

from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.kvspec import PartRange
from kvstore.radix.check import check
from kvstore.radix.journal import Journal, JournalBatch, NamespaceRecord, PageRecord, PartRecord, encode_page
from kvstore.radix.load_plan import LoadPlan, plan_load
from kvstore.radix.loading import TreeLoad
from kvstore.radix.tree import RadixTree
from tests.radix.test_tree import PAGE_TOKENS, RANGES, ROOT_KEY, Labels, encode, keys_of

LABEL_BYTES = PAGE_TOKENS * 4 + 32
NUMBER = 7


def records(labels: Labels, *, with_labels: bool, version: bytes = b"v" * 16) -> list[PageRecord]:
    keys = keys_of(labels)
    tokens, extras = encode(labels)
    width = PAGE_TOKENS * 4
    parts = tuple(PartRecord(r, bytes([i]) * 16, 100) for i, r in enumerate(RANGES))
    labels_of = [tokens[i * width : (i + 1) * width] + extras.get(i, bytes(32)) for i in range(len(keys))]
    return [
        PageRecord(
            key=key, parent=keys[i - 1] if i else ROOT_KEY, depth=i, version=version, parent_version=version if i else bytes(16),
            created_ms=1, retain=i, parts=parts, label=labels_of[i] if with_labels else None,
        )
        for i, key in enumerate(keys)
    ]  # fmt: skip


def write(journal: Journal, found: list[PageRecord]) -> None:
    journal.commit(JournalBatch(put_pages=[(NUMBER, r.key, encode_page(ROOT_KEY, r)) for r in found]))


def load(journal: Journal) -> tuple[RadixTree, LoadPlan, list[bytes]]:
    groups, bad = journal.load(NUMBER, ROOT_KEY, LABEL_BYTES)
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    plan = plan_load(groups, ROOT_KEY, 10_000, 40_000)
    loading = TreeLoad(tree, plan, np.zeros(len(plan.parts), np.int32))
    while loading.step():
        pass
    check(tree, compressed=not plan.orphans)
    return tree, plan, bad


CONTEXTS: list[Labels] = [
    tuple((i, False) for i in range(30)),
    tuple((i, i == 5) for i in range(10)),
    (*((i, False) for i in range(20)), *((100 + i, False) for i in range(5))),
    tuple((50 + i, False) for i in range(3)),
]


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_tree_comes_back(tmp_path: Path, with_labels: bool) -> None:
    journal = Journal(tmp_path, 64 << 20)
    for context in CONTEXTS:
        write(journal, records(context, with_labels=with_labels))
    tree, result, bad = load(journal)
    assert not bad
    assert not result.orphans
    assert result.pages == tree.page_count == len({key for c in CONTEXTS for key in keys_of(c)})
    for context in CONTEXTS:
        path = tree.match(*encode(context))
        assert path.pages == len(context)
        assert tree.open_path(path, *encode(context)).pages == len(context)
    check(tree)
    journal.close()


def test_what_hangs_from_nothing_is_named_an_orphan(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 64 << 20)
    chain = records(CONTEXTS[0], with_labels=True)
    write(journal, chain[:10] + chain[11:])
    other_version = records(CONTEXTS[3], with_labels=True)
    write(journal, [other_version[0], *records(CONTEXTS[3], with_labels=True, version=b"w" * 16)[1:]])
    tree, result, _ = load(journal)
    assert tree.match(*encode(CONTEXTS[0])).pages == 10
    assert tree.match(*encode(CONTEXTS[3])).pages == 1, "a page computed on another version of its parent was accepted"
    assert set(result.orphans) == {r.key for r in chain[11:]} | set(keys_of(CONTEXTS[3])[1:])
    journal.close()


@pytest.mark.parametrize("with_labels", [True, False])
def test_any_flipped_bit_of_a_record_costs_a_subtree_and_nothing_more(tmp_path: Path, with_labels: bool) -> None:
    journal = Journal(tmp_path, 64 << 20)
    chain = records(CONTEXTS[1], with_labels=with_labels)
    rng = np.random.default_rng(5)
    for _ in range(150):
        write(journal, chain)
        victim = int(rng.integers(len(chain)))
        record = bytearray(encode_page(ROOT_KEY, chain[victim]))
        bit = int(rng.integers(len(record) * 8))
        record[bit // 8] ^= 1 << bit % 8
        journal.commit(JournalBatch(put_pages=[(NUMBER, chain[victim].key, bytes(record))]))
        tree, result, bad = load(journal)
        assert bad == [chain[victim].key]
        assert tree.page_count == tree.match(*encode(CONTEXTS[1])).pages == victim
        assert len(result.orphans) == len(chain) - victim - 1
    journal.close()


def test_namespaces_come_back_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 64 << 20)
    kept = NamespaceRecord(3, b"d" * 32, {"tenant": "t", "name": "n"})
    journal.put_namespace(kept)
    journal.put_namespace(NamespaceRecord(4, b"e" * 32, {"tenant": "t", "name": "m"}))
    journal.close()
    with lmdb.open(str(tmp_path), map_size=64 << 20) as env, env.begin(write=True) as txn:
        key = b"N" + (4).to_bytes(4, "big")
        value = bytearray(txn.get(key) or b"")
        value[10] ^= 1
        txn.put(key, bytes(value))
    journal = Journal(tmp_path, 64 << 20)
    assert journal.namespaces() == ([kept], [4])
    journal.drop_namespace(4)
    assert journal.namespaces() == ([kept], [])
    journal.close()


def test_part_geometry_survives(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 64 << 20)
    write(journal, records(CONTEXTS[3], with_labels=True))
    tree, _, _ = load(journal)
    parts = tree.parts_of(tree.live_slots())
    rows = sorted((int(c), *(int(x) for x in r)) for c, r in zip(parts.component, parts.ranges, strict=True))
    assert rows == sorted([(r.component, r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in RANGES] * 3)
    assert PartRange(*rows[0]) in RANGES
    journal.close()


def test_a_write_that_meets_damage_has_the_file_salvaged_at_the_next_opening(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder, 64 << 20)
    for context in CONTEXTS:
        write(journal, records(context, with_labels=True))
    journal.close()
    file = folder / "data.mdb"
    file.write_bytes(file.read_bytes()[:8192].ljust(file.stat().st_size, b"\0"))  # all but the two meta pages
    journal = Journal(folder, 64 << 20)
    with pytest.raises(lmdb.Error):
        write(journal, records(CONTEXTS[0], with_labels=True))
    journal.close()
    journal = Journal(folder, 64 << 20)
    write(journal, records(CONTEXTS[0], with_labels=True))
    assert load(journal)[1].pages == len(CONTEXTS[0])
    journal.close()


def test_keys_out_of_order_are_noticed_and_not_walked_for_ever(tmp_path: Path) -> None:
    """A flipped bit in a key: LMDB goes on behind it, and finds keys that are before where it was asked to go on."""
    noticed = 0
    for count in range(20, 60):  # some fill their leaf exactly, so that the damaged key is the first of the next
        folder = tmp_path / str(count)
        journal = Journal(folder, 1 << 22)
        for number, pages in ((1, count), (2, 100)):
            journal.commit(JournalBatch(put_pages=[(number, bytes([i]) * 32, b"v" * 100) for i in range(pages)]))
        assert journal.page_numbers() == [1, 2]
        journal.close()
        data = (folder / "data.mdb").read_bytes()
        first, lower = (b"P" + number.to_bytes(4, "big") + bytes(32) + b"vv" for number in (2, 1))  # with its value: not in a branch
        (folder / "data.mdb").write_bytes(data.replace(first, lower))
        damaged = Journal(folder, readonly=True)
        try:
            assert damaged.page_numbers() == [1, 2]
        except lmdb.CorruptedError:
            noticed += 1
        damaged.close()
    assert noticed
