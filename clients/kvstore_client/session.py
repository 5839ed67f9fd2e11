"""A conversation that grows: a cursor in the tree, so that only new tokens travel."""

import contextlib
import secrets
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, Ended, Hints, KVStoreError, NotFound, PartRange
from kvstore_client.estimate import Costs, Estimate
from kvstore_client.put_layout import by_default
from kvstore_client.tokens import Tokens, token_view
from kvstore_client.transfer import Progress

if TYPE_CHECKING:
    from kvstore_client.match import Match
    from kvstore_client.namespace import Namespace
    from kvstore_client.put import PutResult

_ID_BYTES = 16


class Session:
    """The cursor is a leased boundary; `tokens` are all tokens of the conversation so far. Use as an async context manager.

    The lease is renewed by every call. If it was lost (it expired, the connection broke, the daemon was restarted), the next
    call finds the place again with all tokens. `hints` go with every request; without an id in them the session makes one.
    With `costs`, each move of the cursor asks what loading costs beside computing.
    """

    def __init__(self, namespace: "Namespace", *, lease_s: float = 60.0, hints: Hints | None = None, costs: Costs | bool = False) -> None:
        self.namespace = namespace
        self._costs = costs
        hints = hints or Hints()
        self.hints = hints if hints.session else replace(hints, session=secrets.token_bytes(_ID_BYTES))
        self.lease_s = lease_s
        self._tokens = bytearray()
        self._match: Match | None = None
        self._closed = False

    def __repr__(self) -> str:
        spec = self.namespace.spec
        size = f"{len(self._tokens) // (spec.hash_bytes or 4)} {'digests' if spec.hash_bytes else 'tokens'}"
        how = "closed" if self._closed else f"{self.pages} pages leased"
        return f"<Session of {size} in {self.namespace.name!r}, {how}>"

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the lease; the pages stay. The session ends."""
        self._closed = True
        await self._let_go()

    async def _let_go(self) -> None:
        match, self._match = self._match, None
        if match is not None:
            await match.release()

    @property
    def pages(self) -> int:
        """Pages up to the cursor: what of the conversation is in the store and leased."""
        return self._match.pages if self._match is not None else 0

    @property
    def match(self) -> "Match | None":
        """The leased prefix, with all that `Namespace.fetch` needs."""
        return self._match

    @property
    def estimate(self) -> Estimate | None:
        """What loading all up to the cursor costs beside computing it, if that is asked: a `plan` for `fetch`."""
        return self._match.estimate if self._match is not None else None

    @property
    def tokens(self) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint8]:
        """All tokens so far; where pages are labelled with digests, the bytes of those."""
        return self._after(0)

    async def extend(self, tokens: Tokens) -> int:
        """The conversation goes on with these tokens. Moves the cursor as far as the store knows it; returns its pages.

        If that fails the conversation is as it was: extend it again.
        """
        self._raise_if_closed()
        before = len(self._tokens)
        self._tokens += token_view(tokens, self.namespace.spec)
        try:
            await self._seek()
        except BaseException:
            del self._tokens[before:]
            raise
        return self.pages

    @property
    def _flat(self) -> bool:
        """Whether each page stands alone: then nothing builds on a lease, and all digests are matched each time."""
        return self.namespace.spec.flat

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise BadRequest("this session was closed: make another, and extend it by its tokens")

    async def _seek(self) -> None:
        old = self._match
        found = None
        if old is not None and old.lease and not self._flat:
            try:
                found = await self.namespace.match(
                    self._after(old.pages), lease_s=self.lease_s, base=old, hints=self.hints, estimate=self._costs
                )
            except NotFound:
                old = None  # the lease is over: find the place again
        if found is None:
            found = await self.namespace.match(self._after(0), lease_s=self.lease_s, hints=self.hints, estimate=self._costs)
        self._match = found
        if old is not None and old is not found:
            with contextlib.suppress(KVStoreError):  # the cursor has moved, and that lease ends by itself
                await old.release()

    def _after(self, pages: int, *, whole: bool = False) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint8]:
        """The labels after so many pages; of whole pages only, if that is said."""
        spec = self.namespace.spec
        width = spec.label_words * 4
        end = len(self._tokens) // width * width if whole else len(self._tokens)
        told = bytes(memoryview(self._tokens)[pages * width : end])
        return np.frombuffer(told, np.uint8) if spec.hash_bytes else np.frombuffer(told, np.uint32)

    async def fetch(self, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, **options: Any) -> int:
        """Fetch pages up to the cursor (see Namespace.fetch)."""
        self._raise_if_closed()
        if self._match is None:
            await self._seek()
        assert self._match is not None
        return await self.namespace.fetch(self._match, out, pages=pages, wanted=wanted, **options)

    async def put(
        self, data: Any, *, durable: bool = False, ended: Ended | None = None, progress: Progress | None = None, **options: Any
    ) -> "PutResult":
        """Put the whole pages after the cursor, and move it to their end. Only their tokens travel. `ended` says how the turn did."""
        self._raise_if_closed()
        options["parts"] = by_default(self.namespace.spec, options.get("parts"), options.get("put_id"))
        options = {"durable": durable, "progress": progress, "hints": replace(self.hints, ended=ended), **options}
        if self._flat:
            done: PutResult | None = await self.namespace.put(self._after(self.pages, whole=True), data, **options)
        else:
            done = await self._put_after_lease(data, options)
        if done is None:
            done = await self.namespace.put(self._after(0, whole=True), data, first_page=self.pages, **options)
        await self._seek()
        return done

    async def _put_after_lease(self, data: Any, options: dict[str, Any]) -> "PutResult | None":
        """Put what comes after the cursor as just that; None if no lease holds the cursor."""
        if self._match is None or not self._match.lease:
            return None
        try:
            return await self.namespace.put(self._after(self.pages, whole=True), data, base=self._match, **options)
        except NotFound:
            return None

    async def abandon(self, from_page: int = 0, *, from_token: int | None = None) -> int:
        """The conversation will not go on from a page, or a token, on, as after a compaction: its own pages are the first to go."""
        spec, tokens = self.namespace.spec, self.tokens
        first = spec.first_page(from_page, from_token)
        await self._let_go()
        pages = await self.namespace.abandon(tokens, from_page=first)
        words = first * spec.label_words if from_token is None or spec.hash_bytes else from_token
        del self._tokens[words * 4 :]
        return pages
