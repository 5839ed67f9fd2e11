"""The journal: which pages exist durably, in LMDB. One record a page, one a namespace, each with a digest over all of it.

LMDB keeps no checksums of its own, so a record that does not verify is treated as lost, and its subtree with it. Blocking:
call from an executor thread. A record is only ever written after the bytes it names are durable.
"""

import json
import struct
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.kvspec import PartRange, canonical_json
from kvstore.lmdb_files import Gate, check_order, mark_damaged, open_environment, open_readonly, probe, writing

_NAMESPACE, _PAGE, _PROBE = b"N", b"P", b"T"
_RECORD_VERSION = 1
SCAN_RECORDS = 16_384
"""Page records read in one go: some tens of milliseconds."""
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
    """Page records with as many parts each, all with a label or all without, as parallel arrays: row i of each is one page."""

    keys: npt.NDArray[np.uint8]
    head: npt.NDArray[Any]
    labels: npt.NDArray[np.uint8] | None
    parts: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Some page records: those that verify, the keys of those that do not, and the key to go on behind (None at the end)."""

    groups: list[RecordGroup]
    bad: list[bytes]
    resume: bytes | None


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
        self._map_bytes = map_bytes
        self._gate = Gate()
        self._env = open_readonly(path) if readonly else open_environment(path, map_bytes, max_spare_txns=2)

    def probe(self) -> None:
        """See whether the disk takes a record (see lmdb_files.probe). Raises lmdb.Error or OSError."""
        probe(self._env, self._path, [_PROBE], bytes, self._open_anew)

    def _open_anew(self) -> lmdb.Environment:
        with self._gate.alone():
            self._env.close()
            self._env = open_environment(self._path, self._map_bytes, max_spare_txns=2)
        return self._env

    def salvage(self) -> None:
        """Its structure is damaged: close it, and open a fresh one with what can be read of it."""
        mark_damaged(self._path)
        self._open_anew()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

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
            start = _PAGE
            while cursor.set_range(start) and cursor.key().startswith(_PAGE):
                found.append(int.from_bytes(check_order(cursor.key(), start)[1:5], "big"))
                if found[-1] == 0xFFFFFFFF:
                    break
                start = _PAGE + (found[-1] + 1).to_bytes(4, "big")
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
        with writing(self._env, self._path) as txn:
            txn.put(key, body + xxh3_128_digest(key + body))

    def drop_namespace(self, number: int) -> None:
        """Delete a namespace and all its pages, durably."""
        prefix = _PAGE + number.to_bytes(4, "big")
        with writing(self._env, self._path) as txn:
            txn.delete(_NAMESPACE + number.to_bytes(4, "big"))
            with txn.cursor() as cursor:
                while cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix):
                    cursor.delete()

    def commit(self, batch: JournalBatch) -> None:
        """Apply a batch in one transaction; it is durable when this returns."""
        with writing(self._env, self._path) as txn:
            for number, key in batch.delete_pages:
                txn.delete(_page_key(number, key))
            for number, key, record in batch.put_pages:
                txn.put(_page_key(number, key), record)

    def scan(
        self, number: int, namespace_digest: bytes, label_bytes: int, after: bytes | None = None, limit: int = SCAN_RECORDS
    ) -> RecordBatch:
        """The next page records of a namespace, at most `limit`, from the key behind `after` on."""
        prefix = _PAGE + number.to_bytes(4, "big")
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            start = prefix if after is None else prefix + after + b"\0"
            items = list(islice(cursor.iternext(), limit)) if cursor.set_range(start) else []
        if items:
            check_order(items[-1][0], start)
        more = len(items) == limit
        if items and not items[-1][0].startswith(prefix):
            del items[bisect_left(items, True, key=lambda item: not item[0].startswith(prefix)) :]
            more = False
        keys, values = [key[5:] for key, _ in items], [value for _, value in items]
        groups, bad = _verified(namespace_digest, keys, values, label_bytes)
        return RecordBatch(groups, bad, keys[-1] if more else None)

    def load(self, number: int, namespace_digest: bytes, label_bytes: int) -> tuple[list[RecordGroup], list[bytes]]:
        """All page records of a namespace that verify, grouped by shape, and the keys of those that do not."""
        batches = [self.scan(number, namespace_digest, label_bytes)]
        while batches[-1].resume is not None:
            batches.append(self.scan(number, namespace_digest, label_bytes, batches[-1].resume))
        return merge_groups([g for batch in batches for g in batch.groups]), [key for batch in batches for key in batch.bad]

    @property
    def entries(self) -> int:
        """Records in the file, of pages and of namespaces."""
        entries: int = self._env.stat()["entries"]
        return entries

    def delete_raw(self, number: int, keys: Iterable[bytes]) -> None:
        """Delete records whatever their keys look like (a damaged key need not be 32 bytes)."""
        self.commit(JournalBatch(delete_pages=[(number, key) for key in keys]))


def _verified(namespace_digest: bytes, keys: list[bytes], values: list[bytes], label_bytes: int) -> tuple[list[RecordGroup], list[bytes]]:
    """Check all digests and lengths. What is read in one go is sorted by length first, so that the work is on whole arrays."""
    groups, bad = [], []
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, length in enumerate(zip(map(len, keys), map(len, values), strict=True)):
        by_length.setdefault(length, []).append(index)
    for (key_bytes, value_bytes), members in by_length.items():
        if key_bytes != KEY_BYTES or value_bytes < _HEAD.size + DIGEST_BYTES:
            bad += [keys[i] for i in members]
            continue
        some_keys = np.frombuffer(b"".join([keys[i] for i in members]), np.uint8).reshape(-1, KEY_BYTES)
        rows = np.frombuffer(b"".join([values[i] for i in members]), np.uint8).reshape(-1, value_bytes)
        good = _digests_match(namespace_digest, some_keys, rows)
        good &= rows[:, 0] == _RECORD_VERSION
        labelled, parts = (rows[:, 1] & _HAS_LABEL).astype(np.int64), np.ascontiguousarray(rows[:, 2:4]).view("<u2")[:, 0].astype(np.int64)
        good &= _HEAD.size + labelled * label_bytes + parts * _PART.size + DIGEST_BYTES == value_bytes
        bad += [keys[members[i]] for i in np.flatnonzero(~good).tolist()]
        for flag in np.unique(labelled[good]).tolist():
            chosen = good & (labelled == flag)
            groups.append(_group(some_keys[chosen], rows[chosen], label_bytes))
    return groups, bad


def _digests_match(namespace_digest: bytes, keys: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    head, body = len(namespace_digest), rows.shape[1] - DIGEST_BYTES
    whole = np.empty((len(rows), head + KEY_BYTES + body), np.uint8)
    whole[:, :head] = np.frombuffer(namespace_digest, np.uint8)
    whole[:, head : head + KEY_BYTES] = keys
    whole[:, head + KEY_BYTES :] = rows[:, :body]
    view, width = whole.reshape(-1).data, whole.shape[1]
    digests = b"".join([xxh3_128_digest(view[at : at + width]) for at in range(0, whole.size, width)])
    same: npt.NDArray[np.bool_] = (rows[:, body:] == np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)).all(axis=1)
    return same


def _group(keys: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8], label_bytes: int) -> RecordGroup:
    at = _HEAD.size
    head = np.ascontiguousarray(rows[:, :at]).view(_HEAD_DTYPE)[:, 0]
    labels = None
    if rows[0, 1] & _HAS_LABEL:
        labels = np.ascontiguousarray(rows[:, at : at + label_bytes])
        at += label_bytes
    parts = np.ascontiguousarray(rows[:, at : rows.shape[1] - DIGEST_BYTES]).view(_PART_DTYPE)
    return RecordGroup(keys, head, labels, parts)


def merge_groups(groups: list[RecordGroup]) -> list[RecordGroup]:
    """The same records in one group a shape."""
    by_shape: dict[tuple[bool, int], list[RecordGroup]] = {}
    for group in groups:
        by_shape.setdefault((group.labels is None, group.parts.shape[1]), []).append(group)
    return [
        RecordGroup(
            np.concatenate([g.keys for g in same]), np.concatenate([g.head for g in same]),
            np.concatenate([g.labels for g in same if g.labels is not None]) if same[0].labels is not None else None,
            np.concatenate([g.parts for g in same]),
        )
        for same in by_shape.values()
    ]  # fmt: skip
