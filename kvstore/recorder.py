"""`serve --record`: notes what is asked of the daemon, for a file that `kvstore simulate` replays (format: trace_record.py).

The loop only takes notes; page ids are computed, packed and written in a thread. What does not fit into the bounded queue, or comes
after the file has ended, is counted and left out: recording never holds up a request.
"""

import asyncio
import logging
from pathlib import Path

from kvstore.radix.pages import Slots
from kvstore.record_file import Note, Origin, RecordFile
from kvstore.store import Space
from kvstore.store.clock import Clock
from kvstore.store.stats import Stats
from kvstore.store.uses import Asked, Use
from kvstore.threads import started_pool

_log = logging.getLogger("kvstore.record")

_PAUSE_S = 0.25
_CLOSE_S = 10.0
_MAX_WAITING = 8192
_MAX_WAITING_BYTES = 64 << 20


class Recorder:
    """Observes the uses of a store (see Uses.observers). Use as an async context manager: at the end all that waits is written.

    Raises BadRequest if the file can't be opened. Uses of flat namespaces are no prefixes, and are not recorded.
    """

    def __init__(self, file: Path, *, max_bytes: int, keep: int = 8, with_tokens: bool = False, stored_pages: int = 0) -> None:
        self.stats = Stats()
        """Counts what was recorded and left out; give it the store's own."""
        self.stuck = False
        """Whether a write did not end when it was closed: then only the end of the process ends it."""
        self._path = file
        self._file = RecordFile(file, max_bytes, keep, stored_pages)
        self._stored_pages = stored_pages
        self._with_tokens = with_tokens
        self._clock = Clock()
        self._thread = started_pool(1, "kvstore-record")
        self._stop = asyncio.Event()
        self._notes: list[Note] = []
        self._waiting_bytes = 0

    async def __aenter__(self) -> "Recorder":
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._started = self._clock.now()
        self._task = asyncio.create_task(self._run(), name="kvstore-record")
        _log.info("recording requests to %s%s", self._path, ", with their tokens" if self._with_tokens else "")
        if self._stored_pages:
            _log.warning(
                "the store holds %d pages already: the recording can't tell which, so that `kvstore simulate` counts hits on them as "
                "misses; for what a cache would have made of all requests, record from an empty data directory on",
                self._stored_pages,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        done, _pending = await asyncio.wait([self._task], timeout=_CLOSE_S)
        if done:
            self._thread.shutdown()
            if (error := self._task.exception()) is not None:
                _log.error("recording ended early", exc_info=error)
        else:
            _log.critical("a write to %s does not end: it is left behind, unfinished", self._path)
            self.stuck = True
            self._thread.shutdown(wait=False)
        _log.info("recorded %d requests, left out %d", self.stats.recorded_requests, self.stats.unrecorded_requests)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        stopping = False
        while not stopping:
            try:
                async with asyncio.timeout(_PAUSE_S):
                    stopping = await self._stop.wait()
            except TimeoutError:
                pass  # time to write what has come meanwhile
            notes, self._notes = self._notes, []
            if notes:
                written = await loop.run_in_executor(self._thread, self._file.write, notes)
                self._waiting_bytes -= sum(note.nbytes for note in notes)
                self.stats.recorded_requests += written
                self.stats.unrecorded_requests += len(notes) - written
        await loop.run_in_executor(self._thread, self._file.close)

    # --- observing -----------------------------------------------------------------------------------------------------

    def used(self, space: Space, use: Use, asked: Asked | None) -> None:
        """See Observer."""
        if space.spec.flat:
            return
        pages, origin, now = space.tree.pages, _origin(space), self._clock.now() - self._started
        if asked is None:
            tokens = pages.tokens[use.slots].tobytes() if self._with_tokens else b""
            keys, size = pages.key[use.slots].tobytes(), len(use.slots) * space.spec.page_tokens
            self._take(Note(now, origin, "put", size, keys, hints=use.hints, token_ids=tokens))
            return
        known, width = len(asked.known) - asked.base_pages, origin.label_bytes
        tokens = pages.tokens[asked.known[: asked.base_pages]].tobytes() + asked.labels if self._with_tokens else b""
        labels = asked.labels[known * width : (asked.pages - asked.base_pages) * width]
        keys = pages.key[asked.known].tobytes()
        note = Note(now, origin, "get", asked.tokens, keys, labels, asked.extras, known, hints=use.hints, token_ids=tokens)
        self._take(note)

    def abandoned(self, space: Space, slots: Slots, first: int) -> None:
        """See Observer."""
        if space.spec.flat:
            return
        now, keys = self._clock.now() - self._started, space.tree.pages.key[slots].tobytes()
        self._take(Note(now, _origin(space), "abandon", len(slots) * space.spec.page_tokens, keys, first=first))

    def cooled(self, space: Space, slots: Slots) -> None:
        """Not recorded: who replays the requests finds out by himself."""

    def _take(self, note: Note) -> None:
        if not note.tokens:
            return
        if len(self._notes) >= _MAX_WAITING or self._waiting_bytes + note.nbytes > _MAX_WAITING_BYTES:
            if not self.stats.unrecorded_requests:
                _log.warning("requests come faster than they can be recorded: some are left out")
            self.stats.unrecorded_requests += 1
            return
        self._notes.append(note)
        self._waiting_bytes += note.nbytes


def _origin(space: Space) -> Origin:
    spec = space.spec
    return Origin(space.number, space.digest, spec.page_tokens, space.tree.pages.token_bytes, spec.page_bytes / spec.page_tokens)
