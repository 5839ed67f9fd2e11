"""What the blocking client has of the asynchronous one, and what a session or a stream says that has not begun, or has ended."""

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Client, PutResult
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.raw import stat, wait_for_baseline


def test_links_and_the_pages_that_are_there(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, shared_memory=False) as client:
        namespace, tokens = open_namespace(client), context(1)
        namespace.put(tokens, content(tokens))
        assert [link.endpoint for link in client.links] == [daemon.endpoint]
        with namespace.match(tokens) as match:
            assert match.there() == [0, 1, 2, 3]


def test_a_session_that_was_closed_takes_no_lease(daemon: DaemonProcess) -> None:
    wait_for_baseline(daemon.http)
    tokens = context(2)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        session = namespace.session()
        assert session.extend(tokens) == 4
        session.abandon(from_page=3)
        assert session.extend(tokens[12:]) == 4
        session.close()
        session.close()
        for late in (
            lambda: session.extend(tokens),
            lambda: session.fetch(np.empty(4 * SPEC.page_bytes, np.uint8)),
            lambda: session.put(content(tokens)),
        ):
            with pytest.raises(BadRequest, match="this session was closed"):
                late()
        client.ping()
        assert stat(daemon.http)["leases"] == 0


async def test_a_stream_that_was_not_entered_says_so(daemon: DaemonProcess) -> None:
    tokens = context(3)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        put, follower = namespace.stream_put(tokens), namespace.follow(b"one computation!")
        with pytest.raises(BadRequest, match="this put has not begun: enter it"):
            await put.send(0, 8, content(tokens))
        with pytest.raises(BadRequest, match="this put has not begun: enter it"):
            await put.commit()
        with pytest.raises(BadRequest, match="this put has not begun: enter it"):
            _ = put.pages
        with pytest.raises(BadRequest, match="nothing is followed yet: enter it"):
            await follower.fetch(np.empty(4 * SPEC.page_bytes, np.uint8))
        with pytest.raises(BadRequest, match="nothing is followed yet: enter it"):
            await follower.committed()
        async with namespace.stream_put(tokens) as entered:
            await entered.send(0, 8, content(tokens))
            done = await entered.commit()
    assert isinstance(done, PutResult)
    assert done.new_pages + done.existing_pages == 4
