"""Recipes of pages as they are in a tree now, and what clients give in place of token ids. Bookkeeping: no await, no I/O."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.drift import sample
from kvstore.errors import BadRequest, Busy
from kvstore.kvspec import PartRange
from kvstore.radix.pages import Slots
from kvstore.store.puts.put import Put
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.recipe import MAX_BODY, Recipe, RecipeKind, RecipePart

_SAMPLED_PARTS = 8
_MAX_GIVEN_BYTES = 32 << 20
_GIVEN_BYTES = 256
"""Of what is given for a page, beside its body."""
_GIVEN_S = 600.0


@dataclass(frozen=True, slots=True)
class Given:
    """What a client gave for a page in place of its token ids, if it comes by the put id of its put."""

    kind: RecipeKind
    body: bytes
    put_id: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Fresh:
    """A recipe as it is now in memory, and the page's place."""

    space: Space
    recipe: Recipe


class RecipeSource:
    """Makes recipes. `view` gives the bytes of a DRAM slot, `now` Unix time in seconds."""

    def __init__(self, view: Callable[[int], memoryview], now: Callable[[], float]) -> None:
        self._view = view
        self._now = now
        self._given: dict[tuple[int, bytes], Given] = {}
        self.given_bytes = 0
        """Held of what was given, with puts under way and for pages whose recipe is to be written."""

    def give(self, put: Put, kind: RecipeKind, bodies: Sequence[bytes]) -> None:
        """What a client gives for the pages of a put in place of token ids: one body for all, or one a page.

        It counts once the put is committed, and is void if that ends otherwise.
        """
        pages = len(put.keys) // KEY_BYTES
        if not put.space.settings.recipes:
            raise BadRequest("this namespace keeps no recipes: create it with recipes = on")
        if len(bodies) not in (1, pages) or max(map(len, bodies)) > MAX_BODY:
            raise BadRequest(f"{len(bodies)} recipes for {pages} pages: give one for all or one a page, of at most {MAX_BODY} bytes each")
        if put.closed:
            return
        nbytes = pages * _GIVEN_BYTES + sum(map(len, bodies)) * (pages if len(bodies) == 1 else 1)
        if self.given_bytes + nbytes > _MAX_GIVEN_BYTES:
            for name in [name for name, given in self._given.items() if given.until < time.monotonic()]:
                self.forget_given(name)
        if self.given_bytes + nbytes > _MAX_GIVEN_BYTES:
            raise Busy("too many recipes are given for pages that are still being put", retry_after_ms=1000)
        self.given_bytes += nbytes

        def ended() -> None:
            self.given_bytes -= nbytes
            if put.committed and not put.space.dropped:
                self._keep(put, kind, bodies)

        put.at_end.append(ended)

    def _keep(self, put: Put, kind: RecipeKind, bodies: Sequence[bytes]) -> None:
        """Keep what was given with a put that is committed, of pages that are not there by another."""
        tree, put_id, until = put.space.tree, put.request.put_id, time.monotonic() + _GIVEN_S
        for page, key in enumerate(split_keys(put.keys)):
            slot = tree.pages.find_key(key)
            if slot >= 0 and tree.version_of(slot) != put_id:
                continue
            self.forget_given((put.space.number, key))
            self._given[put.space.number, key] = given = Given(kind, bodies[page if len(bodies) > 1 else 0], put_id, until)
            self.given_bytes += _GIVEN_BYTES + len(given.body)

    def forget_given(self, name: tuple[int, bytes]) -> None:
        """What was given for a page is on disk now, or void."""
        if (given := self._given.pop(name, None)) is not None:
            self.given_bytes -= _GIVEN_BYTES + len(given.body)

    def of_pages(self, space: Space, keys: bytes) -> list[Fresh]:
        """The recipes of those of some consecutive pages that are in the tree."""
        if space.dropped:
            return []
        tree = space.tree
        found = [(key, slot) for key in split_keys(keys) if (slot := tree.pages.find_key(key)) >= 0]
        if not found:
            return []
        slots = np.array([slot for _, slot in found], np.int32)
        parts = self._parts(space, slots)
        depth, parent, written_ms = -1, b"", int(self._now() * 1000)
        fresh = []
        for number, (key, slot) in enumerate(found):
            if number and found[number - 1][0] == parent:
                depth += 1
            else:
                path = tree.path_to(slot)
                depth, parent = path.pages - 1, tree.key_at(tree.shorten(path, path.pages - 1))
            if tree.nodes.sealed[int(tree.pages.node[slot])]:  # its tokens are not known: there is nothing to write
                parent = key
                continue
            given = self._given.get((space.number, key))
            if given is not None and given.put_id == tree.version_of(slot) and given.until >= time.monotonic():
                kind, body = given.kind, given.body
            else:
                kind, body = RecipeKind.TOKENS, tree.pages.tokens[slot].tobytes()
            recipe = Recipe(
                key, parent, depth, kind, body, tree.pages.extras[slot].tobytes(), tree.version_of(slot), written_ms, tuple(parts[number])
            )
            fresh.append(Fresh(space, recipe))
            parent = key
        return fresh

    def _parts(self, space: Space, slots: Slots) -> list[list[RecipePart]]:
        columns = space.tree.parts_of(slots)
        found: list[list[RecipePart]] = [[] for _ in slots]
        rows = columns.blob.tolist()
        ids = space.blobs.ids_of(columns.blob)
        sampled = space.settings.rebuild == "tolerant"
        for at, (page, row, component, ranges) in enumerate(
            zip(columns.page.tolist(), rows, columns.component.tolist(), columns.ranges.tolist(), strict=True)
        ):
            size = space.blobs.layout_of(row).payload_bytes
            few = b""
            if sampled and len(found[page]) < _SAMPLED_PARTS and space.blobs.slot[row] != NO_SLOT:
                few = sample(space.spec.components[component].dtype, self._view(int(space.blobs.slot[row]))[:size])
            found[page].append(RecipePart(PartRange(component, *ranges), ids[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], size, few))
        return found


def split_keys(keys: bytes) -> list[bytes]:
    """Keys one after the other, each on its own."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
