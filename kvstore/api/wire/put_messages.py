"""The metas of puts, and of who follows one while it is under way."""

from kvstore.api.wire.messages import HintsMeta, Message, PartRangeList


class PutStart(Message):
    """Payload as in MatchRequest; the tokens are the whole prefix, or what follows the lease `base`. Pages from `first_page` on are put.

    `spans` are the pages [first, last) that carry each part; without them all do. With a `handle` (63 random bits) the slices and
    the COMMIT follow at once: there is no PUT_READY, and slices that are not wanted are dropped. `recipes` (one for all pages, or one
    a page) of `recipe_kind` `text` or `reference` are kept in place of the token ids, where the namespace keeps recipes. ABORT ends it by
    its `name` (63 random bits), too, of which its client knows before it hears of the PUT_READY.
    """

    namespace: str
    put_id: bytes
    first_page: int
    parts: PartRangeList
    spans: list[tuple[int, int]] = []
    base: int = 0
    ack: str = "memory"
    extra_pages: list[int] = []
    hints: HintsMeta | None = None
    handle: int = 0
    recipe_kind: str = ""
    recipes: list[bytes] = []
    name: int = 0


class PutReady(Message):
    """Send what `wanted` names, as (part, first page, last page); the rest is there already. The pages before `first_needed` are."""

    handle: int
    first_needed: int
    total_pages: int
    wanted: list[tuple[int, int, int]]


class Commit(Message):
    """Commit a put. `wait_ms`: how long to wait for slices still under way on other connections; `whole_ms`: for other shards."""

    handle: int
    wait_ms: int = 0
    whole_ms: int = 0


class PutHandle(Message):
    """A put under way."""

    handle: int


class Committed(Message):
    """How a put ended. Pending pages still lack other shards. `existing`: in a flat namespace, which pages [first, last) had a version.

    `gained_pages` of those that had one got optional components that they lacked.
    """

    new_pages: int
    existing_pages: int
    pending_pages: int = 0
    existing: list[tuple[int, int]] = []
    gained_pages: int = 0


class Follow(Message):
    """Follow the puts under way of a computation. Waits up to `wait_ms` until there are more than `beyond` of them."""

    namespace: str
    put_id: bytes
    beyond: int = 0
    wait_ms: int = 0


class FollowedPut(Message):
    """A put that is followed: its parts, and what is sent of them as (part, first page, last page)."""

    handle: int
    first_page: int
    total_pages: int
    parts: PartRangeList
    wanted: list[tuple[int, int, int]]


class FollowedPuts(Message):
    """All that this client follows of a computation."""

    items: list[FollowedPut]


class Outcome(Message):
    """Wait until a followed put is committed, and stop following it. A put that ends otherwise is `not_found`."""

    handle: int
    wait_ms: int = 0
