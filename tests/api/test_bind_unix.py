"""The Unix socket: whoever may not come must not get near it, and no folder is made that nobody asked for."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.api.data_plane import bind_unix
from kvstore.errors import Conflict


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_is_made_is_for_its_user_only(tmp_path: Path) -> None:
    listener, endpoint = bind_unix(tmp_path / "own" / "kv.sock")
    listener.close()
    assert endpoint == f"unix:{tmp_path / 'own' / 'kv.sock'}"
    assert mode(tmp_path / "own") == 0o700
    assert mode(tmp_path / "own" / "kv.sock") == 0o600


def test_no_tree_of_folders_is_made(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match=r"the folder .*/none is not there: make it"):
        bind_unix(tmp_path / "none" / "own" / "kv.sock")
    assert not list(tmp_path.iterdir())
