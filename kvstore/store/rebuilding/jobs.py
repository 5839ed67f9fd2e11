"""Which pages are to be computed again, who is at it, and who waits: a queue of jobs. Pure: no I/O, and time is an argument.

A job is a run of missing pages of one path. A page is in one job at most. A worker claims a job for a time; when that passes,
or its client is gone, or it says that it failed, that was one attempt of a few.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.drift import Drift
from kvstore.errors import Busy, KVStoreError, NotFound, RebuildFailed

MAX_JOBS = 1024
MAX_JOB_PAGES = 2048
MAX_PAGES = 1 << 16
"""Of all jobs."""
MAX_WAITERS = 1 << 14
MAX_ATTEMPTS = 3
LINGER_S = 10.0
"""So long a job nobody waits for any more is kept if no worker has it: its asker may come back."""
MAX_LEASE_S = 600.0

Page = tuple[int, bytes]
"""(namespace number, page key)."""


@dataclass(eq=False, slots=True)
class Job:
    """Pages [first, last) of a prefix, by key; `parent` is the key of the page before them. With `check` they are there, and are compared.

    `put_id` is for the attempt under way: each has its own, as two computations must not be mixed.
    """

    id: int
    number: int
    tenant: str
    first: int
    parent: bytes
    keys: list[bytes]
    check: bool
    kept_until: float
    waiters: int = 0
    owner: int | None = None
    lease_until: float = 0.0
    claimed_at: float = 0.0
    put_id: bytes = b""
    attempts: int = 0
    ended: bool = False
    error: KVStoreError | None = None
    drift: Sequence[tuple[str, Drift]] | None = None
    """Of a check that a worker has done: what it measured."""

    @property
    def last(self) -> int:
        """The page after the last."""
        return self.first + len(self.keys)

    def has(self, put_id: bytes) -> bool:
        """Whether the claim under this put id lasts: the job has not ended, and is not free or another worker's."""
        return not self.ended and self.owner is not None and self.put_id == put_id


class RebuildQueue:
    """All jobs of a daemon. `on_end` is told of each that ends, well or not, once."""

    def __init__(self, on_end: Callable[[Job], None]) -> None:
        self._on_end = on_end
        self._jobs: dict[int, Job] = {}
        self._by_page: dict[Page, Job] = {}
        self._checks: dict[tuple[int, int, bytes], Job] = {}
        self._ids = itertools.count(1)
        self._waiters = 0
        self._checked_pages = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def find(self, number: int, key: bytes) -> Job | None:
        """The job that a page is in."""
        return self._by_page.get((number, key))

    # --- asking --------------------------------------------------------------------------------------------------------

    def want(
        self, number: int, tenant: str, first: int, parent: bytes, keys: Sequence[bytes], now: float, keep_s: float = 0.0
    ) -> list[Job]:
        """The jobs that bring consecutive pages of a path, from page `first` on, below `parent`; new ones where there is none.

        `keep_s`: how long a new one is kept though nobody waits for it. Raises Busy if there are too many.
        """
        jobs: dict[int, Job] = {}
        fresh: list[tuple[int, bytes, list[bytes]]] = []
        for at, key in enumerate(keys):
            job = self._by_page.get((number, key))
            if job is not None:
                jobs[job.id] = job
                job.kept_until = max(job.kept_until, now + keep_s)
            elif fresh and fresh[-1][2][-1] == (keys[at - 1] if at else b"") and len(fresh[-1][2]) < MAX_JOB_PAGES:
                fresh[-1][2].append(key)
            else:
                fresh.append((first + at, keys[at - 1] if at else parent, [key]))
        pages = sum(len(run) for _, _, run in fresh)
        if len(self._jobs) + len(fresh) > MAX_JOBS or not self._has_room(pages):
            raise Busy("too many pages wait to be computed again", retry_after_ms=1000)
        for start, above, run in fresh:
            job = self._add(Job(next(self._ids), number, tenant, start, above, run, check=False, kept_until=now + max(keep_s, LINGER_S)))
            jobs[job.id] = job
            self._by_page.update(dict.fromkeys([(number, key) for key in run], job))
        return sorted(jobs.values(), key=lambda job: job.first)

    def want_check(self, number: int, tenant: str, first: int, parent: bytes, keys: Sequence[bytes], now: float) -> Job:
        """The job that computes pages which are there once more, to compare them. Raises Busy if there are too many."""
        name = (number, first, keys[-1])
        job = self._checks.get(name)
        if job is None:
            if len(self._jobs) >= MAX_JOBS or not self._has_room(len(keys)):
                raise Busy("too many pages wait to be computed again", retry_after_ms=1000)
            job = self._add(Job(next(self._ids), number, tenant, first, parent, list(keys), check=True, kept_until=now + LINGER_S))
            self._checks[name] = job
            self._checked_pages += len(keys)
        return job

    def _has_room(self, pages: int) -> bool:
        return len(self._by_page) + self._checked_pages + pages <= MAX_PAGES

    def _add(self, job: Job) -> Job:
        self._jobs[job.id] = job
        return job

    def join(self, jobs: Iterable[Job]) -> None:
        """Somebody waits for these. Undo it with `leave`. Raises Busy if too many wait."""
        if self._waiters >= MAX_WAITERS:
            raise Busy("too many requests wait for pages to be computed again", retry_after_ms=1000)
        self._waiters += 1
        for job in jobs:
            job.waiters += 1

    def leave(self, jobs: Iterable[Job], now: float) -> None:
        """Undo one `join`."""
        self._waiters -= 1
        for job in jobs:
            job.waiters -= 1
            job.kept_until = max(job.kept_until, now + LINGER_S)

    # --- working -------------------------------------------------------------------------------------------------------

    def next_for(self, tenant: str, number: int | None = None) -> Job | None:
        """The job to be claimed next, of a tenant or of one of its namespaces: what is waited for first, then the oldest.

        One whose front hangs from a page of another job has to wait for that.
        """
        best: Job | None = None
        for job in self._jobs.values():
            if job.owner is not None or job.tenant != tenant or (number is not None and job.number != number):
                continue
            if (job.number, job.parent) in self._by_page:
                continue
            if job.waiters and not job.check:
                return job
            if best is None or (job.waiters and not best.waiters):
                best = job
        return best

    def claim(self, job: Job, owner: int, now: float, lease_s: float) -> bytes:
        """Give a job to a worker for `lease_s` seconds, under a put id of its own, which names this claim. Returns it."""
        job.owner, job.lease_until, job.claimed_at = owner, now + min(lease_s, MAX_LEASE_S), now
        job.put_id = secrets.token_bytes(16)
        job.attempts += 1
        return job.put_id

    def put_back(self, job: Job) -> None:
        """A claim came to nothing before the worker had it: that was no attempt."""
        job.owner = None
        job.attempts -= 1

    def held_by(self, owner: int, job_id: int) -> Job:
        """A worker's own job. Raises NotFound if it has it no more: it is done, or the lease has ended."""
        job = self._jobs.get(job_id)
        if job is None or job.owner != owner:
            raise NotFound(f"job {job_id} is not claimed by this client: it is done, or its lease has ended")
        return job

    def renew(self, owner: int, job_id: int, now: float, lease_s: float) -> Job:
        """Let a claim last `lease_s` seconds from now."""
        job = self.held_by(owner, job_id)
        job.lease_until = now + min(lease_s, MAX_LEASE_S)
        return job

    def move_front(self, job: Job, first: int, parent: bytes, keys: list[bytes]) -> None:
        """Let a job begin elsewhere: at more pages before it, or at fewer, as some are there. None may be in another job."""
        for key in job.keys:
            self._by_page.pop((job.number, key), None)
        job.first, job.parent, job.keys = first, parent, keys
        self._by_page.update(dict.fromkeys([(job.number, key) for key in keys], job))

    # --- ending --------------------------------------------------------------------------------------------------------

    def done(self, job: Job) -> None:
        """All its pages are there."""
        self._end(job, None)

    def fail(self, job: Job, error: KVStoreError) -> None:
        """It can't be done."""
        self._end(job, error)

    def attempt_failed(self, job: Job, why: str) -> None:
        """A worker did not bring it. It is for another then, unless too many have tried."""
        job.owner = None
        if job.attempts >= MAX_ATTEMPTS:
            self._end(
                job, RebuildFailed(f"pages [{job.first}, {job.last}) were not computed again in {job.attempts} attempts; the last: {why}")
            )

    def _end(self, job: Job, error: KVStoreError | None) -> None:
        if job.ended:
            return
        job.ended, job.error = True, error
        self._jobs.pop(job.id, None)
        for key in job.keys:
            if self._by_page.get((job.number, key)) is job:
                del self._by_page[job.number, key]
        if job.check:
            self._checked_pages -= len(job.keys)
            self._checks = {name: other for name, other in self._checks.items() if other is not job}
        self._on_end(job)

    def release_owner(self, owner: int) -> list[Job]:
        """A worker's client is gone. Returns the jobs that it had."""
        mine = [job for job in self if job.owner == owner]
        for job in mine:
            self.attempt_failed(job, "the worker's connection ended")
        return mine

    def sweep(self, now: float) -> list[Job]:
        """Take back what was claimed for too long, and forget what nobody wants any more. Returns the jobs taken back."""
        late = [job for job in self if job.owner is not None and job.lease_until < now]
        for job in late:
            self.attempt_failed(job, "the worker did not finish or renew its claim in time")
        for job in self:
            if job.owner is None and not job.waiters and job.kept_until < now:
                self._end(job, RebuildFailed("nobody waits for these pages any more, and no worker came for them"))
        return late

    def end_namespace(self, number: int | None, error: KVStoreError) -> None:
        """A namespace is dropped; all are if None."""
        for job in self:
            if number in (None, job.number):
                self._end(job, error)
