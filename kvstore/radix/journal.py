"""The journal: which pages exist durably, in LMDB. One record a page, one a namespace, each with a digest over all of it.

LMDB keeps no checksums of its own, so a record that does not verify is treated as lost, and its subtree with it. Blocking:
call from an executor thread. A record is only ever written after the bytes it names are durable.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.kvspec import PartRange, canonical_json
from kvstore.lmdb_files import STRUCTURAL, mark_damaged, open_environment, open_readonly

_NAMESPACE, _PAGE = b"N", b"P"
_RECORD_VERSION = 1
_HAS_LABEL = 1
_HEAD = struct.Struct("<BBHI32s16s16sQI")
_PART = struct.Struct("<BxHHHH16sI")
_HEAD_DTYPE = np.dtype(
    [
        ("record", "u1"), ("flags", "u1"), ("parts", "<u2"), ("depth", "<u4"), ("parent", "V32"),
        ("version", "V16"), ("parent_version", "V16"), ("created_ms", "<u8"), ("retain", "<u4"),
    ]
)  # fmt: skip
_PART_DTYPE = np.dtype([("component", "u1"), ("pad", "u1"), ("ranges", "<u2", 4), ("blob", "V16"), ("size", "<u4")])


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One part of a page: its geometry, blob id (16 bytes) and payload size in bytes."""

    range: PartRange
    blob: bytes
    size: int


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What the journal says of a page. `label` (token bytes and extra digest) only where the namespace allows recipes."""

    key: bytes
    parent: bytes
    depth: int
    version: bytes
    parent_version: bytes
    created_ms: int
    retain: int
    parts: tuple[PartRecord, ...]
    label: bytes | None


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace as it is kept: its number in this data directory, its digest, and its settings as plain data."""

    number: int
    digest: bytes
    settings: dict[str, Any]


@dataclass(slots=True)
class JournalBatch:
    """Changes to commit together, in order: deletions first, then puts."""

    delete_pages: list[tuple[int, bytes]] = field(default_factory=list)
    put_pages: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    """(namespace number, page key, encoded record)."""

    def __bool__(self) -> bool:
        return bool(self.delete_pages or self.put_pages)


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """Page records of one shape as parallel arrays, row i of each being one page."""

    keys: npt.NDArray[np.uint8]
    head: npt.NDArray[Any]
    labels: npt.NDArray[np.uint8] | None
    parts: npt.NDArray[Any]


def encode_page(namespace_digest: bytes, record: PageRecord) -> bytes:
    """The journal's bytes for a page."""
    flags = 0 if record.label is None else _HAS_LABEL
    head = _HEAD.pack(
        _RECORD_VERSION, flags, len(record.parts), record.depth, record.parent,
        record.version, record.parent_version, record.created_ms, record.retain,
    )  # fmt: skip
    parts = b"".join(
        _PART.pack(p.range.component, p.range.layer_lo, p.range.layer_hi, p.range.head_lo, p.range.head_hi, p.blob, p.size)
        for p in record.parts
    )
    body = head + (record.label or b"") + parts
    return body + xxh3_128_digest(namespace_digest + record.key + body)


def _page_key(number: int, key: bytes) -> bytes:
    return _PAGE + number.to_bytes(4, "big") + key


class Journal:
    """One LMDB environment. `map_bytes` bounds its file. Read-only, nothing of it is changed, locked or mended."""

    def __init__(self, path: FilePath, map_bytes: int = 0, *, readonly: bool = False) -> None:
        self._path = path
        self._env = open_readonly(path) if readonly else open_environment(path, map_bytes, max_spare_txns=2)

    def mark_damaged(self) -> None:
        """Have it salvaged when it is opened next."""
        mark_damaged(self._path)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except STRUCTURAL:
            self.mark_damaged()
            raise

    def namespaces(self) -> tuple[list[NamespaceRecord], list[int]]:
        """All namespaces that verify, and the numbers of those that do not."""
        found: list[NamespaceRecord] = []
        bad: list[int] = []
        with self._env.begin() as txn, txn.cursor() as cursor:
            if not cursor.set_range(_NAMESPACE):
                return found, bad
            for raw_key, value in cursor:
                if not raw_key.startswith(_NAMESPACE):
                    break
                body, digest = value[:-DIGEST_BYTES], value[-DIGEST_BYTES:]
                if len(raw_key) != 5 or xxh3_128_digest(raw_key + body) != digest:
                    bad.append(int.from_bytes(raw_key[1:5], "big"))
                    continue
                data = json.loads(body)
                found.append(NamespaceRecord(int.from_bytes(raw_key[1:], "big"), bytes.fromhex(data["digest"]), data["settings"]))
        return found, bad

    def page_numbers(self) -> list[int]:
        """The namespace numbers that have page records, without a look at each record."""
        found: list[int] = []
        with self._env.begin() as txn, txn.cursor() as cursor:
            more = cursor.set_range(_PAGE)
            while more and (key := cursor.key()).startswith(_PAGE):
                found.append(int.from_bytes(key[1:5], "big"))
                more = found[-1] < 0xFFFFFFFF and cursor.set_range(_PAGE + (found[-1] + 1).to_bytes(4, "big"))
        return found

    def page_counts(self) -> dict[int, int]:
        """Page records by namespace number, whether they verify or not."""
        counts: dict[int, int] = {}
        with self._env.begin() as txn, txn.cursor() as cursor:
            more = cursor.set_range(_PAGE)
            while more and (key := cursor.key()).startswith(_PAGE):
                number = int.from_bytes(key[1:5], "big")
                counts[number] = counts.get(number, 0) + 1
                more = cursor.next()
        return counts

    def put_namespace(self, record: NamespaceRecord) -> None:
        """Write a namespace record, durably."""
        key = _NAMESPACE + record.number.to_bytes(4, "big")
        body = canonical_json({"digest": record.digest.hex(), "settings": record.settings})
        with self._write() as txn:
            txn.put(key, body + xxh3_128_digest(key + body))

    def drop_namespace(self, number: int) -> None:
        """Delete a namespace and all its pages, durably."""
        prefix = _PAGE + number.to_bytes(4, "big")
        with self._write() as txn:
            txn.delete(_NAMESPACE + number.to_bytes(4, "big"))
            with txn.cursor() as cursor:
                while cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix):
                    cursor.delete()

    def commit(self, batch: JournalBatch) -> None:
        """Apply a batch in one transaction; it is durable when this returns."""
        with self._write() as txn:
            for number, key in batch.delete_pages:
                txn.delete(_page_key(number, key))
            for number, key, record in batch.put_pages:
                txn.put(_page_key(number, key), record)

    def load(self, number: int, namespace_digest: bytes, label_bytes: int) -> tuple[list[RecordGroup], list[bytes]]:
        """All page records of a namespace that verify, grouped by shape, and the keys of those that do not."""
        prefix = _PAGE + number.to_bytes(4, "big")
        by_shape: dict[tuple[int, int], tuple[list[bytes], list[bytes]]] = {}
        bad: list[bytes] = []
        with self._env.begin() as txn, txn.cursor() as cursor:
            if not cursor.set_range(prefix):
                return [], bad
            for raw_key, value in cursor:
                if not raw_key.startswith(prefix):
                    break
                key = raw_key[5:]
                if not _verifies(namespace_digest, key, value, label_bytes):
                    bad.append(key)
                    continue
                keys, values = by_shape.setdefault((value[1], len(value)), ([], []))
                keys.append(key)
                values.append(value)
        return [_group(keys, values, label_bytes) for keys, values in by_shape.values()], bad

    def delete_raw(self, number: int, keys: Iterable[bytes]) -> None:
        """Delete records whatever their keys look like (a damaged key need not be 32 bytes)."""
        self.commit(JournalBatch(delete_pages=[(number, key) for key in keys]))


def _verifies(namespace_digest: bytes, key: bytes, value: bytes, label_bytes: int) -> bool:
    if len(key) != KEY_BYTES or len(value) < _HEAD.size + DIGEST_BYTES:
        return False
    body = value[:-DIGEST_BYTES]
    if xxh3_128_digest(namespace_digest + key + body) != value[-DIGEST_BYTES:]:
        return False
    expected = _HEAD.size + (label_bytes if body[1] & _HAS_LABEL else 0) + _PART.size * int.from_bytes(body[2:4], "little")
    return body[0] == _RECORD_VERSION and len(body) == expected


def _group(keys: list[bytes], values: list[bytes], label_bytes: int) -> RecordGroup:
    size = len(values[0])
    rows = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), size)
    at = _HEAD.size
    head = np.ascontiguousarray(rows[:, :at]).view(_HEAD_DTYPE)[:, 0]
    labels = None
    if values[0][1] & _HAS_LABEL:
        labels = rows[:, at : at + label_bytes]
        at += label_bytes
    parts = np.ascontiguousarray(rows[:, at : size - DIGEST_BYTES]).view(_PART_DTYPE)
    return RecordGroup(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES), head, labels, parts)
