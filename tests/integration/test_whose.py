"""A match is of one namespace of one client, and an asynchronous client of one event loop: any other use is refused at once."""

import asyncio

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_match_is_of_one_namespace_of_one_client(daemon: DaemonProcess, shared_memory: bool) -> None:
    tokens, out = context(1), np.zeros(4 * SPEC.page_bytes, np.uint8)
    with Client(daemon.endpoint, shared_memory=shared_memory) as client, Client(daemon.endpoint, shared_memory=shared_memory) as second:
        namespace, other, again = open_namespace(client), client.namespace("other", "rev-2", SPEC), open_namespace(client)
        namespace.put(tokens, content(tokens))
        with namespace.match(tokens) as match:
            for wrong, said in ((other, "of the namespace 'pages', not of 'other'"), (open_namespace(second), "of another client")):
                with pytest.raises(BadRequest, match=said):
                    wrong.fetch(match, out)
                with pytest.raises(BadRequest, match=said):
                    wrong.view(match)
                with pytest.raises(BadRequest, match=said):
                    wrong.match(tokens, base=match)
                with pytest.raises(BadRequest, match=said):
                    wrong.put(tokens, content(tokens), base=match)
            assert not out.any(), "bytes of another namespace were given"
            again.fetch(match, out)
            assert np.array_equal(out, content(tokens))


def test_an_asynchronous_client_is_of_one_event_loop(daemon: DaemonProcess) -> None:
    async def made() -> AsyncClient:
        client = AsyncClient(daemon.endpoint)
        namespace = await client.namespace("pages", "rev-1", SPEC)
        tokens = context(2)
        await namespace.put(tokens, content(tokens))
        await (await namespace.match(tokens)).release()
        return client

    client = asyncio.run(made())
    with pytest.raises(BadRequest, match="of an event loop that has ended: make a client in this one"):
        asyncio.run(client.ping())
    asyncio.run(client.close())
    asyncio.run(client.close())


async def test_a_client_of_another_thread_is_closed_there(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client).match(context(1)).release()
        with pytest.raises(BadRequest, match="of an event loop that is not this one"):
            await client.inner.ping()
        await client.inner.close()
        with pytest.raises(BadRequest, match="was closed"):
            client.ping()
