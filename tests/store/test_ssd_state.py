"""What is said of the disk under the SSD tier."""

import lmdb

from kvstore.errors import NoSpace
from kvstore.store.ssd_state import FULL, SsdState


def test_a_file_without_room_is_told_in_our_words() -> None:
    state = SsdState()
    told = state.failed(lmdb.MapFullError("mdb_put", -30792))
    assert isinstance(told, NoSpace)
    assert state.state == FULL
    assert "a file of the store is as large as its budget allows" in told.message
    assert "MDB" not in told.message
