"""Seconds that calls are given: what is none is refused by name, without end is for ever, and a wait is no longer for being asked anew."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore_client import AsyncClient, BadRequest, Client, ConnectionLost
from kvstore_client.connection import Connection
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context

INF = float("inf")


@pytest.mark.parametrize("timeout", [INF, 1e300, 10**400])
def test_a_timeout_without_end(daemon: DaemonProcess, timeout: float) -> None:
    tokens = context(1)
    out = np.zeros(4 * SPEC.page_bytes, np.uint8)
    with Client(daemon.endpoint, timeout=timeout) as client:
        namespace = client.namespace("pages", "rev-1", SPEC)
        namespace.put(tokens, content(tokens), timeout=timeout)
        for _ in range(6):  # the last ones go by the calling thread
            with namespace.match(tokens, timeout=timeout) as match:
                assert namespace.fetch(match, out, timeout=timeout) == len(out)

    async def on_a_loop() -> None:
        async with AsyncClient(daemon.endpoint, timeout=timeout) as asynchronous:
            await asynchronous.ping(timeout)
            async with await (await asynchronous.namespace("pages")).match(tokens, timeout=timeout) as match:
                assert match.pages == 4

    asyncio.run(on_a_loop())


@pytest.mark.parametrize("seconds", [-1, -0.5, INF, float("nan"), 1e300])
def test_seconds_that_are_none_are_named(daemon: DaemonProcess, seconds: float) -> None:
    tokens, data = context(2), content(context(2))
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages", "rev-1", SPEC)
        with namespace.match(tokens) as match:
            calls: dict[str, list[Callable[[], Any]]] = {
                "lease_s": [
                    lambda: namespace.match(tokens, lease_s=seconds),
                    lambda: namespace.session(lease_s=seconds),
                    lambda: match.renew(seconds),
                ],
                "rebuild_s": [lambda: namespace.match(tokens, rebuild_s=seconds)],
                "whole_s": [lambda: namespace.put(tokens, data, whole_s=seconds), lambda: namespace.stream_put(tokens, whole_s=seconds)],
                "wait_s": [lambda: namespace.rebuild(tokens, wait_s=seconds), lambda: namespace.rebuild_check(tokens, wait_s=seconds)],
                "within_s": [lambda: namespace.prefetch(tokens, within_s=seconds)],
            }
            with pytest.raises(
                BadRequest, match=rf"^ttl_s is {re.escape(f'{seconds:g}')}: it is more than 0 and up to 2592000 \(seconds\)"
            ):
                namespace.pin(tokens, seconds)
            for name, named in calls.items():
                for call in named:
                    with pytest.raises(BadRequest, match=f"^{name} is {re.escape(str(seconds))}, not a number of seconds from 0"):
                        call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reconnect": -1}, "^reconnect is -1, not a number of seconds, 0 or more"),
        ({"reconnect": float("nan")}, "^reconnect is nan"),
        ({"timeout": True}, "^timeout is True, not a number of seconds above 0"),
        ({"timeout": -1}, "^timeout is -1"),
    ],
)
def test_a_clients_own(daemon: DaemonProcess, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Client(daemon.endpoint, **options)


def test_what_is_no_number_and_what_are_no_costs(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages", "rev-1", SPEC)
        for call in (lambda: namespace.match(context(3), timeout=True), lambda: client.ping(True)):
            with pytest.raises(BadRequest, match=r"^timeout is True"):
                call()
        with pytest.raises(BadRequest, match=r"^lease_s is True"):
            namespace.match(context(3), lease_s=True)
        with pytest.raises(BadRequest, match=r"^costs is 3: give True, False or Costs"):
            namespace.session(costs=3)  # type: ignore[arg-type]


async def test_a_wait_that_is_asked_anew_is_no_longer_for_it(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    call, asked = Connection.call, list[int]()

    async def cut_off_once(self: Connection, kind: FrameType, message: Any, *rest: Any) -> Any:
        if kind in (FrameType.MATCH, FrameType.REBUILD):
            asked.append(message.rebuild_ms if kind is FrameType.MATCH else message.wait_ms)
            if len(asked) % 2:
                await asyncio.sleep(0.05)
                raise ConnectionLost("cut off")
        return await call(self, kind, message, *rest)

    monkeypatch.setattr(Connection, "call", cut_off_once)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("with-recipes", "rev-2", SPEC, recipes=True)
        tokens = context(4)
        await namespace.put(tokens, content(tokens), durable=True)
        async with await namespace.match(tokens, rebuild_s=6) as match:
            assert match.pages == 4
        assert (await namespace.rebuild(tokens, wait_s=6)).pages == 4
    assert len(asked) == 4
    for first, second in (asked[:2], asked[2:]):
        assert second <= first - 50 <= 5950
