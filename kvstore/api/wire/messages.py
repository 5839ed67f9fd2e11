"""The meta parts of control frames: typed, checked when they are decoded. MessagePack maps with string keys."""

from typing import Any, TypeVar

import msgspec

from kvstore.errors import BadRequest, ProtocolError


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all metas. Unknown fields are ignored, so that fields can be added."""


class Empty(Message):
    """A frame that says it all by its type."""


class Hello(Message):
    """First frame of a client. `session` joins an earlier connection's session (16 bytes), empty for a new one."""

    versions: list[int]
    client: str = ""
    token: str = ""
    session: bytes = b""


class Welcome(Message):
    """The daemon's answer. `epoch` changes with every start of the daemon: leases do not outlive it.

    `same_host` is the endpoint at which a client on the machine `host` (see same_host.py) gets shared memory; empty if there is none.
    `connection` numbers the connections of the session, for CLOSE; a daemon that does not know CLOSE leaves it out.
    `store` (16 bytes) stays the same as long as the data directory is there.
    Puts of up to `put_bytes`, as stored (each part with its digests, in steps of 256 bytes), find room beside another one; 0: not said.
    """

    version: int
    epoch: int
    session: bytes
    server: str
    endpoint: str
    same_host: str = ""
    host: str = ""
    connection: int = 0
    store: bytes = b""
    put_bytes: int = 0


class ErrorReply(Message):
    """A typed error; it ends the request. Of a list of pages, or a prefix that was put, those before `done_pages` are done."""

    code: str
    message: str
    retry_after_ms: int | None = None
    done_pages: int = 0


class Cancel(Message):
    """Stop the request of this number on this connection."""

    target: int


class Close(Message):
    """End another connection of this session, which has stopped working; answered once what it had under way has ended."""

    connection: int


class CreateNamespace(Message):
    """Open or create. `spec` as in KVSpec.to_dict."""

    name: str
    fingerprint: str
    spec: dict[str, Any]
    recipes: bool = False
    retention_s: int = 86_400
    ttl_s: int = 0
    prefill_us: float = 0.0
    prefill_ns_per_position: float = 0.0
    rebuild: str = "exact"
    lossy: bool = False


class NamespaceName(Message):
    """A namespace by id or name."""

    namespace: str


class NamespaceInfo(Message):
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
    ttl_s: int = 0
    prefill_us: float = 0.0
    prefill_ns_per_position: float = 0.0
    rebuild: str = "exact"
    lossy: bool = False


class NamespaceList(Message):
    """A tenant's namespaces."""

    items: list[NamespaceInfo]


class HintsMeta(Message):
    """What a client may say of a request (see Hints). `session` has at most 64 bytes."""

    session: bytes = b""
    turn: str = ""
    ended: str = ""
    ttl_ms: int = 0


class EstimateAsk(Message):
    """Asks a match what loading costs beside computing. Computing a token takes `prefill_us`, and so much more for each token before it; if
    both are 0, the namespace's cost counts. A link of 0 is that of the measured rate.
    """

    prefill_us: float = 0.0
    prefill_ns_per_position: float = 0.0
    link_bytes_s: float = 0.0


class MatchRequest(Message):
    """Payload: the tokens (uint32 little-endian), then 32 bytes of extra digest for each of `extra_pages`.

    With a lease as `base` the tokens are those after it, and `extra_pages` count from there. `boundaries` asks for all that are usable.
    `hints` count with a lease only. `rebuildable` asks how much of the rest can be computed again; `rebuild_ms` asks to have that done, and
    waits for it so long at most.
    `places` asks where the parts are in shared memory, which a lease keeps them in. `holes` asks a flat namespace for all pages of the list
    that are there with all their components, and not for its front only.
    """

    namespace: str
    lease_ms: int = 0
    parts: bool = False
    boundaries: bool = False
    base: int = 0
    extra_pages: list[int] = []
    hints: HintsMeta | None = None
    estimate: EstimateAsk | None = None
    rebuildable: bool = False
    rebuild_ms: int = 0
    places: bool = False
    holes: bool = False


PartRangeList = list[tuple[int, int, int, int, int]]
"""component, layer_lo, layer_hi, head_lo, head_hi for each part of a page."""


class PartRunMeta(Message):
    """Consecutive pages whose parts have one geometry."""

    first_page: int
    pages: int
    parts: PartRangeList


class TierRunMeta(Message):
    """Pages in a row whose bytes are in one tier, and what it takes to load and to compute them."""

    tier: str
    first_page: int
    pages: int
    nbytes: int
    load_s: float
    recompute_s: float | None = None


class EstimateMeta(Message):
    """What the matched pages cost. Best is to load `pages` and to compute the rest, in `seconds`; no `recompute_s` if no cost is known."""

    runs: list[TierRunMeta]
    load_s: float
    pages: int
    seconds: float
    link_bytes_s: float
    ssd_bytes_s: float
    recompute_s: float | None = None


class Matched(Message):
    """Payload: if parts were asked for, 16 bytes of blob id for each part to load of each page, in order.

    `pages` is the longest usable boundary, `known_pages` how far the pages go; `boundaries` are the usable ones as half-open runs.
    Where those are more, the components that their end `lacks` (see docs/protocol.md).
    If the cut of the `estimate` takes other parts than a front of these, `cut_runs` are they, and their ids come after the others.
    `rebuildable_pages` after `pages` can be computed again (-1 if it was not asked for).
    With `places` the place of each part of `runs` (see same_host.py) follows all ids. With `holes` the `runs` name the pages that are
    there, and `pages` is the end of the last of them.
    """

    pages: int
    tokens: int
    epoch: int
    endpoint: str
    known_pages: int = 0
    boundaries: list[tuple[int, int]] = []
    dram_pages: int = -1
    lease: int = 0
    lease_ms: int = 0
    runs: list[PartRunMeta] = []
    estimate: EstimateMeta | None = None
    cut_runs: list[PartRunMeta] = []
    rebuildable_pages: int = -1
    places: bool = False
    lacks: list[tuple[int, int, int, int, int]] = []


class LeaseRequest(Message):
    """Renew (with `lease_ms`) or release a lease.

    A client that copies out of shared memory says what it has since it last did: fetches, bytes, and microseconds in all.
    A release that is `quiet` is not answered, also if the lease is over already.
    """

    lease: int
    lease_ms: int = 0
    copied_fetches: int = 0
    copied_bytes: int = 0
    copied_us: int = 0
    quiet: bool = False


class Leased(Message):
    """A lease and how long it lasts from now."""

    lease: int
    lease_ms: int


class FetchRequest(Message):
    """Payload: `blobs` ids of 16 bytes, then runs of 32 bytes (see runs.py).

    With `provisional` the ids name parts of puts that this client follows (see runs.py), which may still be arriving.
    `frame_bytes`: of payload in a DATA frame, at most; 0 for as many as a frame may have. A longer piece has a frame of its own.
    `priority` is `interactive` or `bulk`; what says neither is bulk. `ahead` are the ids of at most 64 more blobs, 16 bytes each, that will
    probably be asked for next, in that order: they are brought into DRAM, if that can be done.
    """

    namespace: str
    blobs: int
    provisional: bool = False
    frame_bytes: int = 0
    priority: str = ""
    ahead: bytes = b""


class Fetched(Message):
    """All pieces were sent."""

    pieces: int
    payload_bytes: int


class Prefix(Message):
    """A prefix that something is told about; payload as in MatchRequest. PREFETCH, PIN, ABANDON and DELETE use what they need of it.

    ABANDON with a `session` has no payload: it is about all that the session used last. PREFETCH with `rebuild` asks to
    compute what is gone again, if that can be done `within_ms` (0: at any time). PIN with a `handle` (63 random bits) makes the pin of that
    number, once.
    """

    namespace: str
    first_page: int = 0
    last_page: int = -1
    ttl_ms: int = 0
    extra_pages: list[int] = []
    session: bytes = b""
    rebuild: bool = False
    within_ms: int = 0
    handle: int = 0


class Prefetched(Message):
    """What was brought up into DRAM. `rebuilding_pages` more are being computed again; `why_not` says why not others."""

    pages: int
    blobs: int
    nbytes: int
    rebuilding_pages: int = 0
    why_not: str = ""


class Pinned(Message):
    """A pin of so many pages; also what ends one."""

    namespace: str
    pin: int
    pages: int = 0


class Affected(Message):
    """How many pages it concerned."""

    pages: int


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """A meta as bytes. Raises BadRequest for what no message can carry, such as a number over 64 bits."""
    try:
        return _encoder.encode(message)
    except OverflowError as error:
        raise BadRequest(f"this request can't be sent: {error}") from None


def unpack(kind: type[M], meta: bytes) -> M:
    """A meta from bytes. Raises ProtocolError if they are not one of this kind."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: M = decoder.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {kind.__name__}: {error}") from error
    return message


def unpack_request(kind: type[M], meta: bytes) -> M:
    """As `unpack`, for who answers it: raises BadRequest if the meta can be read, and a field is of the wrong kind."""
    try:
        return unpack(kind, meta)
    except ProtocolError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise BadRequest(f"this request ({kind.__name__}) can't be understood: {error.__cause__}") from None
        raise
