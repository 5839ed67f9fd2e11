"""Which prefix is there, how far it is usable, and what there is to load."""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvstore.errors import BadRequest, NotFound
from kvstore.hints import NO_HINTS, Hints
from kvstore.radix.components import Lack
from kvstore.radix.pages import Slots
from kvstore.radix.tree import Extras, as_token_bytes
from kvstore.radix.values import EMPTY_PATH, Path
from kvstore.store.matching.cut import Ask, Estimate
from kvstore.store.matching.estimating import estimate
from kvstore.store.matching.leases import Lease, Leases
from kvstore.store.matching.part_table import PartTable, part_table
from kvstore.store.matching.rates import Rates
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.store.uses import Asked, Defer, Uses

MAX_FLAT_NAMED = 256
"""Pages of a flat namespace that a request pins, abandons or deletes: each is looked up, and changed, by itself."""


@dataclass(frozen=True, slots=True)
class Match:
    """A matched prefix that ends at the longest usable boundary, `pages` from the root.

    `known_pages` is how far the pages themselves go. `boundaries` are all usable ones, if asked for. Of the pages to load
    `dram_pages` are in DRAM, the rest is on SSD (-1 if parts were not asked for). With an `estimate`, `cut_parts` are the parts to load
    for its cut, where they are not a front of `parts`. `lacks` are the components that keep it from going to
    `known_pages`.
    """

    pages: int
    tokens: int
    known_pages: int
    dram_pages: int
    lease: Lease | None
    parts: PartTable | None
    boundaries: npt.NDArray[np.int64]
    estimate: Estimate | None = None
    cut_parts: PartTable | None = None
    lacks: tuple[Lack, ...] = ()


class Matching:
    """Matches, and leases what they find."""

    def __init__(self, leases: Leases, stats: Stats, uses: Uses, rates: Rates) -> None:
        self._leases = leases
        self._stats = stats
        self._uses = uses
        self._rates = rates

    def match(
        self, space: Space, tokens: bytes, extras: Extras, *, owner: int = 0, lease_s: float = 0.0, parts: bool = False,
        boundaries: bool = False, base: int = 0, hints: Hints = NO_HINTS, ask: Ask | None = None, link_bytes_s: float = 0.0,
        holes: bool = False, defer: Defer | None = None,
    ) -> Match:  # fmt: skip
        """The longest usable prefix of `tokens`. Without a lease it changes nothing and is no use of the pages.

        With a `base`, a lease of this owner, the tokens are those after it. `hints` count with a lease only. With an `ask` it is estimated
        what loading costs, over a link of this measured rate (0: that of the tenant), and what is best not loaded. With `holes` all pages
        of a flat namespace that are there with all their components are found, whatever lacks between them: `pages` is the end of the last
        one. `defer` takes over what is only for the record.
        """
        tokens, start = as_token_bytes(tokens), self.base_path(owner, space, base)
        if holes:
            if not space.spec.flat or not parts or ask is not None:
                raise BadRequest("holes are for the parts of a flat namespace, without an estimate")
            return self._match_scattered(space, tokens, extras, owner, lease_s, hints)
        if space.spec.flat:
            found, slots = self._match_flat(space, tokens, extras, owner, lease_s, parts, hints)
        else:
            found, slots = self._match_tree(
                space, tokens, extras, owner, lease_s, start, hints, defer, parts=parts, boundaries=boundaries, deep=ask is not None
            )
        return self._estimated(found, space, slots, ask, link_bytes_s)

    def _match_tree(
        self, space: Space, tokens: bytes, extras: Extras, owner: int, lease_s: float, start: Path, hints: Hints, defer: Defer | None, *,
        parts: bool, boundaries: bool, deep: bool,
    ) -> tuple[Match, Slots]:  # fmt: skip
        """As `match`, of a tree, without the estimate; and the slots of what was found, if anything asked for needs them (or `deep`)."""
        tree, page_tokens = space.tree, space.spec.page_tokens
        known = tree.match(tokens, extras, start)
        path, usable, lacks, known_slots = known, np.empty(0, np.int64), tuple[Lack, ...](), np.empty(0, np.int32)
        if tree.rules.optional or lease_s or parts or deep:
            known_slots = tree.path_slots(known)
        if tree.rules.optional:
            masks = tree.pages.components[known_slots]
            path = tree.shorten(known, tree.rules.longest(masks))
            if boundaries:
                usable = np.flatnonzero(tree.rules.usable(masks))
            if path.pages < known.pages:
                lacks = tree.rules.lacks(masks)
        elif boundaries:
            usable = np.arange(known.pages + 1)
        slots = known_slots[: path.pages]
        self._stats.matches += 1
        self._stats.asked_tokens += len(tokens) // 4
        self._stats.matched_tokens += max(path.pages - start.pages, 0) * page_tokens
        lease = None
        if lease_s:
            asked = _asked(space, tokens, extras, known_slots, start.pages)
            if path.pages:
                path = tree.open_path(path, tokens, extras, start.pages)
                lease = self._leases.grant(owner, space, [path], time.monotonic(), lease_s, slots)
            recorded = partial(self._uses.use_slots, space, slots, hints, asked=asked)
            if defer is not None:
                defer(recorded)
            else:
                try:
                    recorded()
                except BaseException:
                    self._give_back(lease)
                    raise
        table, in_dram = part_table(space, slots) if parts else (None, -1)
        return Match(path.pages, path.pages * page_tokens, known.pages, in_dram, lease, table, usable, lacks=lacks), slots

    def _estimated(self, match: Match, space: Space, slots: Slots, ask: Ask | None, link_bytes_s: float) -> Match:
        """A match with what it costs."""
        if ask is None or not match.pages:
            return match
        found = estimate(space, slots, ask, self._rates, link_bytes_s or self._rates.link_of(space.settings.tenant).bytes_s)
        apart = match.parts is not None and space.tree.rules.optional and found.pages < match.pages
        return replace(match, estimate=found, cut_parts=part_table(space, slots[: found.pages])[0] if apart else None)

    def _match_flat(
        self, space: Space, labels: bytes, extras: Extras, owner: int, lease_s: float, parts: bool, hints: Hints
    ) -> tuple[Match, Slots]:
        """The longest front of a list of pages, each of which stands alone. The list begins where the prompt does."""
        tree, width = space.tree, space.tree.pages.token_bytes
        paths: list[Path] = []
        for at in range(0, len(labels) - width + 1, width):
            page = at // width
            path = tree.match(labels[at : at + width], {0: extras[page]} if page in extras else {})
            if not path.pages:
                break
            paths.append(path)
        slots = np.array([tree.path_slots(path)[0] for path in paths], np.int32)
        masks = tree.pages.components[slots]
        count = tree.rules.longest(masks)
        lease = self._lease_alone(space, paths[:count], slots[:count], owner, lease_s, hints)
        table, in_dram = part_table(space, slots[:count]) if parts else (None, -1)
        usable, lacks = np.flatnonzero(tree.rules.usable(masks)), tree.rules.lacks(masks)
        return Match(count, count * space.spec.page_tokens, len(paths), in_dram, lease, table, usable, lacks=lacks), slots[:count]

    def _match_scattered(self, space: Space, labels: bytes, extras: Extras, owner: int, lease_s: float, hints: Hints) -> Match:
        """The pages of a list, each of which stands alone, that are there with all their components."""
        tree, width = space.tree, space.tree.pages.token_bytes
        found: dict[int, Path] = {}
        for page in range(len(labels) // width):
            path = tree.match(labels[page * width : (page + 1) * width], {0: extras[page]} if page in extras else {})
            if path.pages:
                found[page] = path
        slots = np.array([tree.path_slots(path)[0] for path in found.values()], np.int32)
        if tree.rules.optional:
            whole = tree.rules.alone(tree.pages.components[slots])
            found, slots = dict(compress(found.items(), whole)), slots[whole]
        paths, numbers = list(found.values()), list(found)
        lease = self._lease_alone(space, paths, slots, owner, lease_s, hints)
        table, in_dram = part_table(space, slots, alone=True)
        end, tokens = numbers[-1] + 1 if numbers else 0, len(paths) * space.spec.page_tokens
        return Match(end, tokens, len(paths), in_dram, lease, table.scattered(numbers), np.empty(0, np.int64))

    def _lease_alone(self, space: Space, paths: list[Path], slots: Slots, owner: int, lease_s: float, hints: Hints) -> Lease | None:
        """A lease on pages that each stand alone, if one is asked for and there are any; that is a use of them."""
        self._stats.matches += 1
        lease = self._leases.grant(owner, space, paths, time.monotonic(), lease_s) if lease_s and paths else None
        if lease is not None:
            try:
                self._uses.use_alone(space, slots, hints)
            except BaseException:
                self._give_back(lease)
                raise
        return lease

    def _give_back(self, lease: Lease | None) -> None:
        """Who is not told of a lease can't release it."""
        if lease is not None:
            self._leases.release(lease)

    def base_path(self, owner: int, space: Space, base: int) -> Path:
        """The path of a lease that others build on; empty for 0. Raises NotFound if the owner has no such lease there, all of it."""
        if not base:
            return EMPTY_PATH
        lease = self._leases.get(owner, base)
        if lease.space is not space or space.spec.flat:
            raise NotFound(f"lease {base} does not exist in this namespace")
        if lease.shortened:
            raise NotFound(f"a page of lease {base} was lost, its bytes did not verify: match again")
        return space.tree.path_to(space.tree.pages.find_key(lease.boundaries[0]))


def _asked(space: Space, tokens: bytes, extras: Extras, known: Slots, base: int) -> Asked:
    pages = base + len(tokens) // space.tree.pages.token_bytes
    rest = 0 if space.spec.hash_bytes else len(tokens) % space.tree.pages.token_bytes // 4
    return Asked(pages * space.spec.page_tokens + rest, pages, known, base, tokens, extras)


def each_prefix(space: Space, tokens: bytes, extras: Extras) -> list[tuple[bytes, Extras]]:
    """What a request names: one prefix, or the pages of a flat namespace, each alone. Raises BadRequest for too many of those."""
    tokens = as_token_bytes(tokens)
    width, pages = space.spec.hash_bytes, len(tokens) // (space.spec.hash_bytes or 1)
    if not space.spec.flat or pages <= 1:
        return [(tokens, extras)]
    if pages > MAX_FLAT_NAMED:
        raise BadRequest(f"{pages} pages of a flat namespace at once: give at most {MAX_FLAT_NAMED}, and the others in further calls")
    return [(tokens[p * width : (p + 1) * width], {0: extras[p]} if p in extras else {}) for p in range(pages)]


def usable_path(space: Space, tokens: bytes, extras: Extras) -> Path:
    """The longest usable prefix, its labels known from here on."""
    tokens = as_token_bytes(tokens)
    path = known_path(space, tokens, extras)
    if space.tree.rules.optional:
        path = space.tree.shorten(path, space.tree.rules.longest(space.tree.pages.components[space.tree.path_slots(path)]))
    return space.tree.open_path(path, tokens, extras)


def known_path(space: Space, tokens: bytes, extras: Extras) -> Path:
    """As far as the pages of a prefix go."""
    tokens = as_token_bytes(tokens)
    if space.spec.flat and len(tokens) > space.spec.hash_bytes:
        raise BadRequest("in a flat namespace every page stands alone: name one at a time")
    return space.tree.match(tokens, extras)
