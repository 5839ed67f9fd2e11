"""Arguments of the wrong kind where no call is made yet: a typed error that names them, never a raw one."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore_client import (
    AsyncRebuildWorker,
    BadRequest,
    Client,
    Given,
    OpenAIRebuilder,
    PartRange,
    RebuildWorker,
    Scattered,
)
from kvstore_client.blocking import Namespace
from kvstore_client.blocking_match import Match
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace

MEMORY = np.zeros(4 * SPEC.page_bytes, np.uint8)
PLACES = [[page * SPEC.page_bytes] for page in range(4)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda wrong: Given.text(wrong), "^text is .*, not text, or a list of texts"),
        (lambda wrong: Given.reference(wrong), "^reference is .*, not bytes, or a list of bytes"),
    ],
)
@pytest.mark.parametrize("wrong", [5, None, [1], {"a": 1}, object()])
def test_recipes(call: Callable[[Any], object], said: str, wrong: Any) -> None:
    with pytest.raises(BadRequest, match=said):
        call(wrong)


def test_text_is_no_bytes() -> None:
    for text in (b"x", b"", [b"x"]):
        with pytest.raises(BadRequest, match=r"^text is"):
            Given.text(text)  # type: ignore[arg-type]
    for reference in ("x", ["x"]):
        with pytest.raises(BadRequest, match=r"^reference is"):
            Given.reference(reference)  # type: ignore[arg-type]
    assert Given.text(("a", "b")).bodies == (b"a", b"b")
    assert Given.reference(b"a").bodies == (b"a",)


def test_workers(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("^client is 5, not a Client", lambda: RebuildWorker(5, "x")),  # type: ignore[arg-type]
            ("^client is .*, not an AsyncClient", lambda: AsyncRebuildWorker(client, "x")),  # type: ignore[arg-type]
            ("^namespace is 5, not text", lambda: RebuildWorker(client, 5)),  # type: ignore[arg-type]
            ("^fetch_prefix is 'x'", lambda: RebuildWorker(client, "x", fetch_prefix="x")),  # type: ignore[arg-type]
            ("^lease_s is -1", lambda: RebuildWorker(client, "x", lease_s=-1)),
            ("^wait_s is inf", lambda: RebuildWorker(client, "x", wait_s=float("inf"))),
            ("^wait_s is -1", lambda: RebuildWorker(client, "x").run_once(-1)),
            ("^function is 5, not a function to call", lambda: RebuildWorker(client, "x").rebuild(5)),  # type: ignore[arg-type]
            ("^url is 5, not text", lambda: OpenAIRebuilder(5, "m")),  # type: ignore[arg-type]
            ("^model is 5, not text", lambda: OpenAIRebuilder("http://127.0.0.1:1", 5)),  # type: ignore[arg-type]
            ("^timeout is 0", lambda: OpenAIRebuilder("http://127.0.0.1:1", "m", timeout=0)),
        ]
        for said, call in wrong:
            with pytest.raises(BadRequest, match=said):
                call()


def fetches(namespace: Namespace, match: Match, memory: Any, places: Any) -> int:
    return namespace.fetch(match, Scattered(memory, places))


@pytest.mark.parametrize(
    ("memory", "places", "said"),
    [
        ("abc", PLACES, "^the memory of scattered pages is 'abc', not a buffer"),
        (MEMORY, 5, "^places is 5, not a list of byte offsets"),
        (MEMORY, [5] * 4, "^places is .*, not a list of byte offsets"),
        (MEMORY, [["a"]] * 4, "^places is .*, not a list of byte offsets"),
        (MEMORY, [[-1]] * 4, "lies outside the memory"),
    ],
)
def test_scattered_pages(daemon: DaemonProcess, memory: Any, places: Any, said: str) -> None:
    tokens = context(1)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        with pytest.raises(BadRequest, match=said):
            namespace.put(context(2), Scattered(memory, places))
        with namespace.match(tokens) as match, pytest.raises(BadRequest, match=said):
            fetches(namespace, match, memory, places)


def test_scattered_pages_into_what_can_only_be_read_and_into_wide_numbers(daemon: DaemonProcess) -> None:
    tokens = context(1)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        with namespace.match(tokens) as match:
            with pytest.raises(BadRequest, match="read-only: it can't be fetched into"):
                fetches(namespace, match, memoryview(bytes(MEMORY)), PLACES)
            wide = np.zeros(len(MEMORY) // 2, np.uint16)
            assert fetches(namespace, match, wide, PLACES) == len(MEMORY)
            assert np.array_equal(wide.view(np.uint8), content(tokens))


def test_ranges(daemon: DaemonProcess) -> None:
    tokens = context(1)
    for wrong in (5, None, "x", (0, 0, 1, 0, 1)):
        with pytest.raises(BadRequest, match="not a PartRange"):
            SPEC.part_bytes(wrong)  # type: ignore[arg-type]
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        with namespace.match(tokens) as match, pytest.raises(BadRequest, match="not a PartRange of whole numbers, such as"):
            namespace.fetch(match, bytearray(1), wanted=PartRange("a", 0, 1, 0, 1))  # type: ignore[arg-type]


WITHOUT_DESCRIPTORS = """
import asyncio, resource, sys
from pathlib import Path
from kvstore_client import AsyncClient, Client, ConnectionLost

def left(count):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    used = len(list(Path("/proc/self/fd").iterdir())) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, hard))

async def asynchronous():
    left(0)
    async with AsyncClient(sys.argv[1]):
        pass

with Client(sys.argv[1]) as client:
    client.ping()
for count in range(5):
    left(count)
    try:
        Client(sys.argv[1]).close()
    except ConnectionLost as error:
        assert "ulimit -n" in error.message, error
        print("told")
left(3)
try:
    asyncio.run(asynchronous())
except ConnectionLost as error:
    assert "ulimit -n" in error.message, error
    print("told")
"""


def test_a_client_for_which_no_descriptors_are_left(daemon: DaemonProcess) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS, daemon.endpoint], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told") >= 5
    assert not done.stderr
