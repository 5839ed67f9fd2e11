"""What the handlers of the data plane's requests share: who asks, replies to be, and the answer to a match."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Protocol

from kvstore.api.convert import boundary_runs, part_runs
from kvstore.api.estimates import estimate_meta
from kvstore.api.same_host import SameHostPeer
from kvstore.api.sessions import Session
from kvstore.api.wire.frames import MAX_CONTROL_PAYLOAD, FrameType
from kvstore.api.wire.messages import Empty, Matched, MatchRequest, Message
from kvstore.api.wire.same_host import PLACE_BYTES
from kvstore.store import Match, Space, Store


class Context(Protocol):
    """Who asks, and whom."""

    store: Store
    session: Session
    endpoint: str
    same_host: SameHostPeer | None
    number: int
    """Of this connection in its session."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply frame to be."""

    type: FrameType
    message: Message
    payload: bytes = b""
    descriptors: tuple[int, ...] = ()
    """Sent with it, and closed then."""
    unsent: Callable[[], None] | None = None
    """Called if the descriptors can't be sent now, while the connection goes on."""
    after: Callable[[], None] | None = None
    """What was put off until the answer is out; done in any case before anybody else gets a turn."""


OK = Reply(FrameType.OK, Empty())


def space_of(context: Context, name: str) -> Space:
    """A namespace of who asks. Raises UnknownNamespace."""
    return context.store.space(context.session.tenant, name)


def matched(
    context: Context, message: MatchRequest, match: Match, rebuildable_pages: int = -1, after: Callable[[], None] | None = None
) -> Reply:
    """The answer to a match."""
    ids = [table.ids for table in (match.parts, match.cut_parts) if table is not None]
    near = message.places and match.lease is not None and context.same_host is not None
    if near and match.parts and sum(map(len, ids)) + PLACE_BYTES * len(match.parts.rows) > MAX_CONTROL_PAYLOAD:
        near = False  # they don't fit: the client fetches, or asks with LOCATE
    places = [context.store.sharing.places(match.lease.space, match.parts.rows)] if near and match.lease and match.parts else []
    return Reply(
        FrameType.MATCHED,
        Matched(
            pages=match.pages, tokens=match.tokens, known_pages=match.known_pages, boundaries=boundary_runs(match.boundaries),
            dram_pages=match.dram_pages, epoch=context.store.epoch, endpoint=context.endpoint,
            lease=match.lease.id if match.lease else 0, lease_ms=message.lease_ms if match.lease else 0,
            runs=part_runs(match.parts) if match.parts else [], estimate=estimate_meta(match.estimate),
            cut_runs=part_runs(match.cut_parts) if match.cut_parts else [], rebuildable_pages=rebuildable_pages,
            places=bool(places), lacks=[astuple(lack) for lack in match.lacks],
        ),
        b"".join(ids + places),
        after=after,
    )  # fmt: skip
