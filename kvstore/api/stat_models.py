"""What the control plane says of the daemon itself: its health, its tiers, what it has done, and how long that took."""

from typing import Annotated, Literal

from pydantic import Field

from kvstore.api.models import Namespace, ReplyModel
from kvstore.api.request_stats import Histogram
from kvstore.store.checking.scrub import ScrubProgress
from kvstore.store.matching.rates import Rate
from kvstore.store.ssd.recovery import LoadProgress
from kvstore.store.ssd.state import SsdHealth
from kvstore.store.stats import Stats
from kvstore.tiers.dram import SegmentUsage


class Health(ReplyModel):
    """The process lives."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(ReplyModel):
    """It serves, and this is where. While it loads, matches give what is there already, and puts get `busy`."""

    status: Literal["ready", "loading"] = "ready"
    loading: Annotated[LoadProgress | None, Field(description="pages that are back, while it loads")] = None
    ssd_state: Annotated[SsdHealth | None, Field(description="if the disk is not well; the store serves on from DRAM")] = None
    epoch: Annotated[int, Field(description="changes with every start of the daemon")]
    endpoints: Annotated[list[str], Field(description="the data plane's addresses")]


class TierUsage(ReplyModel):
    """Bytes of a tier."""

    capacity: int
    used: int


class RateNow(ReplyModel):
    """Bytes a second, smoothed; a guess as long as none were `measured`."""

    bytes_s: float
    measured: bool

    @classmethod
    def of(cls, rate: Rate) -> "RateNow":
        """As it is now."""
        return cls(bytes_s=round(rate.bytes_s), measured=rate.measured)


class RequestTimes(ReplyModel):
    """What requests of one kind took that went well."""

    count: int
    seconds: Annotated[float, Field(description="of all together")]
    buckets: Annotated[list[int], Field(description="how many took less than 2^16, 2^17, … 2^34 ns; the last is the rest")]

    @classmethod
    def of(cls, times: Histogram) -> "RequestTimes":
        """As they are now."""
        return cls(count=times.count, seconds=round(times.total_ns / 1e9, 6), buckets=times.counts)


class Stat(ReplyModel):
    """What the daemon holds and has done; without admin access, only what is the tenant's own."""

    version: str
    epoch: int
    uptime_s: float
    endpoints: list[str]
    tenant: Annotated[str, Field(description="whose token it is")]
    tiers: dict[str, TierUsage]
    leases: int
    puts_open: int
    sessions: int
    connections: int
    namespaces: list[Namespace]
    pid: int | None = None
    policy: Annotated[str | None, Field(description="which pages leave a tier first")] = None
    follows_lru: Annotated[bool | None, Field(description="whether that is by recency now, though the policy may estimate")] = None
    rates: Annotated[dict[str, RateNow] | None, Field(description="reads from `ssd`, and what fetches from DRAM reach over the `link`")] = (
        None
    )
    requests: Annotated[dict[str, RequestTimes] | None, Field(description="of the data plane, by kind, since start")] = None
    errors: Annotated[dict[str, int] | None, Field(description="that requests of the data plane were answered with, by code")] = None
    dram_segments: SegmentUsage | None = None
    totals: Annotated[Stats | None, Field(description="counters since start")] = None
    pending_pages: Annotated[int | None, Field(description="pages of which other shards are still to come")] = None
    pinned_blobs: int | None = None
    loading: LoadProgress | None = None
    ssd_state: SsdHealth | None = None
    scrub: ScrubProgress | None = None
    writeback_backlog_pages: int | None = None
    writeback_backlog_bytes: int | None = None
    writeback_backlog_bytes_smoothed: int | None = None
    tasks: Annotated[int | None, Field(description="live tasks of the daemon's loop")] = None
    descriptors: int | None = None
    rss_bytes: Annotated[int | None, Field(description="resident memory, DRAM segments included")] = None
