"""The bodies of the control plane, both ways: handlers read requests with them and build replies from them, and
`openapi.py` turns them into the document, so that it says what the daemon does.

Requests are strict: no unknown fields, no text where a number belongs. Sizes are in bytes, times in seconds.
"""

import base64
import binascii
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, RootModel, Tag

from kvstore.api.estimates import prefill_of
from kvstore.errors import BadRequest
from kvstore.kvspec import AXIS_ORDER, DTYPE_BYTES, MAX_PAGE_TOKENS, MAX_SLICE_BYTES, ComponentKind, KVSpec
from kvstore.radix.components import Lack
from kvstore.store.checking.verify import CheckReport
from kvstore.store.matching.cut import Ask
from kvstore.store.settings import Rebuild

NAME_PATTERN = r"^[A-Za-z0-9._:@-]{1,200}$"
BLOB_PATTERN = r"^[0-9a-f]{32}$"
BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
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


WHOLE = BeforeValidator(_whole)
PinId = Annotated[str, Field(pattern=r"^[0-9]{1,19}$", description="a number of 63 bits, as text, as JSON's numbers lose some")]
BlobId = Annotated[str, Field(pattern=BLOB_PATTERN)]


PrefillUs = Annotated[float, Field(ge=0, lt=1e12, description="microseconds to compute a token; 0 if it is not known")]
PrefillNs = Annotated[float, Field(ge=0, lt=1e15, description="nanoseconds more for each token before it")]


class RequestModel(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class ReplyModel(BaseModel):
    """Base of what the daemon sends. Fields can be added; those here stay."""

    model_config = ConfigDict(frozen=True, defer_build=True)


# --- namespaces ------------------------------------------------------------------------------------------------------------


class ComponentBody(RequestModel):
    """One kind of state in a model."""

    kind: ComponentKind
    layers: Annotated[int, Field(ge=1, le=_U16), WHOLE]
    kv_heads: Annotated[int, Field(ge=1, le=_U16), WHOLE]
    head_dim: Annotated[int, Field(ge=1, le=_U16), WHOLE]
    dtype: Annotated[str, Field(json_schema_extra={"enum": list(DTYPE_BYTES)})] = "bf16"
    planes: Annotated[int, Field(ge=1, le=_U16, description="2 for keys and values, 1 for a compressed latent"), WHOLE] = 2
    window: Annotated[int, Field(ge=0, description="tokens, the current one included; for `window` components, and only there"), WHOLE] = 0


class SpecBody(RequestModel):
    """A KV spec."""

    page_tokens: Annotated[int, Field(ge=1, le=MAX_PAGE_TOKENS), WHOLE]
    components: Annotated[list[ComponentBody], Field(min_length=1, max_length=16)]
    axis_order: Annotated[str, Field(json_schema_extra={"enum": [AXIS_ORDER]})] = AXIS_ORDER
    max_slice_bytes: Annotated[int, Field(ge=4096, le=MAX_SLICE_BYTES), WHOLE] = MAX_SLICE_BYTES
    group_layers: Annotated[int, Field(ge=0, le=_U16, description="most layers in one slice; 0 for as many as fit"), WHOLE] = 0
    hash_bytes: Annotated[
        int,
        Field(
            json_schema_extra={"enum": _HASH_BYTES},
            description="pages are labelled with digests of so many bytes, or token ids",
        ),
        WHOLE,
    ] = 0
    flat: Annotated[bool, Field(description="those digests form no chains: every page stands alone")] = False


class NamespaceBody(RequestModel):
    """Body of POST /v1/namespaces."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    fingerprint: Annotated[str, Field(min_length=1, max_length=200, description="model fingerprint: names weights, never only a model")]
    spec: SpecBody
    recipes: Annotated[bool, Field(description="allow token ids on disk")] = False
    retention_s: Annotated[int, Field(ge=0, le=_TEN_YEARS, description="durable pages are kept at least so long"), WHOLE] = 86_400
    ttl_s: Annotated[int, Field(ge=0, le=_TEN_YEARS, description="pages that nobody used for so long are removed; 0 for never"), WHOLE] = 0
    rebuild: Annotated[Rebuild, Field(description="what counts as the same page when it is computed again; `never` discards nothing")] = (
        "exact"
    )
    lossy: Annotated[bool, Field(description="pages may be discarded before their recipes are durable")] = False
    prefill_us: PrefillUs = 0.0
    prefill_ns_per_position: PrefillNs = 0.0


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
    rebuild: Rebuild = "exact"
    lossy: bool = False
    prefill_us: Annotated[float, Field(description="microseconds to compute a token; 0 if nobody has said")] = 0.0
    prefill_ns_per_position: Annotated[float, Field(description="nanoseconds more for each token before it")] = 0.0
    tenant: Annotated[str | None, Field(description="to those who see several tenants'")] = None


class NamespaceDetail(Namespace):
    """A namespace, with what it costs."""

    memory_bytes: Annotated[dict[str, int], Field(description="memory of its tree by kind, the bytes of pages not counted")]


class NamespaceList(ReplyModel):
    """A tenant's namespaces."""

    items: list[Namespace]


# --- match -----------------------------------------------------------------------------------------------------------------


class EstimateBody(RequestModel):
    """What to reckon with; without a prefill cost, that of the namespace."""

    prefill_us: PrefillUs = 0.0
    prefill_ns_per_position: PrefillNs = 0.0
    link_bytes_s: Annotated[float | None, Field(ge=1, le=1e15, description="the rate that is measured, if not given")] = None

    def ask(self) -> Ask:
        """As the store takes it. Raises BadRequest."""
        return Ask(prefill_of(self.prefill_us, self.prefill_ns_per_position), self.link_bytes_s or 0.0)


_ESTIMATE = Field(description="say what loading costs beside computing, and where to cut between both")


WaitS = Annotated[float, Field(ge=0, le=60, description="seconds to wait at most until missing pages are computed again; 0 asks for none")]


class MatchByNumbers(RequestModel):
    """Tokens as numbers."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], WHOLE]
    parts: Annotated[bool, Field(description="list the parts too")] = False
    estimate: Annotated[EstimateBody | None, _ESTIMATE] = None
    rebuild_s: WaitS = 0

    def token_bytes(self, spec: KVSpec) -> bytes:
        """The tokens as the tree takes them. Raises BadRequest."""
        return from_numbers(self.tokens, spec)


class MatchByBytes(RequestModel):
    """Tokens as uint32, little-endian, in base64; where pages are labelled with digests, the digests."""

    tokens_base64: Annotated[str, Field(pattern=BASE64_PATTERN, json_schema_extra={"contentEncoding": "base64"})]
    parts: Annotated[bool, Field(description="list the parts too")] = False
    estimate: Annotated[EstimateBody | None, _ESTIMATE] = None
    rebuild_s: WaitS = 0

    def token_bytes(self, spec: KVSpec) -> bytes:
        """The tokens, or digests, as the tree takes them. Raises BadRequest."""
        return from_base64(self.tokens_base64, spec)


def from_numbers(tokens: list[int], spec: KVSpec) -> bytes:
    """Tokens from numbers. Raises BadRequest where pages are labelled with digests: there they would be taken for those."""
    if spec.hash_bytes:
        raise BadRequest(
            f"this namespace is of digests of {spec.hash_bytes} bytes, not of tokens: give those as tokens_base64, one after the other"
        )
    return np.array(tokens, "<u4").tobytes()


def from_base64(text: str, spec: KVSpec) -> bytes:
    """Tokens, or whole digests, from base64. Raises BadRequest."""
    try:
        labels = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"tokens_base64 is not base64: {error}") from error
    if spec.hash_bytes and len(labels) % spec.hash_bytes:
        raise BadRequest(f"tokens_base64 is {len(labels)} bytes, and this namespace is of digests of {spec.hash_bytes}: give whole ones")
    return labels


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


class TierRun(ReplyModel):
    """Pages in a row whose bytes are in one tier."""

    tier: Annotated[Literal["dram", "ssd", "mixed"], Field(description="mixed: all that comes after 255 runs")]
    first_page: int
    pages: int
    nbytes: int
    load_s: float
    recompute_s: Annotated[float | None, Field(description="null if no prefill cost is known")] = None


class Estimate(ReplyModel):
    """What the matched pages cost. Best is to load the first `pages` and to compute the rest of them, which takes `seconds` in all."""

    runs: list[TierRun]
    load_s: float
    recompute_s: float | None = None
    pages: int
    seconds: float
    link_bytes_s: float
    ssd_bytes_s: float


class LackNow(ReplyModel):
    """A component that keeps a match from going to the end of the pages that are there."""

    component: int
    kind: ComponentKind
    pages: Annotated[int, Field(description="how far it alone would let a match go")]
    first_page: Annotated[int, Field(description="of the pages on which it is missing, of those that the end needs it on")]
    last_page: Annotated[int, Field(description="the page after the last one of them")]
    missing_pages: int


def lacks_now(spec: KVSpec, lacks: tuple[Lack, ...]) -> list[LackNow] | None:
    """What is told of them; None if there are none."""
    return [LackNow(kind=spec.components[lack.component].kind, **asdict(lack)) for lack in lacks] or None


class Match(ReplyModel):
    """The longest prefix that is in the store. `runs` and `blobs` only if parts were asked for."""

    pages: int
    tokens: int
    known_pages: Annotated[int, Field(description="how far the pages go; `pages` is the longest usable boundary among them")]
    lacks: Annotated[list[LackNow] | None, Field(description="why `pages` are less than `known_pages`, if they are")] = None
    dram_pages: int
    rebuildable_pages: Annotated[int, Field(description="after `pages`, that are gone but can be computed again")] = 0
    epoch: int
    endpoints: list[str]
    runs: list[PartRun] | None = None
    blobs: Annotated[list[BlobId] | None, Field(description="a blob id for each part of each page, in order")] = None
    estimate: Annotated[Estimate | None, Field(description="if it was asked for, and there is a page")] = None


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
