"""Names of addresses are looked up where they are bound, beside the loop, and for a bounded time."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from kvstore.api import data_plane
from kvstore.api.data_plane import bind_tcp
from kvstore.config import load_config
from kvstore.errors import BadRequest, Conflict


@pytest.mark.parametrize("host", ["not-an-address.invalid", "127.0.0.1.5", "a" * 64])
async def test_what_is_no_name_of_an_address(host: str) -> None:
    with pytest.raises(BadRequest, match=f"listen: '{host}' is no address, and no name of one: "):
        await bind_tcp("listen", host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_what_is_one(host: str) -> None:
    listener, endpoint = await bind_tcp("host", host, 0)
    with listener:
        port = listener.getsockname()[1]
        assert endpoint == f"{host}:{port}"
        with pytest.raises(Conflict, match="choose others with --host"):
            await bind_tcp("host", host, port)


async def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*given: Any, **options: Any) -> Any:
        over.wait(20)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    monkeypatch.setattr(data_plane, "_RESOLVE_S", 0.05)
    binding = asyncio.create_task(bind_tcp("host", "db.example", 0))
    try:
        await asyncio.sleep(0)  # the loop goes on
        assert not binding.done()
        with pytest.raises(BadRequest, match=r"host: nobody said within 0.05 s what address 'db.example' is of: .* give the address"):
            await binding
    finally:
        over.set()


def test_a_configuration_is_checked_without_asking_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("it asked")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    assert load_config({"host": "db.example", "listen": "db2.example", "insecure": True}, environment={}).host == "db.example"
