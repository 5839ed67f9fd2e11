"""The sizes that the daemon chooses where nobody gives them, and those that it refuses."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.config import load_config
from kvstore.errors import BadRequest

MIB, GIB = 1 << 20, 1 << 30


class _Space(NamedTuple):
    total: int
    used: int
    free: int


def test_what_the_store_itself_holds_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = 64 * MIB
    free = {"bytes": 10 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: _Space(100 * GIB, 0, free["bytes"]))
    settings = load_config({"data_dir": tmp_path / "d"}, environment={})
    first = settings.store_config().ssd_bytes
    assert first == 5 * GIB
    (tmp_path / "d/blobs").mkdir(parents=True)
    with (tmp_path / "d/blobs/data.mdb").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, holds)
    free["bytes"] -= holds
    assert first <= settings.store_config().ssd_bytes <= first + MIB  # a block or two for the file system


@pytest.mark.parametrize("tier", ["dram", "ssd"])
@pytest.mark.parametrize("size", ["0", "0GiB", "1023KiB"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_tier_of_nothing_is_refused_wherever_it_is_said(tmp_path: Path, tier: str, size: str, source: str) -> None:
    (tmp_path / "c.toml").write_text(f'{tier} = "{size}"\n' if size != "0" else f"{tier} = 0\n")
    flags = {tier: size} if source == "flag" else {}
    environment = {f"KVSTORE_{tier.upper()}": size} if source == "environment" else {}
    with pytest.raises(BadRequest, match=rf"{tier} is \d+ bytes.*at least 1 MiB.*leave it out for the default"):
        load_config(flags, tmp_path / "c.toml" if source == "file" else None, environment)


def test_a_tier_that_is_no_size_is_said_once() -> None:
    with pytest.raises(BadRequest) as raised:
        load_config({"ssd": "much"}, environment={})
    assert raised.value.message == "the configuration is not valid: ssd: 'much' is not a size; write 4GiB, 512MiB or a number of bytes"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("put_wait", "1 s", 'put_wait is "1 s", not a number of seconds, without a unit'),
        ("move_share", "half", 'move_share is "half", not a number'),
        ("listen", "127.0.0.1.5:80", "listen: '127.0.0.1.5' is no address, and no name of one"),
        ("listen", "[::1::2]", "listen: '::1::2' is no address, and no name of one"),
        ("listen", "127.0.0.2,192.0.2.7:80", "it listens on 192.0.2.7, which others can reach"),
        ("host", "http://localhost", "host: 'http://localhost' is no address, and no name of one"),
    ],
)
def test_what_is_wrong_is_said_so_that_it_can_be_mended(setting: str, value: object, said: str) -> None:
    with pytest.raises(BadRequest) as raised:
        load_config({setting: value}, environment={})
    assert said in raised.value.message
