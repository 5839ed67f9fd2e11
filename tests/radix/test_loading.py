"""Trees built from journal records in bulk: the same as if every page had been put, whatever the shape of the records."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.kvspec import PartRange
from kvstore.radix import load_plan
from kvstore.radix.check import check
from kvstore.radix.journal import Journal, JournalBatch, PageRecord, PartRecord, encode_page
from kvstore.radix.load_plan import LoadPlan, plan_load
from kvstore.radix.loading import TreeLoad
from kvstore.radix.tree import RadixTree
from tests.radix.test_tree import PAGE_TOKENS, ROOT_KEY, Labels, encode, keys_of

LABEL_BYTES = PAGE_TOKENS * 4 + 32
SHAPES = (
    (PartRange(0, 0, 4, 0, 2),),
    (PartRange(0, 0, 2, 0, 2), PartRange(0, 2, 4, 0, 2)),
    (PartRange(1, 0, 1, 0, 1), PartRange(0, 0, 4, 0, 2)),
)


def random_contexts(rng: np.random.Generator, count: int = 40) -> list[Labels]:
    contexts: list[Labels] = [tuple((int(x), bool(x % 7 == 0)) for x in rng.integers(0, 10_000, 90))]
    while len(contexts) < count:
        base = contexts[int(rng.integers(len(contexts)))]
        tail = tuple((int(x), bool(x % 7 == 0)) for x in rng.integers(0, 10_000, int(rng.integers(1, 30))))
        contexts.append((*base[: int(rng.integers(0, len(base)))], *tail))
    return contexts


def records_of(contexts: list[Labels], rng: np.random.Generator, labelled: str) -> dict[bytes, PageRecord]:
    """A record a page, with a version, parts and (all, none, or those of the first half of the contexts) a label of its own."""
    found: dict[bytes, PageRecord] = {}
    width = PAGE_TOKENS * 4
    for number, context in enumerate(contexts):
        tokens, extras = encode(context)
        version = bytes([number % 3]) * 16
        parent: PageRecord | None = None
        for depth, key in enumerate(keys_of(context)):
            if key not in found:
                label = tokens[depth * width : (depth + 1) * width] + extras.get(depth, bytes(32))
                parts = tuple(PartRecord(r, rng.bytes(16), 100) for r in SHAPES[int(rng.integers(3))])
                found[key] = PageRecord(
                    key, parent.key if parent else ROOT_KEY, depth, version, parent.version if parent else bytes(16), 1,
                    int(rng.integers(1000)), parts, label if labelled == "all" or (labelled == "some" and number < 20) else None,
                )  # fmt: skip
            parent = found[key]
    return found


def plan_of(path: Path, records: dict[bytes, PageRecord], max_pages: int = 10_000, max_parts: int = 40_000) -> LoadPlan:
    journal = Journal(path, 64 << 20)
    journal.commit(JournalBatch(put_pages=[(1, r.key, encode_page(ROOT_KEY, r)) for r in records.values()]))
    batches = [journal.scan(1, ROOT_KEY, LABEL_BYTES, None, 100)]
    while batches[-1].resume is not None:
        batches.append(journal.scan(1, ROOT_KEY, LABEL_BYTES, batches[-1].resume, 100))
    journal.close()
    assert not any(batch.bad for batch in batches)
    return plan_load([g for batch in batches for g in batch.groups], ROOT_KEY, max_pages, max_parts)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_STEP_COST", 40)
    monkeypatch.setattr(load_plan, "PIECE_PAGES", 25)


@pytest.mark.parametrize("labelled", ["all", "none", "some"])
@pytest.mark.parametrize("seed", range(4))
def test_any_forest_comes_back_whole(tmp_path: Path, labelled: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = random_contexts(rng)
    records = records_of(contexts, rng, labelled)
    plan = plan_of(tmp_path, records)
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    load = TreeLoad(tree, plan, np.arange(len(plan.parts), dtype=np.int32))
    while load.step():
        check(tree, compressed=False)
        for context in contexts[:5]:  # what is there already is found, and opening it splits nodes under the loader's hands
            path = tree.match(*encode(context))
            tree.open_path(path, *encode(context))
    check(tree)
    assert not plan.orphans
    assert not load.lost
    assert tree.page_count == len(records)
    assert all(tree.match(*encode(context)).pages == len(context) for context in contexts)
    blobs = np.ascontiguousarray(plan.parts["blob"]).view(np.uint8).reshape(-1, 16)
    for key, record in records.items():
        slot = tree.pages.find_key(key)
        assert tree.version_of(slot) == record.version
        parts = tree.parts_of(np.array([slot], np.int32))
        rows = [(int(c), *(int(x) for x in r)) for c, r in zip(parts.component, parts.ranges, strict=True)]
        assert [PartRange(*row) for row in rows] == [p.range for p in record.parts]
        assert [blobs[b].tobytes() for b in parts.blob.tolist()] == [p.blob for p in record.parts]


def test_a_page_is_kept_as_long_as_those_below_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    records = records_of(random_contexts(rng), rng, "all")
    plan = plan_of(tmp_path, records)
    expected = {key: r.retain for key, r in records.items()}
    for record in sorted(records.values(), key=lambda r: -r.depth):
        if record.depth:
            expected[record.parent] = max(expected[record.parent], expected[record.key])
    assert {k.tobytes(): int(r) for k, r in zip(plan.keys, plan.retain, strict=True)} == expected


def test_what_does_not_fit_is_left_out_without_its_parents_missing(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    records = records_of(random_contexts(rng), rng, "all")
    plan = plan_of(tmp_path, records, max_pages=100)
    assert (plan.pages, plan.left_out, plan.orphans) == (100, len(records) - 100, [])
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 100)
    load = TreeLoad(tree, plan, np.zeros(len(plan.parts), np.int32))
    while load.step():
        pass
    check(tree, compressed=False)
    assert tree.page_count == 100
    assert plan_of(tmp_path, records, max_parts=50).part_start[-1] <= 50


@pytest.mark.parametrize("seed", range(6))
def test_pages_lost_meanwhile_take_what_hangs_from_them_with_them(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = random_contexts(rng)
    records = records_of(contexts, rng, "none")
    plan = plan_of(tmp_path, records)
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    load = TreeLoad(tree, plan, np.zeros(len(plan.parts), np.int32))
    removed: set[bytes] = set()
    for _ in range(3):
        load.step()
        if not tree.page_count:
            continue  # the first page itself was the victim
        victim = int(rng.choice(tree.live_slots()))
        removed.add(tree.pages.key_bytes(victim))
        tree.remove(victim)
        check(tree, compressed=False)
    while load.step():
        check(tree, compressed=False)
    gone = set(removed)
    for record in sorted(records.values(), key=lambda r: r.depth):
        if record.parent in gone:
            gone.add(record.key)
    assert {tree.pages.key_bytes(s) for s in tree.live_slots().tolist()} == set(records) - gone
    assert {plan.keys[at].tobytes() for at in load.lost} <= gone


def test_orphans_are_named_with_all_below_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    contexts = random_contexts(rng)
    records = records_of(contexts, rng, "all")
    keys = keys_of(contexts[0])
    del records[keys[10]]
    records[keys[50]] = replace(records[keys[50]], parent_version=b"x" * 16)
    plan = plan_of(tmp_path, records)
    below = set()
    for record in sorted(records.values(), key=lambda r: r.depth):
        if record.parent == keys[10] or record.key == keys[50] or record.parent in below:
            below.add(record.key)
    assert set(plan.orphans) == below
    assert {k.tobytes() for k in plan.keys} == set(records) - below


def test_a_long_run_becomes_one_node(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    context: Labels = tuple((int(x), False) for x in rng.integers(0, 10_000, 3000))
    plan = plan_of(tmp_path, records_of([context], rng, "all"))
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    load = TreeLoad(tree, plan, np.zeros(len(plan.parts), np.int32))
    while load.step():
        pass
    check(tree)
    assert len(tree.match(*encode(context)).nodes) == 1
