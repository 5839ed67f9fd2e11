"""From the journal to namespaces in memory: what a start finds, and what it does about damage."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import lmdb

from kvstore.digests import KEY_BYTES
from kvstore.radix.journal import Journal
from kvstore.store.space import NamespaceSettings, Space
from kvstore.store.stats import Stats

_log = logging.getLogger("kvstore.recovery")


class Recovery:
    """Loads every namespace. A record that does not verify costs its subtree; a damaged file is salvaged and read again."""

    def __init__(self, path: Path, map_bytes: int, new_space: Callable[[int, NamespaceSettings], Space], stats: Stats) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._new_space = new_space
        self._stats = stats

    async def run(self, journal: Journal, executor: Executor, loop: asyncio.AbstractEventLoop) -> tuple[Journal, list[Space], int]:
        """The journal (another one if it had to be salvaged), the namespaces, and the next free namespace number."""
        try:
            return journal, *await self._load(journal, executor, loop)
        except lmdb.Error as error:
            _log.error("the journal is damaged (%s): saving what can be read of it", error)
            self._stats.corrupt_records += 1
        journal = await loop.run_in_executor(executor, self._reopen, journal)
        return journal, *await self._load(journal, executor, loop)

    def _reopen(self, journal: Journal) -> Journal:
        journal.mark_damaged()
        journal.close()
        return Journal(self._path, self._map_bytes)

    async def _load(self, journal: Journal, executor: Executor, loop: asyncio.AbstractEventLoop) -> tuple[list[Space], int]:
        started = time.monotonic()
        records, bad = await loop.run_in_executor(executor, journal.namespaces)
        for number in bad:
            self._stats.corrupt_records += 1
            _log.error("the record of namespace number %d does not verify: it is dropped", number)
            await loop.run_in_executor(executor, journal.drop_namespace, number)
        known = {record.number for record in records} | set(bad)
        for number in await loop.run_in_executor(executor, journal.page_numbers):
            if number not in known:
                self._stats.corrupt_records += 1
                _log.error("the page records of namespace number %d have no namespace: they are dropped", number)
                await loop.run_in_executor(executor, journal.drop_namespace, number)
                bad.append(number)
        spaces = []
        for record in records:
            space = self._new_space(record.number, NamespaceSettings.from_dict(record.settings))
            label_bytes = space.spec.label_words * 4 + KEY_BYTES
            groups, lost = await loop.run_in_executor(executor, journal.load, record.number, space.digest, label_bytes)
            result = space.load(groups)
            spaces.append(space)
            _log.info("namespace %s (%s): %d pages", space.settings.name, space.id, result.pages)
            if lost:
                self._stats.corrupt_records += len(lost)
                _log.error("%d of its page records do not verify: dropped, with %d pages below them", len(lost), len(result.orphans))
                await loop.run_in_executor(executor, journal.delete_raw, record.number, lost)
        if records:
            _log.info("journal loaded in %.2f s", time.monotonic() - started)
        return spaces, max([0, *(r.number for r in records), *bad]) + 1
