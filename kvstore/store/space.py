"""A namespace at run time: its tree and its blob table, kept consistent with each other and with the tiers.

Everything here is bookkeeping on the loop's thread: no await, no I/O. What has to be deleted on disk is queued in `Trash`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import BadRequest, Unsupported
from kvstore.kvspec import KVSpec, PartRange, SliceLayout, namespace_digest
from kvstore.radix.journal import NamespaceRecord, PageRecord, PartRecord, RecordGroup
from kvstore.radix.loading import LoadResult, load_tree
from kvstore.radix.pages import DURABLE, Slots
from kvstore.radix.tree import RadixTree
from kvstore.store.stats import Stats
from kvstore.tiers.blobs import NO_SLOT, BlobTable, stored_bytes
from kvstore.tiers.dram import Arena

_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,200}")
_WANTED = 2
"""Page flag: part of a batch being put together, so not to be evicted from SSD to make room for it."""


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """What a namespace was created with. Pages acknowledged as durable are kept at least `retention_s` seconds."""

    tenant: str
    name: str
    fingerprint: str
    spec: KVSpec
    recipes: bool = False
    retention_s: int = 86_400

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"the name {self.name[:100]!r} is not 1 to 200 letters, digits and ._:@- characters")
        if not self.fingerprint:
            raise BadRequest("the model fingerprint is empty: compute one, or give an explicit revision")
        if not 0 <= self.retention_s <= 10 * 365 * 86_400:
            raise BadRequest(f"retention_s is {self.retention_s}, not 0 to ten years")
        kinds = {c.kind for c in self.spec.components}
        if kinds != {"full"}:
            raise Unsupported(f"components of kind {', '.join(sorted(kinds - {'full'}))} are not offered yet, only full")

    @property
    def digest(self) -> bytes:
        """The namespace's identity (32 bytes): over tenant, fingerprint and spec."""
        return namespace_digest(self.tenant, self.fingerprint, self.spec)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tenant": self.tenant, "name": self.name, "fingerprint": self.fingerprint,
            "spec": self.spec.to_dict(), "recipes": self.recipes, "retention_s": self.retention_s,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "NamespaceSettings":
        """The inverse of `to_dict`."""
        return cls(**{**data, "spec": KVSpec.from_dict(data["spec"])})


@dataclass(slots=True)
class Trash:
    """What is gone from memory and still has to be deleted on disk: record keys, and blobs as (number, id, stored bytes)."""

    records: list[tuple[int, bytes]] = field(default_factory=list)
    blobs: list[tuple[int, bytes, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.records or self.blobs)


class Space:
    """One namespace. `number` is its short name on this daemon's disk."""

    def __init__(self, number: int, settings: NamespaceSettings, max_pages: int, arena: Arena, trash: Trash, stats: Stats) -> None:
        self.number = number
        self.settings = settings
        self.spec = settings.spec
        self.digest = settings.digest
        self.id = self.digest[:16].hex()
        self.tree = RadixTree(self.digest, self.spec.page_tokens, max_pages)
        self.blobs = BlobTable(2 * max_pages)
        self.dropped = False
        self.end_holds: Callable[[Space, int], None]
        """Set by the store: shorten the leases, and end the puts, that hold the page in a slot or one below it."""
        self.resident_bytes = 0
        self._arena = arena
        self._trash = trash
        self._stats = stats

    def record(self) -> NamespaceRecord:
        """The journal's record of this namespace."""
        return NamespaceRecord(self.number, self.digest, self.settings.to_dict())

    # --- rows of the blob table ---------------------------------------------------------------------------------------

    def stored_bytes(self, row: int) -> int:
        """Bytes of a blob's stored form."""
        return stored_bytes(self.blobs.layout_of(row))

    def slot_bytes(self, slot: int) -> int:
        """Bytes that a DRAM slot takes up."""
        return self._arena.slot_bytes(slot)

    def set_slot(self, row: int, slot: int) -> None:
        """Record that a blob is in a DRAM slot."""
        self.blobs.slot[row] = slot
        self.resident_bytes += self._arena.slot_bytes(slot)

    def clear_slot(self, row: int) -> int:
        """Free a blob's DRAM slot, if it has one. Returns the bytes freed."""
        slot = int(self.blobs.slot[row])
        if slot == NO_SLOT:
            return 0
        freed = self._arena.slot_bytes(slot)
        self._arena.free(slot)
        self.blobs.slot[row] = NO_SLOT
        self.resident_bytes -= freed
        return freed

    def pin(self, row: int) -> None:
        """Keep a blob's bytes where they are until `unpin`."""
        self.blobs.pins[row] += 1

    def unpin(self, row: int) -> None:
        """Undo one `pin`; a blob nobody needs any more goes with the last one."""
        self.blobs.pins[row] -= 1
        self.settle(row)

    def settle(self, row: int) -> None:
        """Give up what nobody needs: the SSD copy without durable pages, and the whole blob without pages."""
        blobs = self.blobs
        if blobs.pins[row]:
            return
        elsewhere = blobs.slot[row] != NO_SLOT or not blobs.pages[row]
        if blobs.on_ssd[row] and not blobs.durable_pages[row] and elsewhere:
            blobs.on_ssd[row] = False
            self._trash.blobs.append((self.number, blobs.id_of(row), self.stored_bytes(row)))
        if not blobs.pages[row]:
            self.clear_slot(row)
            blobs.remove(row)

    def rows_of(self, slot: int) -> list[int]:
        """The blob rows of a page's parts."""
        rows: list[int] = self.tree.parts_of(np.array([slot], np.int32)).blob.tolist()
        return rows

    # --- pages ---------------------------------------------------------------------------------------------------------

    def remove_page(self, slot: int) -> int:
        """Remove a page and its subtree from the tree, and what only they needed from the tiers. Returns pages removed."""
        removed = self.tree.remove(slot)
        blobs = np.concatenate(removed.blobs)
        np.subtract.at(self.blobs.pages, blobs, 1)
        np.subtract.at(self.blobs.durable_pages, np.concatenate(removed.durable_blobs), 1)
        self._trash.records += [(self.number, key) for key in removed.durable_keys]
        for row in np.unique(blobs).tolist():
            self.settle(row)
        self._stats.dropped_pages += removed.pages
        return removed.pages

    def mark_durable(self, slot: int) -> None:
        """Record that a page's journal record and its bytes are durable."""
        self.tree.pages.flags[slot] |= DURABLE
        rows = self.tree.parts_of(np.array([slot], np.int32)).blob
        np.add.at(self.blobs.durable_pages, rows, 1)

    def is_durable(self, slot: int) -> bool:
        """Whether the page has a durable journal record."""
        return bool(self.tree.pages.flags[slot] & DURABLE)

    def lose_blob(self, row: int) -> None:
        """A blob's bytes are gone in every tier: the pages that need it go, with their subtrees."""
        if self.dropped:
            return
        part_rows = np.flatnonzero(self.tree.parts.blob[: self.tree.parts.slots.high] == row)
        live = self.tree.live_slots()
        owner, part = self.tree.parts.of(self.tree.pages.part[live])
        keys = [self.tree.pages.key_bytes(int(s)) for s in live[owner[np.isin(part, part_rows)]].tolist()]
        self.pin(row)
        for key in keys:
            slot = self.tree.pages.find_key(key)
            if slot >= 0 and self.tree.pages.leases[slot]:
                self.end_holds(self, slot)
            if slot >= 0:
                self.remove_page(self.tree.pages.find_key(key))
        self.unpin(row)

    # --- who may go ----------------------------------------------------------------------------------------------------

    def dram_candidates(self) -> tuple[Slots, npt.NDArray[np.int64]]:
        """Unleased pages with bytes in DRAM, and those bytes."""
        slots = self.tree.live_slots()
        slots = slots[self.tree.pages.leases[slots] == 0]
        owner, part = self.tree.parts.of(self.tree.pages.part[slots])
        rows = self.tree.parts.blob[part]
        resident = (self.blobs.slot[rows] != NO_SLOT) & (self.blobs.pins[rows] == 0)
        size = np.zeros(len(slots), np.int64)
        np.add.at(size, owner[resident], self.blobs.stored_of(rows[resident]))
        keep = size > 0
        return slots[keep], size[keep]

    def evict_dram(self, slot: int) -> int:
        """Free the DRAM copies of a durable page's blobs. Returns the bytes freed."""
        freed = 0
        for row in self.rows_of(slot):
            if self.blobs.on_ssd[row] and not self.blobs.pins[row]:
                freed += self.clear_slot(row)
        self._stats.evicted_dram_pages += freed > 0
        return freed

    def evict_ssd(self, wanted: int, now: float, footprint: Callable[[int], int]) -> int:
        """Give up the journal records of the coldest durable pages, until `wanted` bytes on SSD will be free.

        Pages that are leased, retained or wanted stay. A page without a DRAM copy is removed. `footprint` says what a
        stored form takes up on SSD. Returns the bytes.
        """
        pages = self.tree.pages
        slots = self.tree.live_slots()
        slots = slots[(pages.flags[slots] & (DURABLE | _WANTED)) == DURABLE]
        slots = slots[(pages.leases[slots] == 0) & (pages.retain[slots] <= now)]
        freed = 0
        # Usually a few pages do; but pages that share their blobs free nothing until the last of them goes.
        likely = 64 + 4 * wanted // max(1, footprint(self.spec.page_bytes))
        keys = [pages.key_bytes(s) for s in self.tree.coldest(slots, min(likely, len(slots))).tolist()]
        if likely < len(slots):
            keys += [pages.key_bytes(s) for s in self.tree.coldest(slots, len(slots))[likely:].tolist()] if self._shares_blobs else []
        for key in keys:
            if freed >= wanted:
                break
            slot = pages.find_key(key)
            if slot >= 0 and self.is_durable(slot):
                before = len(self._trash.blobs)
                self._forget_durable(slot)
                freed += sum(footprint(stored) for _, _, stored in self._trash.blobs[before:])
        return freed

    @property
    def _shares_blobs(self) -> bool:
        return self.blobs.count < self.tree.parts.slots.used

    def _forget_durable(self, slot: int) -> None:
        pages = self.tree.pages
        rows = self.tree.parts_of(np.array([slot], np.int32)).blob
        self._stats.evicted_ssd_pages += 1
        if (self.blobs.slot[rows] == NO_SLOT).any():
            self.remove_page(slot)
            return
        pages.flags[slot] &= ~np.uint8(DURABLE)
        np.subtract.at(self.blobs.durable_pages, rows, 1)
        self._trash.records.append((self.number, pages.key_bytes(slot)))
        for row in rows.tolist():
            self.settle(row)

    def mark_wanted(self, slots: Slots) -> None:
        """Protect pages from `evict_ssd` until `clear_wanted`."""
        self.tree.pages.flags[slots] |= _WANTED

    def clear_wanted(self) -> None:
        """End the protection of all pages."""
        self.tree.pages.flags[: self.tree.pages.ranges.high] &= ~np.uint8(_WANTED)

    # --- records -------------------------------------------------------------------------------------------------------

    def page_record(self, slot: int, now: float) -> PageRecord:
        """The journal's record of a page."""
        tree, pages = self.tree, self.tree.pages
        path = tree.path_to(slot)
        above = int(tree.path_slots(path)[-2]) if path.pages > 1 else -1
        parts = tree.parts_of(np.array([slot], np.int32))
        label = None
        if self.settings.recipes and not tree.nodes.sealed[path.nodes[-1]]:
            label = pages.tokens[slot].tobytes() + pages.extras[slot].tobytes()
        return PageRecord(
            key=pages.key_bytes(slot), parent=self.digest if above < 0 else pages.key_bytes(above), depth=path.pages - 1,
            version=tree.version_of(slot), parent_version=tree.version_of(above), created_ms=int(now * 1000),
            retain=int(pages.retain[slot]), label=label,
            parts=tuple(
                PartRecord(PartRange(int(c), *(int(x) for x in r)), self.blobs.id_of(b), self.blobs.layout_of(b).payload_bytes)
                for b, c, r in zip(parts.blob.tolist(), parts.component, parts.ranges, strict=True)
            ),
        )  # fmt: skip

    def load(self, groups: list[RecordGroup]) -> LoadResult:
        """Fill an empty namespace from its journal records; their blobs are taken to be on SSD."""
        layouts: dict[tuple[int, ...], SliceLayout] = {}

        def blobs_of(parts: npt.NDArray[np.void]) -> Slots:
            rows = np.empty(parts.shape, np.int32)
            for at, part in np.ndenumerate(parts):
                geometry = (int(part["component"]), *(int(x) for x in part["ranges"]))
                layout = layouts.get(geometry)
                if layout is None:
                    layout = layouts[geometry] = self.spec.slice_layout(PartRange(*geometry))
                blob = part["blob"].tobytes()
                row = self.blobs.find(blob)
                if row < 0:
                    row = self.blobs.add(blob, layout)
                    self.blobs.on_ssd[row] = True
                self.blobs.pages[row] += 1
                self.blobs.durable_pages[row] += 1
                rows[at] = row
            return rows

        result = load_tree(self.tree, groups, blobs_of)
        self._trash.records += [(self.number, key) for key in result.orphans]
        return result
