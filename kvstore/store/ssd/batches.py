"""Batches of group commits: put together of what is in memory, and taken up there once the disk has them, or not.

All on the loop's thread; `writeback.py` has them written.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import NoSpace
from kvstore.radix.journal import JournalBatch, encode_page
from kvstore.radix.pages import DURABLE
from kvstore.store.quotas import SsdBudget
from kvstore.store.space import Space
from kvstore.store.ssd.backlog import WriteRequest
from kvstore.store.stats import Stats
from kvstore.store.trash import Trash
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.ssd import BlobBatch, BlobFile


@dataclass(slots=True)
class Batch:
    """One group commit: what to write, and what to do in memory once it is durable."""

    blobs: BlobBatch = field(default_factory=BlobBatch)
    records: JournalBatch = field(default_factory=JournalBatch)
    pages: list[tuple[Space, bytes, bytes, list[int]]] = field(default_factory=list)
    """(space, page key, version, the blob rows that its record names) to be marked durable."""
    outdated: list[tuple[Space, bytes, list[int]]] = field(default_factory=list)
    """Records that named blobs which their pages no longer have: (space, page key, blob rows)."""
    rows: list[tuple[Space, int]] = field(default_factory=list)
    """(space, blob row) being written."""
    dropped: list[int] = field(default_factory=list)
    """Numbers of namespaces of which all is deleted."""
    pinned: list[tuple[Space, int]] = field(default_factory=list)
    """Every row of every page of the batch: none may lose its SSD copy while the record that names it is written."""


@dataclass(slots=True)
class _Plan:
    """Those requests that have room, in order; the pages that they need written, by name, ancestors first; and their blobs and bytes."""

    requests: list[WriteRequest] = field(default_factory=list)
    wanted: dict[tuple[int, bytes], Space] = field(default_factory=dict)
    counted: dict[tuple[int, int], None] = field(default_factory=dict)
    nbytes: int = 0


class Batches:
    """`make_ssd_room` evicts, of all or of one tenant; `view` shows a DRAM slot; `is_full` is what a tenant is told."""

    def __init__(
        self, blob_file: BlobFile, trash: Trash, stats: Stats, make_ssd_room: Callable[[int, str | None], int],
        view: Callable[[int], memoryview], now: Callable[[], float], budget: Callable[[Callable[[int, str], int]], SsdBudget],
        is_full: Callable[[str], NoSpace],
    ) -> None:  # fmt: skip
        self._blob_file = blob_file
        self._trash = trash
        self._stats = stats
        self._make_ssd_room = make_ssd_room
        self._view = view
        self._now = now
        self._budget = budget
        self._is_full = is_full

    def build(self, requests: list[WriteRequest]) -> Batch:
        """The next batch: of those requests that there is room for, the others are answered, and of the trash."""
        batch = Batch()
        requests = [request for request in requests if not request.space.dropped]
        plan = self._plan_all(requests, self._budget(self._make_ssd_room).refuses)
        if plan.nbytes > (room := self._room_for(plan.nbytes)):
            plan = self._plan_all(plan.requests, self._refuses_beyond(room))
        for space in {request.space.number: request.space for request in requests}.values():
            space.clear_wanted()
        self._fill(batch, plan.wanted)
        self._rewrite_outdated(batch)
        batch.dropped, self._trash.namespaces = self._trash.namespaces, []
        batch.records.delete_pages = [record for record in self._trash.records if record[0] not in batch.dropped]
        batch.blobs.delete = [blob for blob in self._trash.blobs if blob[0] not in batch.dropped]
        self._trash.records, self._trash.blobs = [], []
        return batch

    def _rewrite_outdated(self, batch: Batch) -> None:
        """Write anew the records that name too much; those in the batch already are right anyway."""
        batch.outdated, self._trash.outdated = self._trash.outdated, []
        done = {(number, key) for number, key, _ in batch.records.put_pages}
        now = self._now()
        for space, key, _ in batch.outdated:
            slot = -1 if space.dropped else space.tree.pages.find_key(key)
            if slot >= 0 and space.tree.pages.flags[slot] & DURABLE and (space.number, key) not in done:
                done.add((space.number, key))
                record = encode_page(space.digest, space.page_record(slot, now, only_named=True))
                batch.records.put_pages.append((space.number, key, record))

    def _plan_all(self, requests: list[WriteRequest], refuses: Callable[[str, int], NoSpace | None]) -> _Plan:
        """Plan each request that its tenant has room for; the others are answered. `refuses` is asked for so many bytes of a tenant."""
        plan = _Plan()
        for request in requests:
            pages, rows = len(plan.wanted), len(plan.counted)
            footprint = self._plan(request, plan.wanted, plan.counted)
            over = refuses(request.space.settings.tenant, footprint)
            if over is None:
                plan.nbytes += footprint
                plan.requests.append(request)
                continue
            for planned, before in ((plan.wanted, pages), (plan.counted, rows)):
                while len(planned) > before:
                    planned.popitem()
            request.fail(over)
        return plan

    def _refuses_beyond(self, room: int) -> Callable[[str, int], NoSpace | None]:
        """Refuses who does not fit into what the tier has left for the batch, of which those before have had theirs."""
        left = room
        told: dict[str, NoSpace] = {}  # once a tenant: it looks at every page

        def refuses(tenant: str, nbytes: int) -> NoSpace | None:
            nonlocal left
            if nbytes <= left:
                left -= nbytes
                return None
            if tenant not in told:
                told[tenant] = self._is_full(tenant)
            return told[tenant]

        return refuses

    def _plan(self, request: WriteRequest, wanted: dict[tuple[int, bytes], Space], counted: dict[tuple[int, int], None]) -> int:
        """Add the page and those ancestors that are not durable yet, ancestors first. Returns their SSD bytes."""
        space, tree = request.space, request.space.tree
        slot = tree.pages.find_key(request.key)
        if slot < 0:
            return 0
        slots = tree.path_slots(tree.path_to(slot))
        space.mark_wanted(slots)
        fresh = space.unwritten(slots)
        fresh[-1] |= request.rewrite
        footprint = 0
        for page in slots[fresh].tolist():
            name = (space.number, tree.pages.key_bytes(page))
            if name not in wanted:
                wanted[name] = space
                for row in space.rows_of(page):
                    if (space.number, row) not in counted:
                        counted[space.number, row] = None
                        footprint += self._cost(space, row)
        return footprint

    def _cost(self, space: Space, row: int) -> int:
        return 0 if space.blobs.on_ssd[row] else self._blob_file.footprint(space.stored_bytes(row))

    def _fill(self, batch: Batch, wanted: dict[tuple[int, bytes], Space]) -> None:
        """Take up pages and blobs as they are now that room was made (which may have moved pages)."""
        now, taken = self._now(), set()
        for (number, key), space in wanted.items():
            slot = space.tree.pages.find_key(key)
            if slot < 0:
                continue
            while lost := [row for row in space.rows_of(slot) if not space.blobs.on_ssd[row] and space.blobs.slot[row] == NO_SLOT]:
                space.lose_blob(lost[0])
                if (slot := space.tree.pages.find_key(key)) < 0:
                    break
            if slot < 0:
                continue
            record = space.page_record(slot, now)
            batch.records.put_pages.append((number, key, encode_page(space.digest, record)))
            named = space.rows_of(slot)
            batch.pages.append((space, key, record.version, named))
            for row in named:
                space.pin(row)
                space.blobs.durable_pages[row] += 1  # the record to be names it: its copy on SSD stays
                batch.pinned.append((space, row))
                if space.blobs.on_ssd[row] or (number, row) in taken:
                    continue
                taken.add((number, row))
                batch.rows.append((space, row))
                stored = self._view(int(space.blobs.slot[row]))[: space.stored_bytes(row)]
                batch.blobs.put.append((number, space.blobs.id_of(row), stored))

    def _room_for(self, needed: int) -> int:
        """Bytes that a batch may take of SSD, once room for it was made among pages that it does not need. May be less than it needs."""
        usage = self._blob_file.usage()
        free = usage.capacity - usage.used + sum(self._blob_file.footprint(stored) for _, _, stored in self._trash.blobs)
        return free + (self._make_ssd_room(needed - free, None) if needed > free else 0)

    def put_back(self, batch: Batch) -> None:
        """The disk did not take a batch: what it was to delete is trash again, and so is what it may have written."""
        self._trash.records += batch.records.delete_pages
        self._trash.blobs += batch.blobs.delete
        self._trash.blobs += [(number, blob, len(stored)) for number, blob, stored in batch.blobs.put]
        self._trash.outdated += batch.outdated
        self._trash.namespaces += batch.dropped
        batch.outdated = []

    def finish(self, batch: Batch, *, durable: bool) -> None:
        """A batch is over: mark what is durable, and let go of what it held."""
        if durable:
            self._stats.group_commits += bool(batch.pages)
            for space, row in batch.rows:
                space.blobs.on_ssd[row] = not space.dropped  # of a dropped namespace, what was just written is deleted next
                self._stats.demoted_stored_bytes += space.stored_bytes(row)
            for space, key, version, named in batch.pages:
                slot = -1 if space.dropped else space.tree.pages.find_key(key)
                if slot >= 0 and space.tree.version_of(slot) == version:
                    self._stats.demoted_pages += not space.is_durable(slot)
                    space.mark_durable(slot, named)
                elif not space.dropped:
                    self._trash.records.append((space.number, key))
        for space, _, rows in batch.outdated:
            for row in rows:
                space.blobs.durable_pages[row] -= space.blobs.durable_pages[row] if space.dropped else 1
                space.unpin(row)
        for space, row in batch.pinned:
            space.blobs.durable_pages[row] -= min(1, space.blobs.durable_pages[row])  # none, if it was dropped
            space.unpin(row)
