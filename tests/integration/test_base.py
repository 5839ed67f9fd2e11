"""What a match is good for as a base: tokens after it are those after its prefix, or the call is refused; never those after the root."""

from dataclasses import replace

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.messages import Matched, MatchRequest
from kvstore_client import AsyncClient, BadRequest, Client, Costs, KVSpec, NotFound
from kvstore_client.blocking import Namespace
from kvstore_client.blocking_match import Match
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace

TURN = context(7_000_001, 2)
"""Tokens of a turn, which are a context of their own, too."""
FLAT = KVSpec(4, SPEC.components, hash_bytes=16, flat=True)


def refused(namespace: Namespace, base: Match, why: type[Exception], said: str) -> None:
    """No call takes it, and nothing is stored."""
    new = context(7_000_011, 3)
    with pytest.raises(why, match=said):
        namespace.match(TURN, base=base)
    with pytest.raises(why, match=said):
        namespace.match(TURN, base=base, lease_s=0, parts=False)
    with pytest.raises(why, match=said):
        namespace.put(new, content(new), base=base)
    with namespace.match(new) as found:
        assert not found.pages, "a turn was stored at the root"


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_released_match_is_no_base(daemon: DaemonProcess, shared_memory: bool) -> None:
    with Client(daemon.endpoint, shared_memory=shared_memory) as client:
        namespace = open_namespace(client)
        for tokens in (context(7_000_021), TURN):
            namespace.put(tokens, content(tokens))
        with namespace.match(context(7_000_021)) as base, namespace.match(TURN, base=base) as after:
            assert after.pages == 4
        refused(namespace, base, NotFound, "released")


async def test_a_released_match_is_no_base_of_an_asynchronous_client(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        for tokens in (context(7_000_031), TURN):
            await namespace.put(tokens, content(tokens))
        async with await namespace.match(context(7_000_031)) as base:
            pass
        with pytest.raises(NotFound, match="released"):
            await namespace.match(TURN, base=base)
        with pytest.raises(NotFound, match="released"):
            await namespace.put(TURN, content(TURN), base=base)


def test_a_match_without_a_lease_is_no_base(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for tokens in (context(7_000_041), TURN):
            namespace.put(tokens, content(tokens))
        refused(namespace, namespace.match(context(7_000_041), lease_s=0), BadRequest, r"no lease.*lease_s")


def test_a_part_of_a_match_is_no_base(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for tokens in (context(7_000_051), TURN):
            namespace.put(tokens, content(tokens))
        with namespace.match(context(7_000_051), estimate=Costs(prefill_us=100)) as whole:
            assert whole.estimate is not None
            whole.inner.estimate = plan = replace(whole.estimate, pages=2, tokens=8)
            with pytest.raises(BadRequest, match="no lease"):
                client.run(namespace.inner.match(TURN, base=whole.inner.up_to(plan)))


def test_after_a_match_of_nothing_is_after_the_root(daemon: DaemonProcess) -> None:
    tokens = context(7_000_061)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        with namespace.match(tokens) as nothing:
            namespace.put(tokens, content(tokens), base=nothing)
            assert fetch_checked(namespace, tokens) == 4
            assert namespace.match(tokens, lease_s=0, base=nothing).pages == 4


def test_flat_pages_have_no_base(daemon: DaemonProcess) -> None:
    labels, data = b"".join(bytes([7, n]) * 8 for n in range(4)), np.ones(4 * FLAT.page_bytes, np.uint8)
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("flat-base", "rev-1", FLAT)
        namespace.put(labels, data)
        with namespace.match(labels[:32]) as base:
            with pytest.raises(BadRequest, match="stands alone"):
                namespace.match(labels[32:], base=base)
            with pytest.raises(BadRequest, match="stands alone"):
                namespace.put(labels[32:], data[: len(data) // 2], base=base)
            asked = MatchRequest(namespace=namespace.id, base=base.inner.lease)
            with pytest.raises(NotFound):  # from whoever does not know better
                client.run(client.inner.call(FrameType.MATCH, asked, Matched, labels[32:]))


@pytest.mark.parametrize("lease_s", [0, 60])
def test_a_session_goes_on_at_its_place_without_a_lease(daemon: DaemonProcess, lease_s: float) -> None:
    tokens = context(7_000_071 + 10 * int(lease_s), 6)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        with namespace.session(lease_s=lease_s) as session:
            session.extend(tokens[:16])
            session.put(content(tokens[:16]))
            assert session.pages == 4
            session.extend(tokens[16:])
            if session.inner.match is not None:
                client.run(session.inner.match.release())
            session.put(content(tokens, 4))
            assert session.pages == 6
        assert fetch_checked(namespace, tokens) == 6
        assert not namespace.match(tokens[16:], lease_s=0).pages, "a turn was stored at the root"


def test_a_session_of_which_all_is_there_has_nothing_to_put(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(8820), content(context(8820)))
        session = namespace.session()
        assert session.extend(context(8820)) == 4
        with pytest.raises(BadRequest, match="there is no page to put: it begins at page 4, and the prefix has 4 whole pages"):
            session.put(content(context(8820)))
