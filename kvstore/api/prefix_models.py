"""The bodies of the control plane about prefixes: what clients tell of them, and what they are told (see models.py)."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvstore.api.models import BASE64_PATTERN, WHOLE, LackNow, PinId, ReplyModel, RequestModel, from_base64, from_numbers
from kvstore.hints import MAX_SESSION_BYTES
from kvstore.kvspec import KVSpec
from kvstore.lease_times import MAX_PIN_S


def exactly_one(*names: str) -> ConfigDict:
    """A model of which one of these fields has to be given."""
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in names]})


PREFIX = ("tokens", "tokens_base64")
_LARGEST = (1 << 53) - 1
FromToken = Annotated[int, Field(ge=0, le=_LARGEST, description="from the page on that this token is in"), WHOLE]


class PrefixBody(RequestModel):
    """A prefix: either its tokens, or those as uint32, little-endian, in base64 (where pages are labelled with digests, the digests)."""

    model_config = exactly_one(*PREFIX)
    one_of: ClassVar[tuple[str, ...]] = PREFIX

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], WHOLE] = Field(default_factory=list)
    tokens_base64: Annotated[str, Field(pattern=BASE64_PATTERN, json_schema_extra={"contentEncoding": "base64"})] = ""

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        if len(self.model_fields_set.intersection(self.one_of)) != 1:
            raise PydanticCustomError("prefix", "give one of {names}", {"names": ", ".join(self.one_of)})
        return self

    def token_bytes(self, spec: KVSpec) -> bytes:
        """The tokens, or digests, as the tree takes them. Raises BadRequest."""
        if "tokens" in self.model_fields_set:
            return from_numbers(self.tokens, spec)
        return from_base64(self.tokens_base64, spec)


class PrefetchBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/prefetch."""

    first_page: Annotated[int, Field(ge=0, le=_LARGEST), WHOLE] = 0
    last_page: Annotated[int, Field(ge=-1, le=_LARGEST, description="the page after the last one; -1 for all there are"), WHOLE] = -1
    rebuild: Annotated[bool, Field(description="have what is gone computed again, if that pays")] = False
    within_s: Annotated[float, Field(ge=0, le=86_400, description="it pays only if it is there by then; 0 for at any time")] = 0


class WhyBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/why."""

    first_page: Annotated[int, Field(ge=0, le=_LARGEST), WHOLE] = 0
    last_page: Annotated[int, Field(ge=-1, le=_LARGEST, description="the page after the last one; -1 for all there are"), WHOLE] = -1


class PinBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/pin."""

    ttl_s: Annotated[float, Field(gt=0, le=MAX_PIN_S, description="when it ends, counted from now")]


class DeleteBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/delete."""

    from_token: FromToken = 0


class AbandonBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/abandon: a prefix, or a session as it is named in hints."""

    model_config = exactly_one(*PREFIX, "session")
    one_of: ClassVar[tuple[str, ...]] = (*PREFIX, "session")

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
    rebuilding_pages: Annotated[int | None, Field(description="more, that are being computed again")] = None
    why_not: Annotated[str | None, Field(description="why no others are")] = None


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
    ssd_chance: Annotated[float | None, Field(description="of use while SSD would hold it; none if all that leaves DRAM is written")] = None
    ssd_floor: Annotated[float, Field(description="the chance under which pages that left DRAM were not written to SSD")] = 0.0


class PageWhy(ReplyModel):
    """One page: where it is, and why."""

    page: int
    in_dram: bool
    on_ssd: bool
    leased: bool
    gone: Annotated[bool, Field(description="in no tier: what is told of it is what the store remembers")] = False
    rank: Annotated[int | None, Field(description="its place among the pages that can leave DRAM, 0 for who goes first")] = None
    decision: str
    estimate: Annotated[PageEstimate | None, Field(description="by the policy `classifier` only")] = None


class Why(ReplyModel):
    """Pages of a prefix, where they are, and why."""

    policy: str
    pages: Annotated[int, Field(description="of the prefix that are there")]
    usable_pages: Annotated[int, Field(description="of those, the ones that a match finds: it ends where all components are there")]
    lacks: Annotated[list[LackNow] | None, Field(description="why those are fewer, if they are")] = None
    gone: Annotated[int, Field(description="pages that followed on those, and of which the store only remembers their uses")] = 0
    candidates: Annotated[int, Field(description="pages of the namespace that can leave DRAM now")]
    estimated: Annotated[bool, Field(description="whether this number, and the ranks, come from a sample of a large namespace")] = False
    found: Annotated[list[PageWhy], Field(description="those asked about, at most 1024")]


class Affected(ReplyModel):
    """How many pages it concerned."""

    pages: int
