"""The meta parts of frames about recipes, and about computing pages again (see messages.py)."""

from kvstore.api.wire.messages import Message, PartRunMeta


class RebuildRequest(Message):
    """Compute what is missing of a prefix again, and answer when it is there, or after `wait_ms`. Payload as in MatchRequest.

    With `check` the pages from `first_page` on that are there are computed once more, and compared.
    """

    namespace: str
    wait_ms: int = 0
    check: bool = False
    first_page: int = 0
    extra_pages: list[int] = []


class RebuildProgress(Message):
    """How a prefix stands: pages usable of those asked for, and the jobs of the namespace that wait, or that a worker has."""

    pages: int
    wanted_pages: int
    waiting_jobs: int
    claimed_jobs: int
    checked_pages: int = 0
    drift: list[tuple[str, int, int, int, float, float]] = []
    """Of a check that is done: the pages that were compared, and the drift as in RebuildEnd."""


class RebuildClaim(Message):
    """Ask for a job, of one namespace or of any (empty), and wait for one up to `wait_ms`."""

    namespace: str = ""
    wait_ms: int = 0
    lease_ms: int = 30_000


class RebuildJob(Message):
    """A job, claimed until `lease_ms` have passed; none if `job` is 0. Compute the pages [first_page, last_page) and put them.

    Payload: the tokens of all pages before `last_page`, 32 bytes of extra digest for each of `extra_pages`, and one after the other
    the `bodies` (page, kind, bytes): text or a reference in place of the page's tokens, which are zeros. `runs` say as which parts
    the pages are to be put. With `check` they are not put: the drift is told.
    """

    job: int = 0
    namespace: str = ""
    put_id: bytes = b""
    first_page: int = 0
    last_page: int = 0
    lease_ms: int = 0
    attempt: int = 0
    check: bool = False
    extra_pages: list[int] = []
    bodies: list[tuple[int, str, int]] = []
    runs: list[PartRunMeta] = []


class RebuildRenew(Message):
    """Keep a claimed job for `lease_ms` from now."""

    job: int
    lease_ms: int


class RebuildEnd(Message):
    """A job is done, or `error` says why it is not.

    `drift` of a check by dtype: elements, those that differ, those that are no numbers, largest and summed absolute difference.
    """

    job: int
    error: str = ""
    drift: list[tuple[str, int, int, int, float, float]] = []


class RecipeCounts(Message):
    """The recipes of a namespace, and the bytes that they are counted with."""

    recipes: int
    nbytes: int
