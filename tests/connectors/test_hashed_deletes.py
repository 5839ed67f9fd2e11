"""Pages that stand alone, many to a DELETE: those that are leased stay, and the rest goes."""

import pytest

from kvstore_client import AsyncClient
from kvstore_connectors.hashed_deletes import delete_pages
from kvstore_connectors.hashed_pages import scattered
from kvstore_connectors.hashed_puts import put_pages
from kvstore_workers.daemon_process import DaemonProcess
from tests.connectors.test_hashed_puts import filled, names, spec_of
from tests.integration.raw import stat


def deletes(daemon: DaemonProcess) -> int:
    return int(stat(daemon.http)["requests"].get("delete", {}).get("count", 0))


@pytest.mark.parametrize("leased", [[], [0], [7, 8, 299], list(range(300))], ids=["none", "one", "some", "all"])
async def test_all_go_but_those_that_are_leased(daemon: DaemonProcess, leased: list[int]) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("deletes", "rev", spec_of(64))
        data = filled(300, 64)
        await put_pages(namespace, names(range(256)), scattered([[data.ctypes.data + p * 64] for p in range(256)], 64), durable=False)
        await put_pages(
            namespace, names(range(256, 300)), scattered([[data.ctypes.data + p * 64] for p in range(256, 300)], 64), durable=False
        )
        held = [await namespace.match(b"".join(names(leased[at : at + 256])), holes=True) for at in range(0, len(leased), 256)]
        before = deletes(daemon)
        gone = await delete_pages(namespace, names([*range(300), 5, 1000]))
        assert gone == set(names(range(300))) - set(names(leased))
        if len(leased) < 4:
            assert deletes(daemon) - before < 40, "one request a page"
        for match in held:
            await match.release()
        assert await delete_pages(namespace, names(range(300))) == set(names(leased))
        assert await delete_pages(namespace, names(range(300))) == set()
