"""What is said of the disk under the SSD tier."""

import errno
import os

import lmdb
import pytest

from kvstore.errors import DiskFailing, NoSpace
from kvstore.store.ssd.state import FAILING, FULL, SsdState


def test_a_file_without_room_is_told_in_our_words() -> None:
    state = SsdState()
    told = state.failed(lmdb.MapFullError("mdb_put", -30792))
    assert isinstance(told, NoSpace)
    assert state.state == FULL
    assert "a file of the store is as large as its budget allows" in told.message
    assert "a larger --ssd" in told.message
    assert "MDB" not in told.message
    assert "disk under" not in told.message, "that has room"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room on the file system of the data directory"),
        (errno.EDQUOT, "the disk quota of the user"),
        (errno.EFBIG, "the largest file"),
    ],
)
def test_each_kind_of_shortage_has_its_own_advice(number: int, advice: str) -> None:
    for error in (OSError(number, os.strerror(number)), lmdb.Error(f"mdb_txn_commit: {os.strerror(number)}")):
        state = SsdState()
        told = state.failed(error)
        assert isinstance(told, NoSpace)
        assert advice in told.message
        assert os.strerror(number) in told.message
        assert "or start it with a smaller --ssd" in told.message
        assert "a larger --ssd" not in told.message, "that asks for more of what is not there"


def test_what_failed_last_is_what_is_advised_on() -> None:
    state = SsdState()
    state.failed(lmdb.MapFullError("mdb_put", -30792))
    assert "make room on the file system" in state.failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))).message
    told = state.failed(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert isinstance(told, DiskFailing)
    assert state.state == FAILING
