"""What a daemon is told about prefixes, or about the pages of a flat namespace: bring them up, keep them, give them up, delete them."""

from typing import TYPE_CHECKING

from kvstore.api.wire import BadRequest, FrameType, Hints, KVSpec
from kvstore.api.wire.messages import Affected, Pinned, Prefetched, Prefix
from kvstore.lease_times import MAX_PIN_S, check_seconds
from kvstore_client.arguments import FLAG, checked
from kvstore_client.lists import LIST_PAGES, HowFar, Piece, pieces
from kvstore_client.pins import pin_once, unpin
from kvstore_client.times import milliseconds
from kvstore_client.tokens import Extras, Tokens, token_view

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient


class PrefixCalls:
    """The part of a namespace that tells about prefixes.

    Of a flat namespace a call, but for a pin, takes a list of any length. It goes in pieces of 256 pages, one after the other, within one
    deadline. The first that fails ends the call: its error's `done_pages` says that the pages before that one are done, and none after it.
    """

    client: "AsyncClient"
    id: str
    spec: KVSpec

    @checked(rebuild=FLAG)
    async def prefetch(
        self, tokens: Tokens, *, pages: tuple[int, int] | None = None, extras: Extras | None = None, rebuild: bool = False,
        within_s: float = 0.0, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Bring the pages [first, last) of the longest usable prefix (all of it, if not given) into the daemon's DRAM.

        Of a flat namespace it is what is there of these pages of a list. Returns the blobs that were brought up. Stops early,
        without an error, where DRAM has no room; of more than it holds, the last that came stay. `rebuild` has what is gone computed
        again ahead of need, if there is a worker for it, and it is likely to be there `within_s` (0: at any time).
        """
        first, last = pages or (0, -1)
        within_ms, blobs = milliseconds("within_s", within_s), 0
        with HowFar() as far:
            async with self.client.deadline(timeout):
                for piece in far.through(pieces(self.spec, token_view(tokens, self.spec), extras, first, last)):
                    message = self._prefix(piece)
                    message.rebuild, message.within_ms = rebuild, within_ms
                    done, _ = await self.client.ask(FrameType.PREFETCH, message, Prefetched, piece.payload)
                    blobs += done.blobs
        return blobs

    @checked()
    async def pin(self, tokens: Tokens, ttl_s: float, *, extras: Extras | None = None, timeout: float | None = None) -> tuple[int, int]:
        """Keep the longest usable prefix from being evicted for `ttl_s` seconds (30 days at most), even after this client is gone.

        Returns a number for `unpin`, and the pages pinned. A restart of the daemon ends it. Of a flat namespace it pins what is there of
        a list of up to 256 pages. If the call fails, or is cancelled, a pin that was made all the same is ended, if the daemon can be told
        so within 5 seconds.
        """
        check_seconds("ttl_s", ttl_s, MAX_PIN_S)
        labels, ttl_ms = token_view(tokens, self.spec), max(1, milliseconds("ttl_s", ttl_s))
        if self.spec.flat and (pages := len(labels) // self.spec.hash_bytes) > LIST_PAGES:
            raise BadRequest(
                f"{pages} pages of a flat namespace in one pin: give at most {LIST_PAGES}, and pin the others in further calls, each a pin"
            )
        (piece,) = pieces(self.spec, labels, extras)
        message = self._prefix(piece)
        message.ttl_ms = ttl_ms
        pin = await pin_once(self.client, message, piece.payload, timeout)
        return pin.pin, pin.pages

    @checked()
    async def unpin(self, pin: int, timeout: float | None = None) -> None:
        """End a pin. Raises NotFound if it is over: after a call that ended by its deadline that may be its own doing."""
        await unpin(self.client, Pinned(pin=pin, pages=0, namespace=self.id), timeout)

    @checked()
    async def abandon(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Say that a context will not be used again from a page, or a token, on: its own pages are the first to go, shared ones stay.

        Returns the pages that it concerns. Of a flat namespace it is a list of pages.
        """
        return await self._affect(FrameType.ABANDON, tokens, extras, self.spec.first_page(from_page, from_token), timeout)

    @checked()
    async def abandon_session(self, session: str | bytes, timeout: float | None = None) -> int:
        """Say that a session, as named in hints, is over: what it used last, and nobody else, is the first to go. Returns the pages."""
        message = Prefix(namespace=self.id, session=Hints(session).session_id)
        if not message.session:
            raise BadRequest("the session has no id")
        done, _ = await self.client.call(FrameType.ABANDON, message, Affected, timeout=timeout)
        return int(done.pages)

    @checked()
    async def delete(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Delete a prefix from a page, or a token, on, with everything below it, on every tier; durable when this returns.

        Returns the pages deleted. Raises Conflict if any of it is leased or pinned. Of a flat namespace it is a list of pages: of 256
        that go together all are deleted or none, and `from_page=error.done_pages` goes on with those that are left.
        """
        return await self._affect(FrameType.DELETE, tokens, extras, self.spec.first_page(from_page, from_token), timeout)

    async def _affect(self, kind: FrameType, tokens: Tokens, extras: Extras | None, first: int, timeout: float | None) -> int:
        affected = 0
        with HowFar() as far:
            async with self.client.deadline(timeout):
                for piece in far.through(pieces(self.spec, token_view(tokens, self.spec), extras, first)):
                    done, _ = await self.client.ask(kind, self._prefix(piece), Affected, piece.payload)
                    affected += done.pages
        return affected

    def _prefix(self, piece: Piece) -> Prefix:
        return Prefix(namespace=self.id, extra_pages=piece.extra_pages, first_page=piece.first_page, last_page=piece.last_page)
