"""What is told about recipes: what there are, deleting them, and giving up pages of which they are kept."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvstore.api.wire import BadRequest, Drift, FrameType, KVSpec
from kvstore.api.wire.messages import Affected, NamespaceName, Prefix
from kvstore.api.wire.rebuild_messages import RebuildProgress, RebuildRequest, RecipeCounts
from kvstore_client.arguments import checked, wrong
from kvstore_client.times import milliseconds, waiting_until
from kvstore_client.tokens import Extras, Tokens, token_view, with_extras

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient


T = TypeVar("T", str, bytes)


@dataclass(frozen=True, slots=True)
class Given:
    """What a client gives for the pages of a put, in place of their token ids: `text`, or a `reference` of its own.

    One body for all pages, or one a page; 4,096 bytes each at most.
    """

    kind: str
    bodies: tuple[bytes, ...]

    @classmethod
    def text(cls, text: str | Sequence[str]) -> "Given":
        """Text that the pages were made from."""
        return cls("text", tuple(one.encode() for one in _one_or_more("text", text, str, "text, or a list of texts, one a page")))

    @classmethod
    def reference(cls, reference: bytes | Sequence[bytes]) -> "Given":
        """Something by which a rebuild worker of this client's finds what the pages were made from."""
        return cls("reference", _one_or_more("reference", reference, bytes, "bytes, or a list of bytes, one a page"))

    def of(self, first: int, last: int, pages: int) -> list[bytes]:
        """The bodies of the pages [first, last) of `pages`. Raises BadRequest if there are too few or too many."""
        if len(self.bodies) not in (1, pages):
            raise BadRequest(f"{len(self.bodies)} recipes for {pages} pages: give one for all, or one a page")
        return list(self.bodies if len(self.bodies) == 1 else self.bodies[first:last])


def _one_or_more(name: str, given: T | Sequence[T], kind: type[T], expected: str) -> tuple[T, ...]:
    if isinstance(given, kind):
        return (given,)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not all(isinstance(one, kind) for one in given):
        raise wrong(name, given, expected)
    return tuple(given)


@dataclass(frozen=True, slots=True)
class RebuildState:
    """Pages usable of those asked for, and the jobs of the namespace that wait, or that a worker has.

    Of a check that is done: how many pages were compared, and the `drift` by dtype.
    """

    pages: int
    wanted_pages: int
    waiting_jobs: int
    claimed_jobs: int
    checked_pages: int = 0
    drift: Mapping[str, Drift] = field(default_factory=dict)


class TextCalls:
    """The part of a namespace that is about its recipes."""

    client: "AsyncClient"
    id: str
    spec: KVSpec

    @checked()
    async def recipes(self, timeout: float | None = None) -> tuple[int, int]:
        """How many recipes the namespace has, and the bytes that they are counted with."""
        found, _ = await self.client.call(FrameType.RECIPES, NamespaceName(namespace=self.id), RecipeCounts, timeout=timeout)
        return found.recipes, found.nbytes

    @checked()
    async def delete_recipes(
        self, tokens: Tokens | None = None, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Delete the recipes of a prefix from a page, or a token, on and of all below it; without tokens, all of the namespace.

        Pages that are there keep theirs. Returns how many were deleted; durable when this returns.
        """
        if tokens is None:
            done, _ = await self.client.call(FrameType.RECIPES_DELETE, Prefix(namespace=self.id), Affected, timeout=timeout)
        else:
            done = await self._affected(FrameType.RECIPES_DELETE, tokens, extras, self.spec.first_page(from_page, from_token), timeout)
        return int(done.pages)

    @checked()
    async def drop_to_text(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Give up the pages of a prefix from a page, or a token, on and all below them on DRAM and SSD, and keep their recipes.

        Returns the pages. Raises Conflict if one has no recipe, or is leased.
        """
        done = await self._affected(FrameType.DROP, tokens, extras, self.spec.first_page(from_page, from_token), timeout)
        return int(done.pages)

    @checked()
    async def rebuild(
        self, tokens: Tokens, *, wait_s: float = 20.0, extras: Extras | None = None, timeout: float | None = None
    ) -> RebuildState:
        """Have the missing pages of a prefix computed again, and wait until they are there, `wait_s` seconds at most.

        Returns how it stands then. Raises RebuildFailed if a page has no recipe, or workers that tried could not compute it.
        """
        return await self._rebuild(tokens, extras, wait_s, timeout)

    @checked()
    async def rebuild_check(
        self, tokens: Tokens, *, from_page: int = 0, wait_s: float = 20.0, extras: Extras | None = None, timeout: float | None = None
    ) -> RebuildState:
        """Have pages that are there computed once more, and compared, `wait_s` seconds at most.

        Returns the drift, if they were by then (`checked_pages`); it is in the figures of the daemon, too.
        """
        return await self._rebuild(tokens, extras, wait_s, timeout, check=True, first_page=from_page)

    async def _rebuild(
        self, tokens: Tokens, extras: Extras | None, wait_s: float, timeout: float | None, *, check: bool = False, first_page: int = 0
    ) -> RebuildState:
        extra_pages, payload = with_extras(token_view(tokens, self.spec), extras)
        message = RebuildRequest(
            namespace=self.id, wait_ms=milliseconds("wait_s", wait_s), check=check, first_page=first_page, extra_pages=extra_pages
        )
        bound = wait_s + self.client.timeout if timeout is None else timeout
        before = waiting_until(message, "wait_ms", time.monotonic() + wait_s)
        found, _ = await self.client.call(FrameType.REBUILD, message, RebuildProgress, payload, bound, before)
        drift = {dtype: Drift(n, differing, odd, most, total) for dtype, n, differing, odd, most, total in found.drift}
        return RebuildState(found.pages, found.wanted_pages, found.waiting_jobs, found.claimed_jobs, found.checked_pages, drift)

    async def _affected(self, kind: FrameType, tokens: Tokens, extras: Extras | None, first_page: int, timeout: float | None) -> Affected:
        extra_pages, payload = with_extras(token_view(tokens, self.spec), extras)
        message = Prefix(namespace=self.id, extra_pages=extra_pages, first_page=first_page)
        done: Affected
        done, _ = await self.client.call(kind, message, Affected, payload, timeout)
        return done
