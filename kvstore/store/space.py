"""A namespace at run time: its tree and its blob table, kept consistent with each other and with the tiers.

Everything here is bookkeeping on the loop's thread: no await, no I/O. What has to be deleted on disk is queued in `Trash`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.kvspec import PartRange
from kvstore.radix.below import with_all_below
from kvstore.radix.components import ComponentRules
from kvstore.radix.journal import NamespaceRecord, PageRecord, PartRecord
from kvstore.radix.pages import DURABLE, GHOST, RECIPE, Slots
from kvstore.radix.tree import Extras, RadixTree
from kvstore.radix.usefulness import useless_parts
from kvstore.radix.values import EMPTY_PATH, NewPages, Path, Removed
from kvstore.store.session_ends import SessionEnds
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space_blobs import SpaceBlobs
from kvstore.store.stats import Stats
from kvstore.store.trash import Trash
from kvstore.store.watchers import Nobody, TextTier, Watcher
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena

WANTED = 2
"""Page flag: part of a batch being put together, so not to be evicted from SSD to make room for it."""
ALL = 0xFFFF
"""The mask of all components."""


class Space(SpaceBlobs):
    """One namespace. `number` is its short name on this daemon's disk."""

    def __init__(
        self, number: int, settings: NamespaceSettings, max_pages: int, arena: Arena, trash: Trash, stats: Stats, max_ghosts: int = 0,
        watcher: Watcher | None = None,
    ) -> None:  # fmt: skip
        super().__init__(number, 2 * max_pages, arena, trash)
        self.settings = settings
        self.spec = settings.spec
        self.digest = settings.digest
        self.id = self.digest[:16].hex()
        self.max_ghosts = max_ghosts
        self._watcher = watcher or Nobody()
        self.tree = RadixTree(self.digest, self.spec.label_words, max_pages, ComponentRules.of(self.spec), self._watcher.specs)
        self.dropped = False
        self.loading = False
        """Whether pages are still being read from the journal; then it takes no puts, and nothing of it leaves SSD."""
        self.incomplete = False
        """Whether the journal holds pages that are not in the tree."""
        self._lost_while_loading: set[int] = set()
        self.end_holds: Callable[[Space, int], None]
        """Set by the store: shorten the leases, and end the puts, that hold the page in a slot or one below it."""
        self.ends = SessionEnds()
        """Where its sessions were last."""
        self.seen_by_policies: dict[int, Mapping[str, npt.NDArray[Any]]] = {}
        """By tier, the columns of its pages that the tier's policy looks at."""
        self.keeps_all = settings.rebuild == "never"
        """Whether nothing may be discarded."""
        self.guarded = settings.recipes and not settings.lossy
        """Whether pages may be discarded only once their recipes are durable."""
        self.text: TextTier | None = None
        """Set by the store if pages have recipes."""
        self.stats = stats

    def record(self) -> NamespaceRecord:
        """The journal's record of this namespace."""
        return NamespaceRecord(self.number, self.digest, self.settings.to_dict())

    # --- pages ---------------------------------------------------------------------------------------------------------

    def rows_of(self, slot: int, components: int = ALL) -> list[int]:
        """The blob rows of a page's parts, of some components (a mask)."""
        parts = self.tree.parts_of(np.array([slot], np.int32))
        rows: list[int] = parts.blob[(np.left_shift(1, parts.component.astype(np.int64)) & components) != 0].tolist()
        return rows

    def in_dram(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which pages have any of their bytes in DRAM."""
        owner, part = self.tree.parts.of(self.tree.pages.part[slots])
        found = np.zeros(len(slots), np.bool_)
        found[owner[self.blobs.slot[self.tree.parts.blob[part]] != NO_SLOT]] = True
        return found

    def has_room(self, pages: int, parts: int) -> bool:
        """Whether so many pages can be added, wherever it is, with so many parts in all, each a blob of its own."""
        return self.tree.has_room(pages, parts) and self.blobs.slots.available >= parts

    def insert(self, parent: bytes, tokens: bytes, extras: Extras, new: NewPages) -> None:
        """Add pages below the page of this key, or the root (see RadixTree.extend). Ghosts make room if the table is full."""
        self.forget_ghosts(self.tree.page_count + self.tree.ghost_count + len(new.blobs) - self.tree.capacity)
        base = EMPTY_PATH if parent == self.tree.root_key else self.tree.path_to(self.tree.pages.find_key(parent))
        self.tree.extend(base, tokens, extras, new)
        self._entered(new)

    def insert_alone(self, labels: bytes, extras: Extras, new: NewPages) -> None:
        """Add pages of a flat namespace, none of which is there: all of them, or (NoSpace) none. Ghosts make room if the table is full."""
        self.forget_ghosts(self.tree.page_count + self.tree.ghost_count + len(new.blobs) - self.tree.capacity)
        self.tree.extend_alone(labels, extras, new)
        self._entered(new)

    def _entered(self, new: NewPages) -> None:
        self.needed(new.blobs)
        if self.text is not None:
            self.text.entered(self, new.keys)
        if self.follower is not None:
            self.follower.entered(new.keys, new.blobs)

    def add_parts(self, slots: Slots, blobs: Slots, ranges: tuple[PartRange, ...]) -> None:
        """Give pages optional components that they lack (see TreeStructure.add_parts)."""
        self.tree.add_parts(slots, blobs, ranges)
        self.needed(blobs)
        if self.text is not None:
            self.text.entered(self, self.tree.pages.key[slots].tobytes())

    def may_discard(self, slot: int) -> bool:
        """Whether a page, and all below it, may be given up in all tiers to make room."""
        if self.keeps_all:
            return False
        if not self.guarded:
            return True
        tree = self.tree
        node = int(tree.pages.node[slot])
        flags = tree.pages.flags[slot : tree.nodes.start[node] + tree.nodes.count[node]]
        if (flags & (RECIPE | GHOST)).all() and tree.nodes.children[node]:
            flags = tree.pages.flags[with_all_below(tree, np.array([slot], np.int32))]
        return bool((flags & (RECIPE | GHOST)).all())

    def remove_page(self, slot: int, *, ghosts: bool = True) -> int:
        """Remove a page and its subtree from the tree, and what only they needed from the tiers. Returns pages removed."""
        path = self.tree.path_to(slot)
        above = self.tree.key_at(self.tree.shorten(path, path.pages - 1))
        removed = self.tree.bury(slot)
        self._give_up(removed)
        if not (ghosts and self.max_ghosts):
            self._watcher.forgotten(self, with_all_below(self.tree, np.array([slot], np.int32)))
            self.tree.remove(slot)
        self.stats.dropped_pages += removed.pages
        if self.tree.rules.optional and (at := self.tree.pages.find_key(above)) >= 0:
            self._take_useless(self.tree.path_to(at))
        if self.tree.ghost_count > self.max_ghosts:
            self.forget_ghosts(self.tree.ghost_count - self.max_ghosts + self.max_ghosts // 16)
        return removed.pages

    def bury_alone(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Make ghosts of pages that each stand alone. Returns their blob rows, with repeats: `settle` each, as soon as may be."""
        removed = self.tree.bury_many(slots)
        self.stats.dropped_pages += removed.pages
        return self._take_from_tree(removed)

    def forget_alone(self, keys: list[bytes]) -> None:
        """Remove those of these pages, each of which stands alone, that are ghosts now."""
        for key in keys:
            slot = self.tree.pages.find_any(key)
            if slot >= 0 and self.tree.pages.flags[slot] & GHOST:
                self._watcher.forgotten(self, np.array([slot], np.int32))
                self.tree.remove(slot)

    def _give_up(self, removed: Removed) -> None:
        for row in distinct(self._take_from_tree(removed)).tolist():
            self.settle(row)

    def _take_from_tree(self, removed: Removed) -> npt.NDArray[np.int32]:
        """Pages have left the tree. Returns the blob rows that they needed, with repeats."""
        blobs = np.concatenate(removed.blobs)
        np.subtract.at(self.blobs.pages, blobs, 1)
        np.subtract.at(self.blobs.durable_pages, np.concatenate(removed.durable_blobs), 1)
        self._trash.records += [(self.number, key) for key in removed.durable_keys]
        self._watcher.buried(self, np.concatenate(removed.slots))
        return blobs

    def forget_ghosts(self, count: int) -> None:
        """Remove at least `count` ghosts for good, the coldest first, if there are so many."""
        if count > 0:
            self._watcher.forgotten(self, with_all_below(self.tree, self.tree.coldest(self.tree.ghost_slots(), count)))
            self.tree.forget_ghosts(count)

    def take_components(self, slot: int, components: int) -> None:
        """Take optional components (a mask) from a page, and what that makes useless from the pages around it."""
        self._take_parts(slot, components)
        self._take_useless(self.tree.path_to(slot))

    def _take_parts(self, slot: int, components: int) -> None:
        blobs, named = self.tree.take_components(slot, components)
        np.subtract.at(self.blobs.pages, blobs, 1)
        if named:
            self._outdate(self.tree.pages.key_bytes(slot), named)
        for row in set(blobs):
            self.settle(row)

    def _outdate(self, key: bytes, rows: list[int]) -> None:
        """The page's record names blobs that the page no longer has: they stay on SSD until it is written anew."""
        for row in rows:
            self.pin(row)
        self._trash.outdated.append((self, key, rows))

    def _take_useless(self, path: Path) -> None:
        """Drop optional parts that no boundary can use any more, now that something changed at or after the end of `path`."""
        for rule in self.tree.rules.optional if not self.loading else ():  # what is still to come may use them
            for slot in useless_parts(self.tree, rule, path):
                self.stats.useless_parts += 1
                self._take_parts(slot, rule.bit)

    def mark_durable(self, slot: int, named: list[int]) -> None:
        """Record that a page's journal record is durable, and the bytes of the blob rows that it names."""
        parts = self.tree.parts
        self.tree.pages.flags[slot] |= DURABLE
        self._watcher.written(self, slot)
        _, mine = parts.of(self.tree.pages.part[[slot]])
        fresh = mine[~parts.durable[mine] & np.isin(parts.blob[mine], named)]
        parts.durable[fresh] = True
        np.add.at(self.blobs.durable_pages, parts.blob[fresh], 1)
        gone = [row for row in named if row not in parts.blob[mine]]
        if gone:  # dropped while the record was being written
            np.add.at(self.blobs.durable_pages, gone, 1)
            self._outdate(self.tree.pages.key_bytes(slot), gone)

    def is_durable(self, slot: int) -> bool:
        """Whether the page has a durable journal record that names all its parts."""
        if not self.tree.pages.flags[slot] & DURABLE:
            return False
        if not self.tree.rules.optional:
            return True
        _, parts = self.tree.parts.of(self.tree.pages.part[[slot]])
        return bool(self.tree.parts.durable[parts].all())

    def unnamed_components(self, slot: int) -> int:
        """The components (a mask) of a page of which its durable record names no part."""
        _, parts = self.tree.parts.of(self.tree.pages.part[[slot]])
        unnamed = self.tree.parts.component[parts[~self.tree.parts.durable[parts]]]
        return int(np.bitwise_or.reduce(np.left_shift(1, unnamed.astype(np.int64)), initial=0))

    def unwritten(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which pages have something that no durable record names yet."""
        found: npt.NDArray[np.bool_] = (self.tree.pages.flags[slots] & DURABLE) == 0
        if self.tree.rules.optional:
            owner, parts = self.tree.parts.of(self.tree.pages.part[slots])
            found[owner[~self.tree.parts.durable[parts]]] = True
        return found

    def lose_blob(self, row: int) -> None:
        """A blob's bytes are gone in every tier: the pages that need it go, with their subtrees, or only lose an optional component."""
        if self.dropped:
            return
        if self.loading:
            self._lost_while_loading.add(row)
        live = self.tree.live_slots()
        owner, part = self.tree.parts.of(self.tree.pages.part[live])
        hit = self.tree.parts.blob[part] == row
        components = self.tree.parts.component[part[hit]].tolist()
        keys = [self.tree.pages.key_bytes(int(s)) for s in live[owner[hit]].tolist()]
        self.pin(row)
        for key, component in zip(keys, components, strict=True):
            slot = self.tree.pages.find_key(key)
            if slot < 0:
                continue
            if not self.tree.rules.required >> component & 1:
                self.take_components(slot, 1 << component)
                continue
            if self.tree.pages.leases[slot]:
                self.end_holds(self, slot)
            self.remove_page(self.tree.pages.find_key(key))
        self.unpin(row)

    def forget_durable(self, slot: int) -> None:
        """Give up a page's journal record, and so its bytes on SSD. A page without a DRAM copy is removed."""
        tree = self.tree
        _, parts = tree.parts.of(tree.pages.part[[slot]])
        self.stats.evicted_ssd_pages += 1
        if (self.blobs.slot[tree.parts.blob[parts]] == NO_SLOT).any():
            self.remove_page(slot)
            return
        named = parts[tree.parts.durable[parts]]
        tree.pages.flags[slot] &= ~np.uint8(DURABLE)
        self._watcher.unwritten(self, slot)
        tree.parts.durable[named] = False
        rows = tree.parts.blob[named]
        np.subtract.at(self.blobs.durable_pages, rows, 1)
        self._trash.records.append((self.number, tree.pages.key_bytes(slot)))
        for row in set(rows.tolist()):
            self.settle(row)

    def trash_marks(self) -> tuple[int, int]:
        """Where the trash ends now, for `freed_on_ssd`."""
        return len(self._trash.blobs), len(self._trash.outdated)

    def freed_on_ssd(self, blobs: int, outdated: int, footprint: Callable[[int], int]) -> int:
        """Bytes on SSD that the next commits will free, of what was thrown away since `trash_marks`."""
        freed = sum(footprint(stored) for _, _, stored in self._trash.blobs[blobs:])
        for space, _, rows in self._trash.outdated[outdated:]:
            freed += sum(footprint(space.stored_bytes(row)) for row in rows if space.blobs.durable_pages[row] == 1)
        return freed

    def mark_wanted(self, slots: Slots) -> None:
        """Protect pages from `evict_ssd` until `clear_wanted`."""
        self.tree.pages.flags[slots] |= WANTED

    def clear_wanted(self) -> None:
        """End the protection of all pages."""
        self.tree.pages.flags[: self.tree.pages.ranges.high] &= ~np.uint8(WANTED)

    # --- records -------------------------------------------------------------------------------------------------------

    def page_record(self, slot: int, now: float, *, only_named: bool = False) -> PageRecord:
        """The journal's record of a page; with `only_named`, of the parts that its present record names."""
        tree, pages = self.tree, self.tree.pages
        path = tree.path_to(slot)
        above = int(tree.path_slots(path)[-2]) if path.pages > 1 else -1
        _, parts = tree.parts.of(pages.part[[slot]])
        if only_named:
            parts = parts[tree.parts.durable[parts]]
        label = None
        if self.settings.recipes and not tree.nodes.sealed[path.nodes[-1]]:
            label = pages.tokens[slot].tobytes() + pages.extras[slot].tobytes()
        return PageRecord(
            key=pages.key_bytes(slot), parent=self.digest if above < 0 else pages.key_bytes(above), depth=path.pages - 1,
            version=tree.version_of(slot), parent_version=tree.version_of(above), created_ms=int(now * 1000),
            retain=int(pages.retain[slot]), label=label,
            parts=tuple(
                PartRecord(PartRange(int(c), *(int(x) for x in r)), self.blobs.id_of(b), self.blobs.layout_of(b).payload_bytes)
                for b, c, r in zip(tree.parts.blob[parts].tolist(), tree.parts.component[parts], tree.parts.ranges[parts], strict=True)
            ),
        )  # fmt: skip

    # --- loading -------------------------------------------------------------------------------------------------------

    def forget_records(self, keys: list[bytes], rows: Slots | None = None) -> None:
        """Records of pages that are not in the tree are to be deleted; `rows` are the blobs that they counted for, with repeats."""
        self._trash.records += [(self.number, key) for key in keys]
        if rows is not None:
            np.subtract.at(self.blobs.pages, rows, 1)
            np.subtract.at(self.blobs.durable_pages, rows, 1)
            for row in distinct(rows).tolist():
                self.settle(row)

    def lose_again(self) -> None:
        """All pages are loaded: give up those too that need a blob which was lost meanwhile."""
        rows, self._lost_while_loading = self._lost_while_loading, set()
        self.loading = False
        self._watcher.loaded(self)
        for row in rows:
            if self.blobs.pages[row] and not self.blobs.on_ssd[row] and self.blobs.slot[row] == NO_SLOT:
                self.lose_blob(row)
