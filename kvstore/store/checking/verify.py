"""What a check of a store finds, in values: damage, what it costs, and a report. Pure: no I/O, nothing is changed.

`stopped.py` and `running.py` do the looking.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvstore.radix.pages import GHOST, Slots
from kvstore.radix.tables import ROOT
from kvstore.store.space import Space
from kvstore.tiers.text import RecipeFile

MAX_DAMAGE = 1000
"""Damage beyond this many is counted, not listed."""

DamageKind = Literal["structure", "namespace", "record", "tree", "blob", "recipe"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong. `namespace` is an id, empty if none is concerned."""

    kind: DamageKind
    namespace: str
    what: str


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """How far a check is, in bytes of stored blobs."""

    namespace: str
    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class NamespaceChecked:
    """A namespace as it was found. `lost_pages` can't be served any more; `lost_keys` names the first of them."""

    id: str
    name: str
    pages: int
    blobs: int
    lost_pages: int = 0
    lost_keys: list[str] = field(default_factory=list)
    recipes: int = 0
    lost_recipes: int = 0


@dataclass(slots=True)
class CheckReport:
    """The outcome of a check. `more_damage` was found beyond what is listed; notes are no damage.

    `unnamed_lost_pages` are lost with records of namespaces; without `all_read`, something could not be read to its end, and it is not
    known how much more is lost.
    """

    clean: bool = True
    namespaces: list[NamespaceChecked] = field(default_factory=list)
    checked_blobs: int = 0
    checked_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    more_damage: int = 0
    notes: list[str] = field(default_factory=list)
    unnamed_lost_pages: int = 0
    all_read: bool = True
    seconds: float = 0.0

    def add(self, kind: DamageKind, namespace: str, what: str) -> None:
        """Note damage."""
        self.clean = False
        if len(self.damage) < MAX_DAMAGE:
            self.damage.append(Damage(kind, namespace, what))
        else:
            self.more_damage += 1

    @property
    def lost_pages(self) -> int:
        """Pages that can't be served any more."""
        return sum(n.lost_pages for n in self.namespaces) + self.unnamed_lost_pages


def lost_slots(space: Space, rows: Iterable[int]) -> Slots:
    """The slots of the pages that go if the blobs in these rows are gone: those that need one, and all below them.

    A page that loses an optional component stays: it only can't be a boundary.
    """
    tree, nodes = space.tree, space.tree.nodes
    live = tree.live_slots()
    parts = tree.parts_of(live)
    hit = np.isin(parts.blob, np.fromiter(rows, np.int64)) & ((tree.rules.required >> parts.component & 1) != 0)
    bad = np.zeros(tree.pages.ranges.high, np.bool_)
    bad[live[parts.page[hit]]] = True
    lost: set[int] = set()
    found: list[Slots] = []
    for node in nodes.subtree(ROOT)[1:]:  # parents first
        start, count = nodes.start[node], nodes.count[node]
        hits = np.flatnonzero(bad[start : start + count])
        if nodes.parent[node] in lost:
            first = 0
        elif len(hits):
            first = int(hits[0])
        else:
            continue
        lost.add(node)
        slots = np.arange(start + first, start + count, dtype=np.int32)
        found.append(slots[(tree.pages.flags[slots] & GHOST) == 0])
    return np.concatenate(found) if found else np.empty(0, np.int32)


def note_losses(space: Space, checked: NamespaceChecked, rows: Iterable[int]) -> None:
    """Write down which pages are lost with the blobs in these rows."""
    slots = lost_slots(space, rows)
    checked.lost_pages += len(slots)
    checked.lost_keys += [space.tree.pages.key_bytes(int(slot)).hex() for slot in slots[: max(0, 20 - len(checked.lost_keys))]]


def check_recipes(report: CheckReport, recipes: RecipeFile, space: Space, checked: NamespaceChecked) -> None:
    """Verify the recipes of a namespace. Blocking."""
    after = None
    while True:
        count, bad, after = recipes.scan(space.number, space.digest, after)
        checked.recipes += count
        checked.lost_recipes += len(bad)
        for key in bad:
            report.add("recipe", space.id, f"the recipe of page {key.hex()[:16]}… does not verify: once gone, it can't be computed again")
        if after is None:
            return


def needed_by(space: Space, rows: Iterable[int]) -> dict[int, str]:
    """Which pages need the blobs in these rows, in words."""
    live = space.tree.live_slots()
    parts = space.tree.parts_of(live)
    texts: dict[int, str] = {}
    for row in rows:
        mine = parts.blob == row
        slots = live[np.unique(parts.page[mine])]
        if not len(slots):
            texts[row] = "no page needs it"
            continue
        first = int(slots[0])
        key = space.tree.pages.key_bytes(first).hex()
        more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
        kind = space.spec.components[int(parts.component[mine][0])].kind
        texts[row] = f"it holds the {kind} component of page {space.tree.path_to(first).pages - 1} of its prefix (key {key[:16]}…){more}"
    return texts
