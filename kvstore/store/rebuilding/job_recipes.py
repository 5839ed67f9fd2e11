"""Where a rebuild job begins by now, and the recipes of its pages: what is read before a worker gets it."""

from kvstore.errors import RebuildFailed
from kvstore.store.rebuilding.jobs import MAX_PAGES, Job, RebuildQueue
from kvstore.store.rebuilding.work import chain
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.space import Space
from kvstore.tiers.recipe import Recipe

_FIRST_STEP = 64
"""Of pages before a job's that are gone as well, so many recipes are read at first."""


async def recipes_for(queue: RebuildQueue, recipes: Recipes, job: Job, space: Space, put_id: bytes) -> list[Recipe] | None:
    """The recipes of a job's pages, after it was made to begin right after the longest usable prefix.

    Empty if it is done already; None if pages before it are another job's, or if the claim under `put_id` has ended meanwhile.
    Raises RebuildFailed if a recipe is missing.
    """
    known: dict[bytes, Recipe] = {}
    if job.check:
        await _read(recipes, space, job.keys, job.first, known)
        if not is_whole(space, job):
            raise RebuildFailed("pages that were to be compared are gone: have them computed again instead")
        return [known[key] for key in job.keys]
    step = _FIRST_STEP
    while True:
        first, parent, keys = chain(queue, space, job, known)
        if first < 0:
            before = await recipes.upwards(space, parent, step)
            if not before:
                raise _lacking(job.last - len(keys) - 1)
            known.update((one.key, one) for one in before)
            step = min(step * 4, MAX_PAGES)  # each time the chain is gone through from its start
        elif lacking := [key for key in keys if key not in known]:
            await _read(recipes, space, lacking, first, known)
        else:
            break
        if not job.has(put_id):
            return None
    if not keys:
        return []
    others = [at for at, key in enumerate(keys) if queue.find(space.number, key) not in (None, job)]
    at = others[-1] + 1 if others else 0
    queue.move_front(job, first + at, keys[at - 1] if at else parent, keys[at:])
    if at or queue.find(space.number, parent) is not None:
        queue.put_back(job)
        return None
    return [known[key] for key in keys]


async def _read(recipes: Recipes, space: Space, keys: list[bytes], first: int, known: dict[bytes, Recipe]) -> None:
    for at, recipe in enumerate(await recipes.read(space, keys)):
        if recipe is None:
            raise _lacking(first + at)
        known[recipe.key] = recipe


def is_whole(space: Space, job: Job) -> bool:
    """Whether all pages of a job are in the tree, and can be gone on from."""
    tree = space.tree
    slot = tree.pages.find_key(job.keys[-1])
    if slot < 0 or not tree.rules.optional:
        return slot >= 0
    slots = tree.path_slots(tree.path_to(slot))
    return tree.rules.longest(tree.pages.components[slots]) == len(slots)


def _lacking(page: int) -> RebuildFailed:
    return RebuildFailed(f"page {page} of the prefix can't be computed again: its recipe is gone, or damaged")
