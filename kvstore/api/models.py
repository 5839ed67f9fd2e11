"""The bodies of the control plane, both ways: handlers read requests with them and build replies from them, and
`openapi.py` turns them into the document, so that it says what the daemon does.

Requests are strict: no unknown fields, no text where a number belongs. Sizes are in bytes, times in seconds.
"""

import base64
import binascii
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, RootModel, Tag, model_validator
from pydantic_core import PydanticCustomError

from kvstore.errors import BadRequest
from kvstore.hints import MAX_SESSION_BYTES
from kvstore.kvspec import AXIS_ORDER, DTYPE_BYTES, MAX_PAGE_TOKENS, MAX_SLICE_BYTES, ComponentKind
from kvstore.store.leases import MAX_PIN_S
from kvstore.store.recovery import LoadProgress
from kvstore.store.scrub import ScrubProgress
from kvstore.store.ssd_state import SsdState
from kvstore.store.stats import Stats
from kvstore.store.verify import CheckReport
from kvstore.tiers.dram import SegmentUsage

NAME_PATTERN = r"^[A-Za-z0-9._:@-]{1,200}$"
BLOB_PATTERN = r"^[0-9a-f]{32}$"
_BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_U16 = (1 << 16) - 1
_HASH_BYTES: list[JsonValue] = [0, 16, 20, 24, 28, 32]
_TEN_YEARS = 10 * 365 * 86_400


def _whole(value: object) -> object:
    """JSON has one kind of number: 64.0 is as whole as 64, though `strict` alone would refuse it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and any(isinstance(item, float) for item in value):
        return [_whole(item) for item in value]
    return value


_WHOLE = BeforeValidator(_whole)
PinId = Annotated[str, Field(pattern=r"^[0-9]{1,19}$", description="a number of 63 bits, as text, as JSON's numbers lose some")]
BlobId = Annotated[str, Field(pattern=BLOB_PATTERN)]


class RequestModel(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReplyModel(BaseModel):
    """Base of what the daemon sends. Fields can be added; those here stay."""

    model_config = ConfigDict(frozen=True)


# --- namespaces ------------------------------------------------------------------------------------------------------------


class ComponentBody(RequestModel):
    """One kind of state in a model."""

    kind: ComponentKind
    layers: Annotated[int, Field(ge=1, le=_U16), _WHOLE]
    kv_heads: Annotated[int, Field(ge=1, le=_U16), _WHOLE]
    head_dim: Annotated[int, Field(ge=1, le=_U16), _WHOLE]
    dtype: Annotated[str, Field(json_schema_extra={"enum": list(DTYPE_BYTES)})] = "bf16"
    planes: Annotated[int, Field(ge=1, le=_U16, description="2 for keys and values, 1 for a compressed latent"), _WHOLE] = 2
    window: Annotated[int, Field(ge=0, description="tokens, the current one included; for `window` components, and only there"), _WHOLE] = 0


class SpecBody(RequestModel):
    """A KV spec."""

    page_tokens: Annotated[int, Field(ge=1, le=MAX_PAGE_TOKENS), _WHOLE]
    components: Annotated[list[ComponentBody], Field(min_length=1, max_length=16)]
    axis_order: Annotated[str, Field(json_schema_extra={"enum": [AXIS_ORDER]})] = AXIS_ORDER
    max_slice_bytes: Annotated[int, Field(ge=4096, le=MAX_SLICE_BYTES), _WHOLE] = MAX_SLICE_BYTES
    group_layers: Annotated[int, Field(ge=0, le=_U16, description="most layers in one slice; 0 for as many as fit"), _WHOLE] = 0
    hash_bytes: Annotated[
        int,
        Field(
            json_schema_extra={"enum": _HASH_BYTES},
            description="pages are labelled with digests of so many bytes, or token ids",
        ),
        _WHOLE,
    ] = 0
    flat: Annotated[bool, Field(description="those digests form no chains: every page stands alone")] = False


class NamespaceBody(RequestModel):
    """Body of POST /v1/namespaces."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    fingerprint: Annotated[str, Field(min_length=1, max_length=200, description="model fingerprint: names weights, never only a model")]
    spec: SpecBody
    recipes: Annotated[bool, Field(description="allow token ids on disk")] = False
    retention_s: Annotated[int, Field(ge=0, le=_TEN_YEARS, description="durable pages are kept at least so long"), _WHOLE] = 86_400
    ttl_s: Annotated[int, Field(ge=0, le=_TEN_YEARS, description="pages that nobody used for so long are removed; 0 for never"), _WHOLE] = 0


class Namespace(ReplyModel):
    """A namespace and what it holds."""

    id: str
    name: str
    fingerprint: str
    spec: dict[str, Any]
    recipes: bool
    retention_s: int
    pages: int
    blobs: int
    dram_bytes: int
    ttl_s: Annotated[int, Field(description="0 for none")] = 0
    tenant: Annotated[str | None, Field(description="to those who see several tenants'")] = None


class NamespaceDetail(Namespace):
    """A namespace, with what it costs."""

    memory_bytes: Annotated[dict[str, int], Field(description="memory of its tree by kind, the bytes of pages not counted")]


class NamespaceList(ReplyModel):
    """A tenant's namespaces."""

    items: list[Namespace]


# --- match -----------------------------------------------------------------------------------------------------------------


class MatchByNumbers(RequestModel):
    """Tokens as numbers."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], _WHOLE]
    parts: Annotated[bool, Field(description="list the parts too")] = False

    def token_bytes(self) -> bytes:
        """The tokens as the tree takes them."""
        return np.array(self.tokens, "<u4").tobytes()


class MatchByBytes(RequestModel):
    """Tokens as uint32, little-endian, in base64; where pages are labelled with digests, the digests."""

    tokens_base64: Annotated[str, Field(pattern=_BASE64_PATTERN, json_schema_extra={"contentEncoding": "base64"})]
    parts: Annotated[bool, Field(description="list the parts too")] = False

    def token_bytes(self) -> bytes:
        """The tokens as the tree takes them. Raises BadRequest."""
        return from_base64(self.tokens_base64)


def from_base64(text: str) -> bytes:
    """Tokens from base64. Raises BadRequest."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"tokens_base64 is not base64: {error}") from error


def _which(body: object) -> str | None:
    given = [name for name in ("tokens", "tokens_base64") if isinstance(body, dict) and name in body]
    return given[0] if len(given) == 1 else None


class MatchBody(
    RootModel[
        Annotated[
            Annotated[MatchByNumbers, Tag("tokens")] | Annotated[MatchByBytes, Tag("tokens_base64")],
            Discriminator(_which, custom_error_type="tokens", custom_error_message="give either tokens or tokens_base64"),
        ]
    ]
):
    """Body of POST /v1/namespaces/{namespace}/match."""


class PartRun(ReplyModel):
    """Consecutive pages whose parts have one geometry."""

    first_page: int
    pages: int
    parts: Annotated[
        list[tuple[int, int, int, int, int]], Field(description="component, layer_lo, layer_hi, head_lo, head_hi; ranges are half-open")
    ]


class Match(ReplyModel):
    """The longest prefix that is in the store. `runs` and `blobs` only if parts were asked for."""

    pages: int
    tokens: int
    known_pages: Annotated[int, Field(description="how far the pages go; `pages` is the longest usable boundary among them")]
    dram_pages: int
    epoch: int
    endpoints: list[str]
    runs: list[PartRun] | None = None
    blobs: Annotated[list[BlobId] | None, Field(description="a blob id for each part of each page, in order")] = None


# --- what is told about prefixes -------------------------------------------------------------------------------------------


def _exactly_one(*names: str) -> ConfigDict:
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in names]})


_PREFIX = ("tokens", "tokens_base64")
_LARGEST = (1 << 53) - 1
FromToken = Annotated[int, Field(ge=0, le=_LARGEST, description="from the page on that this token is in"), _WHOLE]


class PrefixBody(RequestModel):
    """A prefix: either its tokens, or those as uint32, little-endian, in base64 (where pages are labelled with digests, the digests)."""

    model_config = _exactly_one(*_PREFIX)
    one_of: ClassVar[tuple[str, ...]] = _PREFIX

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], _WHOLE] = []
    tokens_base64: Annotated[str, Field(pattern=_BASE64_PATTERN, json_schema_extra={"contentEncoding": "base64"})] = ""

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        if len(self.model_fields_set.intersection(self.one_of)) != 1:
            raise PydanticCustomError("prefix", "give one of {names}", {"names": ", ".join(self.one_of)})
        return self

    def token_bytes(self) -> bytes:
        """The tokens as the tree takes them. Raises BadRequest."""
        if "tokens" in self.model_fields_set:
            return np.array(self.tokens, "<u4").tobytes()
        return from_base64(self.tokens_base64)


class PrefetchBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/prefetch."""

    first_page: Annotated[int, Field(ge=0, le=_LARGEST), _WHOLE] = 0
    last_page: Annotated[int, Field(ge=-1, le=_LARGEST, description="the page after the last one; -1 for all there are"), _WHOLE] = -1


class WhyBody(PrefetchBody):
    """Body of POST /v1/namespaces/{namespace}/why."""


class PinBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/pin."""

    ttl_s: Annotated[float, Field(gt=0, le=MAX_PIN_S, description="when it ends, counted from now")]


class DeleteBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/delete."""

    from_token: FromToken = 0


class AbandonBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/abandon: a prefix, or a session as it is named in hints."""

    model_config = _exactly_one(*_PREFIX, "session")
    one_of: ClassVar[tuple[str, ...]] = (*_PREFIX, "session")

    session: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_BYTES, description="at most 64 bytes of UTF-8")] = ""
    from_token: FromToken = 0


class UnpinBody(RequestModel):
    """Body of POST /v1/namespaces/{namespace}/unpin."""

    pin: PinId


class Prefetched(ReplyModel):
    """What was brought up into DRAM; less than asked for where there was no room."""

    pages: Annotated[int, Field(description="pages asked about")]
    blobs: int
    nbytes: int


class Pinned(ReplyModel):
    """A pin. A restart of the daemon ends it, too."""

    pin: PinId
    pages: int
    ttl_s: float


class PageEstimate(ReplyModel):
    """What the classifier knows of a page, and makes of it. Times are in seconds; octaves are given by their middle or least."""

    idle_s: float
    uses: int
    turns: Annotated[int, Field(description="requests of its conversation that each went on from the one before")]
    gap_s: Annotated[float, Field(description="between its last two uses; 0 if there was one")]
    rhythm_s: Annotated[float, Field(description="the conversation's pauses, smoothed")]
    depth_pages: int
    children: Annotated[int, Field(description="different pages that follow on it")]
    abandoned: bool
    score: Annotated[float, Field(description="chance of use within the horizon, as it was at its last use")]
    horizon_s: float
    chance: Annotated[float, Field(description="of use before LRU would evict it, now that it has been idle so long")]
    value: Annotated[float, Field(description="reuses a second of keeping it; the least goes first")]
    floor: Annotated[float, Field(description="the value up to which pages went at the last eviction")]
    follows: Annotated[Literal["estimates", "lru"], Field(description="who decides, as they do better of late")]


class PageWhy(ReplyModel):
    """One page: where it is, and why."""

    page: int
    in_dram: bool
    on_ssd: bool
    leased: bool
    rank: Annotated[int | None, Field(description="its place among the pages that can leave DRAM, 0 for who goes first")] = None
    decision: str
    estimate: Annotated[PageEstimate | None, Field(description="by the policy `classifier` only")] = None


class Why(ReplyModel):
    """Pages of a prefix, where they are, and why."""

    policy: str
    pages: Annotated[int, Field(description="of the prefix that are there")]
    candidates: Annotated[int, Field(description="pages of the namespace that can leave DRAM now")]
    found: Annotated[list[PageWhy], Field(description="those asked about, at most 1024")]


class Affected(ReplyModel):
    """How many pages it concerned."""

    pages: int


# --- health ----------------------------------------------------------------------------------------------------------------


class Health(ReplyModel):
    """The process lives."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(ReplyModel):
    """It serves, and this is where. While it loads, matches give what is there already, and puts get `busy`."""

    status: Literal["ready", "loading"] = "ready"
    loading: Annotated[LoadProgress | None, Field(description="pages that are back, while it loads")] = None
    ssd_state: Annotated[SsdState | None, Field(description="if the disk is not well; the store serves on from DRAM")] = None
    epoch: Annotated[int, Field(description="changes with every start of the daemon")]
    endpoints: Annotated[list[str], Field(description="the data plane's addresses")]


class TierUsage(ReplyModel):
    """Bytes of a tier."""

    capacity: int
    used: int


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
    dram_segments: SegmentUsage | None = None
    totals: Annotated[Stats | None, Field(description="counters since start")] = None
    pending_pages: Annotated[int | None, Field(description="pages of which other shards are still to come")] = None
    pinned_blobs: int | None = None
    loading: LoadProgress | None = None
    ssd_state: SsdState | None = None
    scrub: ScrubProgress | None = None
    writeback_backlog_pages: int | None = None
    writeback_backlog_bytes: int | None = None
    writeback_backlog_bytes_smoothed: int | None = None
    tasks: Annotated[int | None, Field(description="live tasks of the daemon's loop")] = None
    descriptors: int | None = None
    rss_bytes: Annotated[int | None, Field(description="resident memory, DRAM segments included")] = None


# --- check -----------------------------------------------------------------------------------------------------------------


class CheckProgressLine(ReplyModel):
    """How far a check is, in bytes of stored blobs."""

    event: Literal["progress"] = "progress"
    namespace: str
    done_bytes: int
    total_bytes: int


class CheckResultLine(ReplyModel):
    """What a check found. It is the last line."""

    event: Literal["result"] = "result"
    report: CheckReport


class CheckProblemLine(ReplyModel):
    """The check ended early. It is the last line."""

    event: Literal["problem"] = "problem"
    code: str
    detail: str


class CheckLine(RootModel[Annotated[CheckProgressLine | CheckResultLine | CheckProblemLine, Field(discriminator="event")]]):
    """One line of the answer to POST /v1/check."""


# --- errors ----------------------------------------------------------------------------------------------------------------


class Problem(ReplyModel):
    """An error (RFC 9457). `code` is stable, and the same as on the data plane."""

    type: str
    title: str
    status: int
    detail: Annotated[str, Field(description="what was wrong, where, and what to do")]
    code: str
    request_id: str
    retry_after_ms: int | None = None
