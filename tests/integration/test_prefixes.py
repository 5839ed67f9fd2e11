"""Prefetch, pin, unpin, abandon and delete through every door of a real daemon: HTTP, both forms of the SDK, and the commands."""

import base64
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import AsyncClient, BadRequest, Client, Ended, Hints, KVSpec, NotFound, Turn
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, Tokens, content, context, open_namespace
from tests.integration.raw import stat
from tests.integration.secured import ALICE, ALICE_READS, write_tokens
from tests.integration.test_cli import as_json, kvstore
from tests.integration.test_http import ask, problem

_seeds = count(1000, 10)


@pytest.fixture
def namespace(daemon: DaemonProcess) -> Iterator[Namespace]:
    with Client(daemon.endpoint) as client:
        yield open_namespace(client)


@pytest.fixture
def tokens(namespace: Namespace) -> Tokens:
    """The tokens of four pages that were just put, which share nothing with others."""
    tokens = context(next(_seeds))
    namespace.put(tokens, content(tokens))
    return tokens


@pytest.fixture
def post(daemon: DaemonProcess) -> Callable[..., tuple[int, Any]]:
    def to(name: str, **body: Any) -> tuple[int, Any]:
        status, _, text = ask(f"{daemon.http}/v1/namespaces/pages/{name}", "POST", body)
        return status, json.loads(text) if text else None

    return to


def known(namespace: Namespace, tokens: Tokens) -> int:
    return namespace.match(tokens, lease_s=0).pages


def test_over_http(namespace: Namespace, tokens: Tokens, post: Callable[..., tuple[int, Any]]) -> None:
    numbers = tokens.tolist()
    assert post("prefetch", tokens=numbers) == (200, {"pages": 4, "blobs": 0, "nbytes": 0})
    assert post("prefetch", tokens=numbers, first_page=1, last_page=3)[1]["pages"] == 2
    status, pin = post("pin", tokens_base64=base64.b64encode(tokens[:8].tobytes()).decode(), ttl_s=600)
    assert (status, pin["pages"], pin["ttl_s"]) == (200, 2, 600)
    assert post("delete", tokens=numbers)[0] == 409
    assert post("delete", tokens=numbers, from_token=11) == (200, {"pages": 2})
    assert known(namespace, tokens) == 2
    assert post("unpin", pin=pin["pin"]) == (204, None)
    assert post("unpin", pin=pin["pin"])[0] == 404
    assert post("abandon", tokens=numbers, from_token=4) == (200, {"pages": 1})
    assert post("delete", tokens=numbers) == (200, {"pages": 2})
    assert post("delete", tokens=numbers) == (200, {"pages": 0})
    assert post("pin", tokens=numbers, ttl_s=1)[0] == 404


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("pin", {"tokens": [1]}, 422),
        ("pin", {"tokens": [1], "ttl_s": 0}, 422),
        ("pin", {"tokens": [1], "ttl_s": 1e9}, 422),
        ("unpin", {"pin": 5}, 422),
        ("abandon", {}, 422),
        ("abandon", {"tokens": [1], "session": "s"}, 422),
        ("abandon", {"session": ""}, 422),
        ("abandon", {"session": "é" * 40}, 400),
        ("abandon", {"session": "s", "from_token": 4}, 400),
        ("delete", {"tokens": [1], "tokens_base64": ""}, 422),
        ("delete", {"tokens": [1], "from_token": -1}, 422),
        ("delete", {"tokens_base64": "YWJj"}, 400),
        ("prefetch", {"tokens": [1], "last_page": -2}, 422),
    ],
)
def test_bad_bodies(daemon: DaemonProcess, namespace: Namespace, name: str, body: dict[str, Any], status: int) -> None:
    assert problem(ask(f"{daemon.http}/v1/namespaces/pages/{name}", "POST", body)) == (status, "bad_request")


@pytest.mark.parametrize("flat", [False, True])
def test_digests_over_http_are_whole_and_no_numbers(daemon: DaemonProcess, flat: bool) -> None:
    spec = KVSpec(SPEC.page_tokens, SPEC.components, hash_bytes=16, flat=flat)
    digest = next(_seeds).to_bytes(16, "big")
    with Client(daemon.endpoint) as client:
        space = client.namespace(f"digests-{flat}", "rev-1", spec)
        space.put([digest], bytes(spec.page_bytes))
        for name in ("match", "prefetch", "why", "pin", "abandon", "delete"):
            more = {"ttl_s": 1} if name == "pin" else {}
            for given, words in (
                ({"tokens": [1, 2, 3, 4]}, "of digests of 16 bytes, not of tokens: give those as tokens_base64"),
                ({"tokens_base64": base64.b64encode(digest + b"more").decode()}, "tokens_base64 is 20 bytes"),
            ):
                answer = ask(f"{daemon.http}/v1/namespaces/{space.id}/{name}", "POST", given | more)
                assert problem(answer) == (400, "bad_request")
                assert words in json.loads(answer[2])["detail"]
        whole = {"tokens_base64": base64.b64encode(digest).decode()}
        assert json.loads(ask(f"{daemon.http}/v1/namespaces/{space.id}/match", "POST", whole)[2])["pages"] == 1


def test_how_long_a_pin_lasts_is_said_alike(daemon: DaemonProcess, namespace: Namespace, tokens: Tokens) -> None:
    answer = ask(f"{daemon.http}/v1/namespaces/pages/pin", "POST", {"tokens": tokens.tolist(), "ttl_s": 2_592_001})
    assert "ttl_s is 2592001, not at most 2592000" in json.loads(answer[2])["detail"]
    with pytest.raises(BadRequest, match=r"ttl_s is 2592001: it is more than 0 and up to 2592000 \(seconds\)"):
        namespace.pin(tokens, 2_592_001)
    refused = kvstore(daemon, "pin", "pages", "--tokens", "1,2,3,4", "--ttl", "2592001")
    assert refused.returncode == 2
    assert "--ttl is 2592001: it is more than 0 and up to 2592000 (seconds)" in refused.stderr


def test_who_only_reads_may_prefetch_and_no_more(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--tokens-file", str(write_tokens(tmp_path / "tokens.toml")), "--dram", "16MiB") as daemon:
        with Client(daemon.endpoint, token=ALICE) as client:
            open_namespace(client)
        bodies: dict[str, dict[str, Any]] = {"pin": {"ttl_s": 1}, "unpin": {"pin": "1"}, "abandon": {}, "delete": {}}
        for name, more in bodies.items():
            body = more if name == "unpin" else {"tokens": [1], **more}
            url = f"{daemon.http}/v1/namespaces/pages/{name}"
            assert problem(ask(url, "POST", body, Authorization=f"Bearer {ALICE_READS}")) == (403, "forbidden")
        allowed = ask(f"{daemon.http}/v1/namespaces/pages/prefetch", "POST", {"tokens": [1]}, Authorization=f"Bearer {ALICE_READS}")
        assert allowed[0] == 200


def test_blocking(namespace: Namespace, tokens: Tokens) -> None:
    assert namespace.prefetch(tokens) == 0
    number, pages = namespace.pin(tokens, 60)
    assert pages == 4
    namespace.unpin(number)
    with pytest.raises(NotFound, match=r"pin .* does not exist: it was unpinned"):
        namespace.unpin(number)
    assert namespace.abandon(tokens, from_token=7) == 3
    with pytest.raises(BadRequest):
        namespace.abandon(tokens, from_token=7, from_page=1)
    assert namespace.delete(tokens, from_token=7) == 3
    assert known(namespace, tokens) == 1
    with pytest.raises(BadRequest):
        namespace.abandon_session("")


def test_hints_travel_and_a_compaction_is_noticed(daemon: DaemonProcess, namespace: Namespace) -> None:
    tokens = context(next(_seeds), 8)
    hints = Hints("talk", Turn.MAIN, Ended.TOOL_CALL, 3600)
    namespace.put(tokens, content(tokens), hints=hints)
    before = stat(daemon.http)["totals"]
    compacted = tokens.copy()[:12]
    compacted[8:] += 1
    with namespace.match(compacted, hints=hints) as match:
        assert match.pages == 2
    after = stat(daemon.http)["totals"]
    assert (after["compactions"] - before["compactions"], after["abandoned_pages"] - before["abandoned_pages"]) == (1, 6)
    assert namespace.abandon_session(b"talk") == 8, "with what hangs from it still"
    assert namespace.abandon_session("talk") == 0


async def test_sessions_send_their_id_by_themselves(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        tokens, done = context(next(_seeds), 8), stat(daemon.http)["totals"]["abandoned_pages"]
        async with namespace.session() as session, namespace.session() as other:
            assert session.hints.session_id != other.hints.session_id
            await session.extend(tokens)
            await session.put(content(tokens), ended=Ended.END_TURN)
            await other.extend(tokens[:12])
            sub = await namespace.match(tokens[:16], hints=Hints(session.hints.session, Turn.SUB_AGENT))
            await sub.release()
            assert await namespace.abandon_session(session.hints.session) == 5, "the first three pages are the other's"
            assert stat(daemon.http)["totals"]["abandoned_pages"] == done, "that was asked for, not noticed"
            await session.extend(tokens[:0])
            assert await session.abandon(from_token=18) == 4
            assert (len(session.tokens), session.pages) == (18, 0)
            assert await session.extend(tokens[18:]) == 8
        with pytest.raises(BadRequest, match="Turn"):
            await _raw_turn(namespace, "boss")
        assert await namespace.abandon(tokens, from_token=0) == 8
        assert await namespace.delete(tokens, from_token=0) == 8


async def _raw_turn(namespace: Any, turn: str) -> None:
    hints = Hints("x")
    object.__setattr__(hints, "turn", turn)
    await namespace.match(context(1), hints=hints)


def test_commands(daemon: DaemonProcess, namespace: Namespace, tokens: Tokens, tmp_path: Path) -> None:
    text = "\n".join(map(str, tokens.tolist()))
    (tmp_path / "prompt.txt").write_text(text)
    inline, file = ",".join(map(str, tokens.tolist())), f"@{tmp_path / 'prompt.txt'}"
    assert as_json(kvstore(daemon, "prefetch", "pages", "-t", file, "--json")) == {"pages": 4, "dram_pages": 4, "blobs": 0}
    piped = kvstore(daemon, "pin", "pages", "-t", "-", "--ttl", "60", "--json", stdin=text)
    pin = as_json(piped)
    assert pin["pages"] == 4
    refused = kvstore(daemon, "delete", "pages", "-t", inline)
    assert (refused.returncode, "conflict" in refused.stderr) == (2, True)
    assert kvstore(daemon, "unpin", "pages", pin["pin"]).returncode == 0
    assert kvstore(daemon, "unpin", "pages", pin["pin"]).returncode == 1
    assert as_json(kvstore(daemon, "abandon", "pages", "-t", inline, "--from-token", "8", "--json")) == {"abandoned_pages": 2}
    assert kvstore(daemon, "abandon", "pages", "--session", "nobody").returncode == 1
    assert as_json(kvstore(daemon, "delete", "pages", "-t", inline, "--json")) == {"deleted_pages": 4}
    assert kvstore(daemon, "delete", "pages", "-t", inline).returncode == 1
    assert kvstore(daemon, "pin", "pages", "-t", inline, "--ttl", "60").returncode == 1
    assert known(namespace, tokens) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pin", "nope", "-t", "1,2,3,4", "--ttl", "1"), "unknown_namespace"),
        (("pin", "pages", "-t", "", "--ttl", "1"), "can't read tokens"),
        (("pin", "pages", "-t", "1,2,3,4", "--ttl", "-1"), "--ttl is -1: it is more than 0"),
        (("abandon", "pages", "--session", "s", "--from-token", "4"), "either --tokens"),
    ],
)
def test_a_command_that_fails_exits_with_2(daemon: DaemonProcess, arguments: tuple[str, ...], words: str) -> None:
    done = kvstore(daemon, *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
