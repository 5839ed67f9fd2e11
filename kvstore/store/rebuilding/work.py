"""What it takes to do a rebuild job: where it begins now, and what its worker is given. No await, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.errors import RebuildFailed
from kvstore.kvspec import PartRange
from kvstore.radix.tree import Extras
from kvstore.store.rebuilding.jobs import MAX_PAGES, Job, RebuildQueue
from kvstore.store.space import Space
from kvstore.tiers.recipe import Recipe, RecipeKind


@dataclass(frozen=True, slots=True)
class Body:
    """What there is for a page in place of its token ids."""

    page: int
    kind: RecipeKind
    body: bytes


@dataclass(frozen=True, slots=True)
class GeometryRun:
    """Pages [first, last) and the parts that each is to be put as."""

    first: int
    last: int
    parts: tuple[PartRange, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A job as its worker gets it, to be put under `put_id`.

    `tokens` are those of the pages [0, last), zeros where there is a `Body` instead.
    """

    job: Job
    put_id: bytes
    space: Space
    tokens: bytes
    extras: Extras
    bodies: tuple[Body, ...]
    runs: tuple[GeometryRun, ...]


def chain(queue: RebuildQueue, space: Space, job: Job, known: Mapping[bytes, Recipe]) -> tuple[int, bytes, list[bytes]]:
    """Where a job begins now: the first page, the key of the one before, and the keys of what is to be computed.

    With -1, the recipe of the page of that key, which is gone, is needed to say so.
    """
    tree, gone, parent = space.tree, job.keys[::-1], job.parent
    while parent != space.digest and tree.pages.find_key(parent) < 0 and queue.find(space.number, parent) in (None, job):
        if parent not in known:
            return -1, parent, gone[::-1]
        if len(gone) > MAX_PAGES:
            raise RebuildFailed("too many pages before these are gone as well")
        gone.append(parent)
        parent = known[parent].parent
    there = parent
    while gone and tree.pages.find_key(gone[-1]) >= 0:
        there = gone.pop()
    keys = gone[::-1]
    slot = tree.pages.find_key(there)
    if slot < 0:
        return (job.last - len(keys), parent, keys) if there != space.digest else (0, space.digest, keys)
    slots = tree.path_slots(tree.path_to(slot))
    usable = tree.rules.longest(tree.pages.components[slots]) if tree.rules.optional else len(slots)
    lacking = [tree.pages.key_bytes(int(one)) for one in slots[usable:]]
    return usable, tree.pages.key_bytes(int(slots[usable - 1])) if usable else space.digest, lacking + keys


def stored_prefix(space: Space, job: Job) -> tuple[bytes, Extras]:
    """The tokens and extra digests of the pages before a job, which are stored."""
    tree = space.tree
    slot = tree.pages.find_key(job.parent) if job.first else -1
    if slot < 0:
        return b"", {}
    slots = tree.path_slots(tree.path_to(slot))
    extras = tree.pages.extras[slots]
    return tree.pages.tokens[slots].tobytes(), {int(page): extras[page].tobytes() for page in np.flatnonzero(extras.any(axis=1))}


def work_of(space: Space, job: Job, put_id: bytes, first: int, prefix: tuple[bytes, Extras], recipes: list[Recipe]) -> Work:
    """A job as its worker gets it, now that it begins at page `first`, right after what is stored.

    Takes long for many pages: for a thread. So it looks at nothing that changes.
    """
    width, last = space.tree.pages.token_bytes, first + len(recipes)
    bodies: list[Body] = []
    tokens, extras = [prefix[0]], dict(prefix[1])
    for page, recipe in enumerate(recipes, first):
        if recipe.kind is RecipeKind.TOKENS:
            tokens.append(recipe.body)
        else:
            tokens.append(bytes(width))
            bodies.append(Body(page, recipe.kind, recipe.body))
        if any(recipe.extra):
            extras[page] = recipe.extra
    return Work(job, put_id, space, b"".join(tokens), extras, tuple(bodies), tuple(_geometry(space, first, last, recipes)))


def _geometry(space: Space, first: int, last: int, recipes: list[Recipe]) -> list[GeometryRun]:
    """The parts in which pages are to be put: the required ones as they were, the optional ones where the last boundary needs them."""
    rules, spec = space.tree.rules, space.spec
    runs: list[GeometryRun] = []
    for page, recipe in enumerate(recipes, first):
        parts = [part.range for part in recipe.parts if rules.required >> part.range.component & 1]
        was = {part.range.component: [p.range for p in recipe.parts if p.range.component == part.range.component] for part in recipe.parts}
        for rule in rules.optional:
            if page >= rules.first_page(rule.component, last):
                parts += was.get(rule.component) or [spec.whole(rule.component)]
        if runs and runs[-1].parts == tuple(parts):
            runs[-1] = GeometryRun(runs[-1].first, page + 1, runs[-1].parts)
        else:
            runs.append(GeometryRun(page, page + 1, tuple(parts)))
    return runs
