"""What of a prefix is not there, and could be computed again."""

from dataclasses import dataclass

from kvstore.radix.tree import Extras, as_token_bytes
from kvstore.radix.values import EMPTY_PATH, Path
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.space import Space


@dataclass(frozen=True, slots=True)
class Gap:
    """A prefix of `pages` pages, usable up to `usable` and there up to `known`.

    `above` is the key of the page before `usable`, `parent` of that before `known`.

    `known_keys` are the keys of the pages [usable, known): they are there, but lack what a boundary needs.
    """

    pages: int
    usable: int
    known: int
    above: bytes
    parent: bytes
    known_keys: tuple[bytes, ...]
    labels: bytes
    extras: Extras


def find_gap(space: Space, tokens: bytes, extras: Extras, base: Path = EMPTY_PATH) -> Gap | None:
    """What is missing of a prefix, whose tokens and extras are those after `base`. None if nothing is."""
    tree = space.tree
    tokens = as_token_bytes(tokens)
    width = tree.pages.token_bytes
    path = tree.match(tokens, extras, base)
    slots = tree.path_slots(path)
    usable = tree.rules.longest(tree.pages.components[slots]) if tree.rules.optional else path.pages
    pages = base.pages + len(tokens) // width
    if usable >= pages:
        return None
    keys = tuple(tree.pages.key_bytes(int(slot)) for slot in slots[usable:])
    labels = tokens[(path.pages - base.pages) * width : (pages - base.pages) * width]
    from_root = {page + base.pages: extra for page, extra in extras.items()}
    above = tree.key_at(tree.shorten(path, usable))
    return Gap(pages, usable, path.pages, above, tree.key_at(path), keys, labels, from_root)


async def rebuildable_keys(recipes: Recipes, space: Space, gap: Gap) -> list[bytes]:
    """The keys of the pages from the usable boundary on that can be computed again, up to the first that can't."""
    if gap.known_keys and not all(await recipes.have(space, list(gap.known_keys))):
        return []
    return [*gap.known_keys, *await recipes.front(space, gap.parent, gap.labels, gap.extras, gap.known)]
