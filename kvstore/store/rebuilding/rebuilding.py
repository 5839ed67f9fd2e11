"""Computing pages again: what is asked for becomes jobs, workers get them, and what they put is compared with what is on record."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.drift import Drift
from kvstore.errors import BadRequest, Busy, Cancelled, Conflict, NotFound, RebuildFailed, UnknownNamespace
from kvstore.radix.tree import Extras, as_token_bytes
from kvstore.radix.values import EMPTY_PATH, Path
from kvstore.store.rebuilding.comparing import RebuildReport, sane
from kvstore.store.rebuilding.gaps import Gap, find_gap, rebuildable_keys
from kvstore.store.rebuilding.job_recipes import is_whole, recipes_for
from kvstore.store.rebuilding.jobs import MAX_JOB_PAGES, Job, RebuildQueue
from kvstore.store.rebuilding.recorded import Recorded
from kvstore.store.rebuilding.waits import Waits
from kvstore.store.rebuilding.work import Work, stored_prefix, work_of
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.recipes.source import split_keys
from kvstore.store.space import Space
from kvstore.store.stats import Stats

_log = logging.getLogger("kvstore.rebuild")

MAX_WAIT_S = 600.0
AHEAD_S = 300.0
"""So long pages that are to be computed ahead of need wait for a worker."""
WORKER_SEEN_S = 60.0
_STOPPING = "the daemon is stopping"
_ROUNDS = 8
"""So often a request looks again what is missing, when what was computed for it has gone meanwhile."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a request stands: pages usable of those asked for, and jobs under way for it."""

    pages: int
    wanted_pages: int
    waiting_jobs: int
    claimed_jobs: int
    checked_pages: int = 0
    drift: Sequence[tuple[str, Drift]] = ()
    """Of a check that is done: the pages compared, and what the worker measured."""


class Rebuilding:
    """See the module's text."""

    def __init__(self, recipes: Recipes, stats: Stats) -> None:
        self.queue = RebuildQueue(self._ended)
        self._recipes = recipes
        self._stats = stats
        self._spaces: dict[int, Space] = {}
        self._reports: dict[int, RebuildReport] = {}
        self._recorded = Recorded(self.report, stats)
        self._waits = Waits()
        self._closed = False
        self._news = asyncio.Event()
        self._seen: dict[str, float] = {}
        """When a worker of a tenant last asked for a job."""
        recipes.fresh = self._recorded.compare

    def report(self, space: Space) -> RebuildReport:
        """What rebuilds of a namespace came to."""
        return self._reports.setdefault(space.number, RebuildReport())

    def jobs_of(self, space: Space) -> tuple[int, int]:
        """Jobs of a namespace that wait, and that a worker has."""
        mine = [job for job in self.queue if job.number == space.number]
        claimed = sum(job.owner is not None for job in mine)
        return len(mine) - claimed, claimed

    # --- asking --------------------------------------------------------------------------------------------------------

    async def bring(
        self, space: Space, tokens: bytes, extras: Extras, wait_s: float, base: Path = EMPTY_PATH, *, strict: bool = False
    ) -> Progress:
        """Have the missing pages of a prefix computed again, and wait until they are there, `wait_s` at most.

        Returns how it stands then. Raises RebuildFailed if it can't be done or was not; with `strict` also if a page has no recipe.
        """
        if strict and len(as_token_bytes(tokens)) < space.tree.pages.token_bytes:
            raise BadRequest(f"these tokens do not fill a page of {space.spec.page_tokens}: there is nothing to compute again")
        deadline = time.monotonic() + min(max(wait_s, 0.0), MAX_WAIT_S)
        base_key, base_pages = space.tree.key_at(base), base.pages
        with self._waits.keeping(tokens):
            for _ in range(_ROUNDS):
                jobs = await self._want(space, tokens, extras, self._path(space, base_key, base_pages), strict=strict)
                if not jobs or not await self._waits.until_ended(self.queue, jobs, deadline):
                    break
        return self._progress(space, tokens, extras, self._path(space, base_key, base_pages))

    @staticmethod
    def _path(space: Space, key: bytes, pages: int) -> Path:
        """The path to a page that is leased; the tree may have changed since."""
        slot = space.tree.pages.find_key(key) if pages else -1
        if pages and slot < 0:
            raise NotFound("the pages that the request builds on are gone")
        return space.tree.path_to(slot) if pages else EMPTY_PATH

    def _progress(self, space: Space, tokens: bytes, extras: Extras, base: Path) -> Progress:
        pages = base.pages + len(as_token_bytes(tokens)) // space.tree.pages.token_bytes
        gap = find_gap(space, tokens, extras, base)
        return Progress(pages if gap is None else gap.usable, pages, *self.jobs_of(space))

    async def _want(
        self, space: Space, tokens: bytes, extras: Extras, base: Path, *, strict: bool = False, keep_s: float = 0.0
    ) -> list[Job]:
        """The jobs that bring what is missing of a prefix, as far as there are recipes."""
        self._check(space)
        base_key, base_pages = space.tree.key_at(base), base.pages
        for _ in range(_ROUNDS):
            gap = find_gap(space, tokens, extras, self._path(space, base_key, base_pages))
            if gap is None:
                return []
            keys = await rebuildable_keys(self._recipes, space, gap)
            if space.dropped:
                raise UnknownNamespace(f"namespace {space.settings.name!r} was dropped")
            if find_gap(space, tokens, extras, self._path(space, base_key, base_pages)) != gap:
                continue  # some of it has come, or gone, meanwhile
            if strict and len(keys) < gap.pages - gap.usable:
                raise RebuildFailed(f"page {gap.usable + len(keys)} of this prefix is not in the store, and has no recipe")
            if not keys:
                return []
            jobs = self.queue.want(space.number, space.settings.tenant, gap.usable, gap.above, keys, time.monotonic(), keep_s)
            self._spaces[space.number] = space
            self._tell()
            return jobs
        raise Busy("what is there of this prefix changes all the time", retry_after_ms=100)

    def _check(self, space: Space) -> None:
        if space.text is None:
            raise Conflict("this namespace keeps no recipes, which is fixed when it is created: its pages can't be computed again")
        if self._closed:
            raise Cancelled(_STOPPING)
        if space.loading:
            raise Busy(f"namespace {space.settings.name!r} is still being loaded", retry_after_ms=500)

    async def ahead(self, space: Space, tokens: bytes, extras: Extras, within_s: float = 0.0) -> tuple[int, str]:
        """Have missing pages computed before they are needed, if it pays: pages on their way, and why not more.

        It does not if no worker has asked for work of late, or if they would not be there in time: by what rebuilds took so far, or if
        there were none, by what the namespace says that computing costs.
        """
        if space.text is None:
            return 0, "the namespace keeps no recipes"
        gap = find_gap(space, tokens, extras)
        if gap is None:
            return 0, ""
        if time.monotonic() - self._seen.get(space.settings.tenant, -WORKER_SEEN_S) > WORKER_SEEN_S and not self.jobs_of(space)[1]:
            return 0, "no rebuild worker has asked for work of late"
        if within_s and (takes := self._would_take(space, gap)) > within_s:
            return 0, f"it would take about {takes:.1f} s"
        try:
            jobs = await self._want(space, tokens, extras, EMPTY_PATH, keep_s=AHEAD_S)
        except Busy as error:
            return 0, error.message
        return sum(len(job.keys) for job in jobs), ""

    def _would_take(self, space: Space, gap: Gap) -> float:
        """About how many seconds until the missing pages were there; 0 if nothing is known of it."""
        before = sum(len(job.keys) for job in self.queue if job.number == space.number)
        if (rate := self.report(space).seconds_a_page) or space.settings.prefill is None:
            return rate * (before + gap.pages - gap.usable)
        seconds: float = space.settings.prefill.between(gap.usable * space.spec.page_tokens, gap.pages * space.spec.page_tokens)
        return seconds

    async def check(self, space: Space, tokens: bytes, extras: Extras, first: int, wait_s: float) -> Progress:
        """Have pages that are there, from page `first` on, computed once more and compared; wait `wait_s` at most.

        At most MAX_JOB_PAGES at a time: raises BadRequest for more.
        """
        self._check(space)
        path = space.tree.match(as_token_bytes(tokens), extras)
        slots = space.tree.path_slots(path)
        usable = space.tree.rules.longest(space.tree.pages.components[slots]) if space.tree.rules.optional else path.pages
        if not 0 <= first < usable:
            raise NotFound(f"page {first} of this prefix is not in the store: there is nothing to compare with")
        if usable - first > MAX_JOB_PAGES:
            raise BadRequest(f"a check of {usable - first} pages: at most {MAX_JOB_PAGES} at a time; begin later, or give a shorter prefix")
        keys = [space.tree.pages.key_bytes(int(slot)) for slot in slots[first:usable]]
        parent = space.tree.pages.key_bytes(int(slots[first - 1])) if first else space.digest
        with self._waits.keeping(tokens):
            job = self.queue.want_check(space.number, space.settings.tenant, first, parent, keys, time.monotonic())
            self._spaces[space.number] = space
            self._tell()
            await self._waits.until_ended(self.queue, [job], time.monotonic() + min(max(wait_s, 0.0), MAX_WAIT_S))
        measured = (0, ()) if job.drift is None else (len(job.keys), job.drift)
        return Progress(usable, len(as_token_bytes(tokens)) // space.tree.pages.token_bytes, *self.jobs_of(space), *measured)

    # --- working -------------------------------------------------------------------------------------------------------

    async def claim(self, owner: int, tenant: str, space: Space | None, wait_s: float, lease_s: float) -> Work | None:
        """A job for a worker, leased to it; waits for one up to `wait_s`. None if there is none by then.

        Raises Conflict for a namespace without recipes.
        """
        if lease_s <= 0:
            raise BadRequest("a claim lasts more than 0 s")
        if space is not None and space.text is None:
            raise Conflict(
                f"namespace {space.id} keeps no recipes, which is fixed when it is created: there will never be work in it; "
                "drop it, and create it anew with recipes = on"
            )
        deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
        while True:
            if self._closed:
                raise Cancelled(_STOPPING)
            self._seen[tenant] = time.monotonic()
            job = self.queue.next_for(tenant, None if space is None else space.number)
            if job is not None:
                work = await self._prepared(job, owner, lease_s)
                if work is not None:
                    return work
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            news = self._news
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                return None

    async def _prepared(self, job: Job, owner: int, lease_s: float) -> Work | None:
        """Claim a job and find out what it takes. None if it ended, or has to wait for another."""
        space = self._spaces[job.number]
        put_id = self.queue.claim(job, owner, time.monotonic(), lease_s)
        try:
            found = await recipes_for(self.queue, self._recipes, job, space, put_id)
            if found is None or not job.has(put_id):
                return None
            if not found:  # it is done already
                self._finish(job)
                return None
            work = await asyncio.to_thread(work_of, space, job, put_id, job.first, stored_prefix(space, job), found)
        except RebuildFailed as error:
            if job.has(put_id):
                self.queue.fail(job, error)
            return None
        except BaseException:
            if job.has(put_id):
                self.queue.put_back(job)
                self._tell()
            raise
        if not job.has(put_id):
            return None
        if not job.check:
            self._recorded.keep(space, found)
        return work

    def renew(self, owner: int, job_id: int, lease_s: float) -> None:
        """Let a worker keep its job for `lease_s` seconds from now."""
        job = self.queue.renew(owner, job_id, time.monotonic(), lease_s)
        self._recorded.renew(job.number, job.keys)

    def end(self, owner: int, job_id: int, error: str, measured: Sequence[tuple[str, Drift]]) -> None:
        """A worker is done with a job, or gives it up. Raises NotFound if it has it no more, which is no harm."""
        job = self.queue.held_by(owner, job_id)
        space = self._spaces[job.number]
        report = self.report(space)
        if error:
            self._attempt_failed(job, error[:500])
        elif job.check:
            if not all(sane(dtype, drift) for dtype, drift in measured):
                raise BadRequest("these figures can't be true")
            for dtype, drift in measured:
                report.add_drift(dtype, drift)
            report.checked_pages += len(job.keys)
            job.drift = measured
            if any(drift.differing for _, drift in measured):
                report.checks_that_differed += 1
            self._finish(job)
        elif is_whole(space, job):
            self._finish(job)
        else:
            self._attempt_failed(job, "the worker said that it was done, but the pages are not there")

    def give_up(self, job: Job, why: str) -> None:
        """A job can't be done by any worker."""
        self.queue.fail(job, RebuildFailed(why))

    def _attempt_failed(self, job: Job, why: str) -> None:
        _log.warning("pages [%d, %d) were not computed again at attempt %d: %s", job.first, job.last, job.attempts, why)
        self._note_failure(job)
        self.queue.attempt_failed(job, why)
        self._tell()

    def _note_failure(self, job: Job) -> None:
        self._stats.rebuild_failed_attempts += 1
        report = self._reports.setdefault(job.number, RebuildReport())
        report.failed_attempts += 1

    def release_owner(self, owner: int) -> None:
        """A worker's client is gone: its jobs are for others."""
        for job in self.queue.release_owner(owner):
            self._note_failure(job)
        self._tell()

    def sweep(self, now: float) -> None:
        """Take back what workers do not finish in time."""
        late = self.queue.sweep(now)
        for job in late:
            self._note_failure(job)
        if late:
            self._tell()
        self._recorded.sweep(now)

    def close(self) -> None:
        """The daemon stops: nobody waits any longer."""
        self._closed = True
        self.queue.end_namespace(None, Cancelled(_STOPPING))
        self._tell()

    def end_space(self, space: Space) -> None:
        """A namespace is dropped."""
        self.queue.end_namespace(space.number, UnknownNamespace(f"namespace {space.settings.name!r} was dropped"))
        self._spaces.pop(space.number, None)
        self._reports.pop(space.number, None)

    # --- what comes in -------------------------------------------------------------------------------------------------

    def entered(self, space: Space, keys: bytes) -> None:
        """Pages are in the tree now, or gained parts: jobs may be done, whoever brought them."""
        self._recipes.entered(space, keys)
        if not len(self.queue):
            return
        jobs = {job.id: job for key in split_keys(keys) if (job := self.queue.find(space.number, key)) is not None}
        for job in jobs.values():
            if is_whole(space, job):
                self._finish(job)

    @property
    def idle(self) -> bool:
        """Whether no recipe waits to be written."""
        return self._recipes.idle

    def _finish(self, job: Job) -> None:
        if job.owner is not None and not job.check:
            report = self.report(self._spaces[job.number])
            report.rebuilt_pages += len(job.keys)
            report.took(len(job.keys), time.monotonic() - job.claimed_at)
            self._stats.rebuilt_pages += len(job.keys)
        self._stats.rebuild_jobs += 1
        self.queue.done(job)

    # --- telling -------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """There may be something for workers to claim."""
        self._news.set()
        self._news = asyncio.Event()

    def _ended(self, job: Job) -> None:
        self._waits.ended(job)
        if job.error is not None and job.attempts:
            self._stats.rebuild_failed_jobs += 1
            self._reports.setdefault(job.number, RebuildReport()).failed_jobs += 1
        self._tell()
