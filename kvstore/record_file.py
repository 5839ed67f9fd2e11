"""The file that `serve --record` writes: lines of kvstore's trace format, packed if the name ends in .gz. Blocking: for a thread."""

import contextlib
import gzip
import logging
import os
import secrets
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvstore.digests import KEY_BYTES, NO_EXTRA, page_key_chain
from kvstore.errors import BadRequest
from kvstore.hints import NO_HINTS, Ended, Hints, Turn
from kvstore.radix.tree import Extras
from kvstore.trace_record import Header, Line, NamespaceLine, Op, UseLine, encode_ids, encode_line, page_ids
from kvstore.trace_record import Hints as LineHints

_log = logging.getLogger("kvstore.record")

_SECRET_BYTES = 32
_CHUNK_PAGES = 256
_CHUNK_BYTES = _CHUNK_PAGES * KEY_BYTES
_SESSION_BYTES = 6
_PACKING_BYTES = 64
"""What packing may add."""
_EXTRA_COST = 200
"""Bytes that an extra digest with its page takes up in memory, about."""
_ENDS = {Ended.TOOL_CALL: "tool_use", Ended.END_TURN: "end_turn", Ended.SUBAGENT_DONE: "subagent_done"}


class UseWithTokens(UseLine, frozen=True, omit_defaults=True, tag_field="kind", tag="use"):
    """A use with the tokens themselves (uint32, little-endian, base64): only where the operator asked for them."""

    token_ids: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """A namespace, as far as a record tells of it. `number` is its own while the daemon lives, `root` the key before its first pages."""

    number: int
    root: bytes
    page_tokens: int
    label_bytes: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Note:
    """A line to be, `at` seconds after the start: the page keys that are known, and the labels of the whole pages after those.

    `extras` are by page, counted from the first page whose label is here less `skipped`. `token_ids` are all tokens, if wanted.
    """

    at: float
    origin: Origin
    op: Op
    tokens: int
    keys: bytes
    labels: bytes = b""
    extras: Extras | None = None
    skipped: int = 0
    first: int = 0
    hints: Hints = NO_HINTS
    token_ids: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on to."""
        return len(self.keys) + len(self.labels) + len(self.token_ids) + _EXTRA_COST * len(self.extras or ())

    def page_keys(self) -> bytes:
        """The keys of all its pages; about 1 µs for each that is not known."""
        width, extras = self.origin.label_bytes, self.extras or {}
        labels = (
            self.labels[at : at + width] + extras.get(self.skipped + at // width, NO_EXTRA) for at in range(0, len(self.labels), width)
        )
        return self.keys + b"".join(_yielding(page_key_chain(self.keys[-KEY_BYTES:] or self.origin.root, labels)))


class RecordFile:
    """One recording. What would make the file larger than `max_bytes` is left out, as is all after that, or after an error.

    A packed file is a row of whole gzip members, so that it can be read to its end while it grows, and after a kill. At its start
    the one that is there becomes number 1 of the older ones, of which `keep` stay.
    """

    def __init__(self, path: Path, max_bytes: int, keep: int = 8, stored_pages: int = 0) -> None:
        self._path = path
        self._stored_pages = stored_pages
        self._max_bytes = max_bytes
        self._keep = keep
        self._packed = path.name.endswith(".gz")
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._numbers: dict[int, int] = {}
        self._ended = False
        self._waiting = bytearray()
        """Whole lines that are still to be written."""

    def open(self) -> None:
        """Make the file, for this user only, and write its header; one that is there is moved aside. Raises BadRequest."""
        try:
            if self._path.is_file() and not self._path.is_symlink():
                self._make_way()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadRequest(f"can't record to {self._path}: {error.strerror}; name another file with --record") from error
        self._raw = os.fdopen(descriptor, "wb")
        self._put(Header(started=time.time(), stored_pages=self._stored_pages))
        self._flush()

    def _make_way(self) -> None:
        for number in range(self._keep, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                older(self._path, number - 1).replace(older(self._path, number))
        if self._keep:
            self._path.replace(older(self._path, 1))
        else:
            self._path.unlink()

    def write(self, notes: Sequence[Note]) -> int:
        """Write lines, and flush them. Returns how many were written."""
        written = 0
        try:
            for note in notes:
                if self._ended or not self._write(note):
                    break
                written += 1
            if not self._ended:
                self._flush()
        except OSError as error:
            self._end(f"can't write to {self._path}: {error.strerror}")
            return 0
        return written

    def close(self) -> None:
        """Close the file."""
        try:
            self._raw.close()
        except OSError as error:
            _log.error("can't close %s: %s", self._path, error.strerror)

    def _write(self, note: Note) -> bool:
        number = self._numbers.get(note.origin.number)
        if number is None:
            line = NamespaceLine(len(self._numbers), note.origin.page_tokens, note.origin.bytes_per_token)
            if not self._put(line):
                return False
            self._numbers[note.origin.number] = number = line.ns
        return self._put(self._line(note, number))

    def _line(self, note: Note, number: int) -> UseLine:
        keys = note.page_keys()
        chunks = []
        for at in range(0, len(keys), _CHUNK_BYTES):
            chunks.append(page_ids(keys[at : at + _CHUNK_BYTES], self._secret))
            time.sleep(0)  # hashing small pieces keeps the interpreter to itself: let the loop have it
        ids = encode_ids(np.concatenate(chunks or [np.empty(0, np.uint64)]))
        hints = self._hints(note.hints, number) if note.hints != NO_HINTS else None
        plain = UseLine(round(note.at, 6), number, ids, note.tokens, note.op, note.first, hints)
        if not note.token_ids:
            return plain
        return UseWithTokens(
            plain.t, number, ids, note.tokens, note.op, note.first, hints, token_ids=b64encode(note.token_ids).decode("ascii")
        )

    def _hints(self, hints: Hints, number: int) -> LineHints:
        """Hints as a line has them: a session, or what it does as a sub-agent, is a number that says nothing without the secret."""
        sub_agent, session = hints.turn is Turn.SUB_AGENT, None
        if hints.session_id:
            named = number.to_bytes(8, "little") + bytes([sub_agent]) + hints.session_id
            session = int.from_bytes(blake2b(named, digest_size=_SESSION_BYTES, key=self._secret).digest(), "little")
        ended = _ENDS[hints.ended] if hints.ended is not None else None
        return LineHints(session=session, role="subagent" if sub_agent else None, end=ended, ttl_s=hints.ttl_s or None)

    def _put(self, line: Line) -> bool:
        """Write a line, if there is room for it."""
        data = encode_line(line)
        room = self._max_bytes - _PACKING_BYTES - len(data)
        if self._raw.tell() + len(self._waiting) > room:
            self._flush()  # packed, it may be much less
            if self._raw.tell() > room:
                self._end(f"{self._path} is full (record_max_bytes is {self._max_bytes})")
                return False
        self._waiting += data
        return True

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            self._raw.write(gzip.compress(data, compresslevel=3, mtime=0) if self._packed else data)
            self._raw.flush()

    def _end(self, why: str) -> None:
        self._ended = True
        _log.error("recording has ended: %s", why)


def _yielding(keys: Iterable[bytes]) -> Iterator[bytes]:
    for number, key in enumerate(keys, 1):
        yield key
        if number % _CHUNK_PAGES == 0:
            time.sleep(0)


def older(path: Path, number: int) -> Path:
    """Where an older recording is: `trace.1.jsonl.gz` is what `trace.jsonl.gz` was before, `trace.2.jsonl.gz` what that one was."""
    stem, dot, suffix = path.name.partition(".") if not path.name.startswith(".") else (path.name, "", "")
    return path.with_name(f"{stem}.{number}{dot}{suffix}")
