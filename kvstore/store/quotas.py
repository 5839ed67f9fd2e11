"""How much of a daemon each tenant may take up. Pure accounting: who enforces it asks here first."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.errors import Busy, NoSpace

ANYBODY = "*"
"""The name of the quota of tenants that have none of their own."""
_SLACK = 16
"""A tenant over its quota is brought down by a sixteenth of it more than needed, so that not every page makes room anew."""
_RETRY_MS = 100


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant: bytes in DRAM and on SSD, bytes in flight, data-plane connections. None is no limit."""

    dram: int | None = None
    ssd: int | None = None
    in_flight: int | None = None
    connections: int | None = None


_NO_QUOTA = Quota()


_WHERE = {"dram": "in DRAM", "ssd": "on SSD", "in_flight": "in flight"}


def named(tenant: str, quota: str, limit: int) -> str:
    """A quota for errors that its own tenant gets: what it is of, its size, and what it is called in the configuration."""
    return f"the quota of {limit} bytes {_WHERE[quota]} (`{quota}` of {tenant})"


def room_to_make(limit: int | None, used: int, wanted: int) -> int:
    """Bytes that must go before `wanted` more are within the limit; 0 if they are. A bit more than that, to have it quiet."""
    if limit is None or used + wanted <= limit:
        return 0
    return used + wanted - limit + limit // _SLACK


class Quotas:
    """The quotas of all tenants, and the bytes that each has in flight. Limits can be replaced at any time."""

    def __init__(self, limits: Mapping[str, Quota] | None = None) -> None:
        self._limits = dict(limits or {})
        self._in_flight: Counter[str] = Counter()

    def replace(self, limits: Mapping[str, Quota]) -> None:
        """New limits; what a tenant has already is not taken from it at once."""
        self._limits = dict(limits)

    def of(self, tenant: str) -> Quota:
        """A tenant's quota."""
        return self._limits.get(tenant) or self._limits.get(ANYBODY, _NO_QUOTA)

    def put_bytes(self, tenant: str, dram: int) -> int:
        """How large a tenant's puts had best be, in a DRAM tier of so many bytes: so that one has room while another is moved away."""
        quota = self.of(tenant)
        return max(1, min(limit for limit in (dram, quota.dram, quota.in_flight) if limit is not None) // 2)

    def in_flight(self, tenant: str) -> int:
        """Bytes that a tenant has in flight: put slots not committed yet, and fetches under way."""
        return self._in_flight[tenant]

    def start_put(self, tenant: str, nbytes: int) -> None:
        """Count a put's bytes as in flight until `end`. Raises Busy, or NoSpace if it could never be."""
        quota = self.of(tenant)
        for limit, what in ((quota.in_flight, "in_flight"), (quota.dram, "dram")):
            if limit is not None and nbytes > limit:
                raise NoSpace(f"a put of {nbytes} bytes is over {named(tenant, what, limit)}: put fewer pages at once")
        self._start(tenant, nbytes, quota.in_flight)

    def end(self, tenant: str, nbytes: int) -> None:
        """Bytes are no longer in flight."""
        self._in_flight[tenant] -= nbytes
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]

    def start_fetch(self, tenant: str, nbytes: int) -> None:
        """Count a fetch's bytes as in flight until `end`. Raises Busy; a fetch larger than the quota goes alone."""
        limit = self.of(tenant).in_flight
        self._start(tenant, nbytes, None if limit is None else max(limit, nbytes))

    def _start(self, tenant: str, nbytes: int, limit: int | None) -> None:
        if limit is not None and self._in_flight[tenant] + nbytes > limit:
            have = self._in_flight[tenant]
            over = named(tenant, "in_flight", self.of(tenant).in_flight or limit)
            raise Busy(f"{have} bytes are in flight, and {nbytes} more are over {over}", retry_after_ms=_RETRY_MS)
        self._in_flight[tenant] += nbytes


class SsdBudget:
    """The tenants' SSD quotas as one group commit meets them.

    `used` counts a tenant's bytes on SSD, `make_room` evicts its own, and `kept_as` says what keeps those that are left.
    """

    def __init__(
        self, quotas: Quotas, used: Callable[[str], int], make_room: Callable[[int, str], int], kept_as: Callable[[str], str]
    ) -> None:
        self._quotas = quotas
        self._count = used
        self._make_room = make_room
        self._kept_as = kept_as
        self._said: dict[str, str] = {}
        self._on_disk: dict[str, int] = {}
        self._admitted: Counter[str] = Counter()

    def refuses(self, tenant: str, nbytes: int) -> NoSpace | None:
        """Why `nbytes` more of a tenant can't be written; None if they can, and then they are counted."""
        limit = self._quotas.of(tenant).ssd
        if limit is None or not nbytes:
            return None
        if tenant not in self._on_disk:
            self._on_disk[tenant] = self._count(tenant)
        missing = room_to_make(limit, self._on_disk[tenant] + self._admitted[tenant], nbytes)
        if missing and nbytes <= limit:
            self._make_room(missing, tenant)
            self._on_disk[tenant] = self._count(tenant)
        if self._on_disk[tenant] + self._admitted[tenant] + nbytes > limit:
            quota = named(tenant, "ssd", limit)
            if nbytes > limit:
                return NoSpace(f"{nbytes} bytes to be written at once are over {quota}: put fewer pages at once")
            kept = self._said[tenant] = self._said.get(tenant) or self._kept_as(tenant)  # once: it looks at every page
            return NoSpace(f"{quota} is full, and what is there {kept}")
        self._admitted[tenant] += nbytes
        return None
