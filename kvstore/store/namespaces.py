"""Creating and dropping namespaces, durably."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import asdict, fields, replace

import lmdb

from kvstore.errors import Conflict, DiskFailing, NoSpace
from kvstore.kvspec import KVSpec
from kvstore.radix.journal import Journal
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.spaces import Spaces
from kvstore.store.ssd.upkeep import give_back
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.trash import Trash
from kvstore.store.waits import finish_despite_cancel

_SETTINGS = ("name", "recipes", "retention_s", "ttl_s", "rebuild", "lossy")
"""Of a namespace, besides what its identity is made of."""
_FIXED = (
    "these are fixed when a namespace is created, and only prefill_us and prefill_ns_per_position can be changed: ask for what it has, "
    "open it by its name alone, or drop it, with all its pages, and create it anew"
)
_ANOTHER = (
    "a namespace is of one model fingerprint and one KV spec for good: give this one another name, or drop the other, with all its pages"
)
_SHOWN = 120


class Namespaces:
    """`make` makes one of a number and settings; `forgotten` ends all that builds on one; `announce_room` wakes who waits for room."""

    def __init__(
        self, spaces: Spaces, journal: Journal, writer: Executor, writeback: Writeback, trash: Trash, recipes: Recipes,
        make: Callable[[int, NamespaceSettings], Space], forgotten: Callable[[Space], None], announce_room: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.next_number = 1
        """Of the next namespace that is made."""
        self._spaces = spaces
        self._journal = journal
        self._writer = writer
        self._writeback = writeback
        self._trash = trash
        self._recipes = recipes
        self._make = make
        self._forgotten = forgotten
        self._announce_room = announce_room

    async def create(self, settings: NamespaceSettings) -> Space:
        """The namespace of these settings, made if it is not there. Durable when this returns.

        Raises Conflict if the name is taken by a namespace of another identity or with other settings. A prefill cost can be given later,
        or another one: it says nothing of what is stored.
        """
        space = self._spaces.by_id(settings.tenant, settings.digest[:16].hex())
        if space is not None:
            if replace(space.settings, prefill=settings.prefill) != settings:
                there = space.settings
                others = _differences({name: (getattr(there, name), getattr(settings, name)) for name in _SETTINGS})
                raise Conflict(
                    f"this model fingerprint and KV spec have a namespace, {there.name!r} ({space.id}), whose {others}; {_FIXED}"
                )
            if settings.prefill and settings.prefill != space.settings.prefill:
                await self._put_record(space, settings)
            return space
        other = self._spaces.by_name(settings.tenant, settings.name)
        if other is not None:
            raise Conflict(f"the name {settings.name!r} is taken by {other.id}, {_identity(other.settings, settings)}; {_ANOTHER}")
        space = self._make(self.next_number, settings)
        self.next_number += 1
        self._spaces.add(space)
        try:
            await self._put_record(space, settings)
        except BaseException:
            self._spaces.remove(space)  # unless it has been dropped, and created anew, meanwhile
            self._forgotten(space)
            raise
        return space

    async def drop(self, space: Space) -> None:
        """Forget a namespace and everything in it; its space on both tiers is free when this returns.

        Its records go in the background even if the caller is cancelled. Raises DiskFailing if the disk refuses.
        """
        space.dropped = True
        self._spaces.remove(space)
        self._forgotten(space)
        self._trash.namespaces.append(space.number)
        self._writeback.poke()
        await finish_despite_cancel(asyncio.ensure_future(give_back(space)))
        await self._announce_room()
        try:
            await self._writeback.emptied()
            await self._recipes.drop_namespace(space)
        except (NoSpace, DiskFailing) as error:
            what = f"namespace {space.settings.name!r} is dropped, but its records are deleted only once the disk is well"
            raise DiskFailing(f"{what} (until then a restart brings it back): {error.message}", retry_after_ms=1000) from error

    async def _put_record(self, space: Space, settings: NamespaceSettings) -> None:
        """Give a namespace its settings, durably. Raises NoSpace or DiskFailing."""
        space.settings = settings
        try:
            async with self._writeback.lock:
                if not space.dropped:
                    await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.put_namespace, space.record())
        except (lmdb.Error, OSError) as error:
            raise self._writeback.failed(error) from error


def _identity(there: NamespaceSettings, wanted: NamespaceSettings) -> str:
    """In what one of two namespaces of a tenant differs that makes it another one."""
    found = []
    if there.fingerprint != wanted.fingerprint:
        found.append("another model fingerprint")
    if there.spec != wanted.spec:
        old, new = _fields(there.spec), _fields(wanted.spec)
        found.append(f"another KV spec ({_differences({name: (old.get(name), new.get(name)) for name in old | new})})")
    return f"which has {' and '.join(found)}"


def _fields(spec: KVSpec) -> dict[str, object]:
    """A KV spec's fields by name, those of its components by their number."""
    found: dict[str, object] = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "components"}
    for number, component in enumerate(spec.components):
        found |= {f"components.{number}.{name}": value for name, value in asdict(component).items()}
    return found


def _differences(values: dict[str, tuple[object, object]]) -> str:
    """By name, what is there and what was wanted."""
    return ", ".join(f"{name} is {_shown(there)}, not {_shown(wanted)}" for name, (there, wanted) in values.items() if there != wanted)


def _shown(value: object) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
