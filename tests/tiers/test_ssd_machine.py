"""The SSD tier against a dictionary: hardly any room beside it, errors at each step of a commit, readers in between, kills, restarts."""

import errno
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import lmdb
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import NotFound
from kvstore.kvspec import SliceLayout
from kvstore.tiers.blob_index import BlobIndex
from kvstore.tiers.extent_file import ExtentFile
from kvstore.tiers.ssd import BlobBatch, BlobFile, extents_beside

CAPACITY = 60 * 4096
LAYOUTS = tuple(SliceLayout((size,)) for size in (100, 4000, 4096, 20_000, 50_000))
Name = tuple[int, bytes]
STEPS = ((ExtentFile, "write"), (ExtentFile, "sync"), (BlobIndex, "commit"))


def make(seed: int) -> tuple[bytes, SliceLayout, memoryview]:
    layout = LAYOUTS[seed % len(LAYOUTS)]
    payload = np.random.default_rng(seed).bytes(layout.payload_bytes)
    table = slice_digest(payload)
    return blob_id(table), layout, memoryview(payload + table)


class SsdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(patch("kvstore.tiers.ssd._ROOM_BYTES", 20 * 4096))
        self.patches.enter_context(patch("kvstore.tiers.ssd._STEP_WAIT_S", 0))
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.generation = 0
        self.there: dict[Name, tuple[SliceLayout, memoryview]] = {}
        self.reading: list[ExitStack] = []
        self.file = BlobFile(self.path, CAPACITY)

    @property
    def path(self) -> Path:
        return self.folder / str(self.generation)

    def teardown(self) -> None:
        self.end_readers()
        self.file.close()
        self.patches.close()
        shutil.rmtree(self.folder)

    def batch(self, data: st.DataObject) -> tuple[BlobBatch, dict[Name, tuple[SliceLayout, memoryview]]]:
        """Some deletes and puts that leave the tier within its capacity, and what is there then."""
        there = dict(self.there)
        gone = data.draw(st.lists(st.sampled_from(sorted(there)), unique=True, max_size=8)) if there else []
        delete = [(*name, len(there.pop(name)[1])) for name in gone]
        put = []
        for seed in data.draw(st.lists(st.integers(0, 40), unique=True, max_size=8)):
            blob, layout, stored = make(seed)
            name = (seed % 3, blob)
            used = sum(self.file.footprint(len(one)) for _, one in there.values())  # one that is written anew has both for a while
            if used + self.file.footprint(len(stored)) <= CAPACITY:
                there[name] = layout, stored
                put.append((*name, stored))
        return BlobBatch(delete, put), there

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        batch, there = self.batch(data)
        try:
            self.file.commit(batch)
        except lmdb.MapFullError:  # readers keep what was freed: a part of it may be done, deletions first
            assert self.reading
            self.end_readers()
            self.file.commit(batch)
        self.there = there

    @rule(data=st.data(), step=st.sampled_from(STEPS))
    def commit_that_fails(self, data: st.DataObject, step: tuple[type, str]) -> None:
        batch, _ = self.batch(data)
        if batch:
            with patch.object(*step, side_effect=OSError(errno.EIO, "nput/output error")):
                try:
                    self.file.commit(batch)
                except (OSError, lmdb.MapFullError):
                    self.see_what_was_deleted(batch)  # one that has no room at once is done step by step
                    return
            assert step[0] is ExtentFile
            assert not batch.put
            self.there = {name: one for name, one in self.there.items() if (*name, len(one[1])) not in batch.delete}

    def see_what_was_deleted(self, batch: BlobBatch) -> None:
        deleted = [(number, blob) for number, blob, _ in batch.delete]
        left = [name for name in deleted if name[1] in dict(self.file.stored_blobs(name[0]))]
        assert left in ([], deleted)
        if not left:
            self.there = {name: one for name, one in self.there.items() if name not in deleted}

    @rule(data=st.data())
    def commit_that_was_done_and_is_called_failed(self, data: st.DataObject) -> None:
        """LMDB gives up then, and is opened anew."""
        batch, there = self.batch(data)
        self.end_readers()
        real = BlobIndex.commit

        def panics(*given: object) -> None:
            real(*given)  # type: ignore[arg-type]
            raise lmdb.PanicError("after the meta page was written")

        with patch.object(BlobIndex, "commit", panics):
            try:
                self.file.commit(batch)
            except lmdb.PanicError:
                self.there = there
            except lmdb.MapFullError:
                raise AssertionError("nobody reads") from None
        self.file._open_anew()
        self.file.commit(BlobBatch(batch.delete + [(number, blob, len(stored)) for number, blob, stored in batch.put]))
        self.file.commit(BlobBatch(put=batch.put))  # the store deletes what may be there, and writes it again
        self.there = there

    @rule(number=st.integers(0, 2))
    def drop(self, number: int) -> None:
        self.file.drop_namespace(number, batch=2)
        self.there = {name: one for name, one in self.there.items() if name[0] != number}

    @rule()
    def somebody_reads(self) -> None:
        reader = ExitStack()
        reader.enter_context(self.file._blocks.reading())
        self.reading.append(reader)

    @precondition(lambda self: self.reading)
    @rule()
    def end_readers(self) -> None:
        while self.reading:
            self.reading.pop().close()

    @rule(nbytes=st.integers(1, 40_000))
    def probe(self, nbytes: int) -> None:
        self.end_readers()
        self.file.probe(nbytes)

    @rule(kill=st.booleans(), smaller=st.booleans())
    def restart(self, *, kill: bool, smaller: bool) -> None:
        self.end_readers()
        if kill:
            old = self.path
            self.generation += 1
            shutil.copytree(old, self.path)
            shutil.copy(extents_beside(old), extents_beside(self.path))
        self.file.close()
        if smaller:
            BlobFile(self.path, 10 * 4096).close()
        self.file = BlobFile(self.path, CAPACITY)

    @invariant()
    def all_is_there_and_accounted(self) -> None:
        for number in range(3):
            listed = dict(self.file.stored_blobs(number))
            expected = {name[1]: self.file.footprint(len(one[1])) for name, one in self.there.items() if name[0] == number}
            assert listed == expected
        assert self.file.usage().used == sum(self.file.footprint(len(one)) for _, one in self.there.values())
        for (number, blob), (layout, stored) in self.there.items():
            out = memoryview(bytearray(layout.payload_bytes + DIGEST_BYTES))
            self.file.read(number, blob, layout, out)
            assert out == stored

    @invariant()
    def no_block_is_two_things(self) -> None:
        """Free, waiting for readers, or a blob's: each block is one of these."""
        blocks = self.file._blocks
        free = blocks._space.extents()
        waiting = [extent for _, extents in blocks._retired for extent in extents]
        held = [extent for number, blob in self.there for extent in self.file._find(number, blob, len(self.there[number, blob][1]))]
        every = sorted(block for first, count in (*free, *waiting, *held) for block in range(first, first + count))
        assert every == list(range(self.file._limit)), "a block is lost, or is two things"

    @rule()
    def what_is_not_there(self) -> None:
        blob, layout, _ = make(99)
        try:
            self.file.read(1, blob, layout, memoryview(bytearray(layout.payload_bytes + DIGEST_BYTES)))
        except NotFound:
            return
        raise AssertionError("a blob that was never put")


TestSsd = SsdMachine.TestCase
TestSsd.settings = settings(max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
