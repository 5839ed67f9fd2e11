"""The HTTP control plane of a real daemon."""

import base64
import json
import urllib.error
import urllib.request
from dataclasses import fields
from typing import Any

import pytest

from kvstore.api.metric_texts import COUNTERS
from kvstore.store.stats import Stats
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def http(daemon: DaemonProcess) -> str:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)))
    return daemon.http


def ask(url: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def problem(answer: Answer) -> tuple[int, str]:
    status, headers, body = answer
    assert headers["Content-Type"].startswith("application/problem+json"), (headers, body)
    data = json.loads(body)
    assert data["status"] == status
    assert data["request_id"] == headers["X-Request-Id"]
    assert data["detail"]
    return status, data["code"]


def blobs(http: str) -> list[str]:
    body = {"tokens": context(1).tolist(), "parts": True}
    found: list[str] = json.loads(ask(f"{http}/v1/namespaces/pages/match", "POST", body)[2])["blobs"]
    return found


def test_health_and_metrics(http: str) -> None:
    assert ask(f"{http}/healthz")[0] == ask(f"{http}/readyz")[0] == 200
    text = ask(f"{http}/metrics")[2].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["kvstore_put_pages_total"]) >= 4
    called = next(line for line in values if line.startswith("kvstore_namespace_info{") and 'name="pages"' in line)
    named = called.partition('namespace="')[2].partition('"')[0]
    assert 'tenant="default"' in called
    assert float(values[f'kvstore_pages{{namespace="{named}"}}']) >= 4
    assert 0 < float(values['kvstore_tier_used_bytes{tier="dram"}']) <= float(values['kvstore_tier_capacity_bytes{tier="dram"}'])


def test_each_metric_says_what_it_is(http: str) -> None:
    """A counter says what it counts, and not its own name again; and all that the store counts has a text."""
    assert list(COUNTERS) == [field.name for field in fields(Stats)]
    text = ask(f"{http}/metrics")[2].decode()
    help_of = dict(line.removeprefix("# HELP ").split(" ", 1) for line in text.splitlines() if line.startswith("# HELP "))
    assert len(help_of) > len(COUNTERS) + 20
    for name, told in help_of.items():
        assert len(told.split()) >= 5, f"{name}: {told}"
        assert not told.endswith("."), name
        if "bytes" in name:
            assert "ytes" in told, f"{name} does not name its unit: {told}"
        if "seconds" in name:
            assert "econds" in told or "time" in told, f"{name} does not name its unit: {told}"


def test_a_request_id_comes_back(http: str) -> None:
    assert ask(f"{http}/healthz", X_Request_Id="mine-1")[1]["X-Request-Id"] == "mine-1"
    assert ask(f"{http}/healthz", X_Request_Id="not\tsane")[1]["X-Request-Id"] != "not\tsane"


def test_namespaces_come_and_go(http: str) -> None:
    body = {"name": "web", "fingerprint": "f", "spec": SPEC.to_dict()}
    status, headers, made = ask(f"{http}/v1/namespaces", "POST", body)
    assert status == 201
    name = json.loads(made)["id"]
    assert headers["Location"] == f"/v1/namespaces/{name}"
    assert ask(f"{http}/v1/namespaces", "POST", body)[0] == 200
    assert "web" in [n["name"] for n in json.loads(ask(f"{http}/v1/namespaces")[2])["items"]]
    assert json.loads(ask(f"{http}/v1/namespaces/web")[2])["spec"] == SPEC.to_dict()
    components = [SPEC.to_dict()["components"][0] | {"layers": 3}]
    fixed = "these are fixed when a namespace is created, and only prefill_us and prefill_ns_per_position can be changed: ask for"
    another = "a namespace is of one model fingerprint and one KV spec for good: give this one another name, or"
    for changes, words in (
        ({"fingerprint": "g"}, f"the name 'web' is taken by {name}, which has another model fingerprint; {another}"),
        ({"spec": SPEC.to_dict() | {"components": components}}, f"which has another KV spec (components.0.layers is 8, not 3); {another}"),
        ({"name": "other", "recipes": True}, f', whose name is "web", not "other", recipes is false, not true; {fixed}'),
    ):
        answer = ask(f"{http}/v1/namespaces", "POST", body | changes)
        assert problem(answer) == (409, "conflict")
        assert words in json.loads(answer[2])["detail"]
    assert ask(f"{http}/v1/namespaces", "POST", body | {"prefill_us": 7.0})[0] == 200, "this one can be changed"
    assert ask(f"{http}/v1/namespaces/{name}", "DELETE")[0] == 204
    assert problem(ask(f"{http}/v1/namespaces/{name}")) == (404, "unknown_namespace")


def test_match(http: str) -> None:
    tokens = context(1)
    found = json.loads(ask(f"{http}/v1/namespaces/pages/match", "POST", {"tokens_base64": base64.b64encode(tokens.tobytes()).decode()})[2])
    assert (found["pages"], found["tokens"], found["dram_pages"]) == (4, 16, 4)
    assert "blobs" not in found
    assert len(blobs(http)) == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 422),
        ({}, 422),
        ({"tokens": [1], "tokens_base64": ""}, 422),
        ({"tokens": [-1]}, 422),
        ({"tokens": ["x"]}, 422),
        ({"tokens": ["1"]}, 422),
        ({"tokens_base64": "***"}, 422),
        ({"tokens_base64": "YWJj"}, 400),
        ({"tokens": [1], "surprise": 1}, 422),
    ],
)
def test_bad_bodies(http: str, body: Any, status: int) -> None:
    assert problem(ask(f"{http}/v1/namespaces/pages/match", "POST", body)) == (status, "bad_request")


def test_a_field_is_named_as_it_is_in_the_body(http: str) -> None:
    for body, words in (
        ({"tokens": [1], "foo": 1}, "foo is not known"),
        ({"tokens_base64": "AAAA", "parts": 1}, "parts is 1, not true or false"),
        ({"tokens": [1, "x"]}, 'tokens.1 is "x", not a whole number'),
        ({"foo": 1}, "the body: give either tokens or tokens_base64"),
        ([1], "the body: give either tokens or tokens_base64"),
    ):
        answer = ask(f"{http}/v1/namespaces/pages/match", "POST", body)
        assert problem(answer) == (422, "bad_request")
        assert json.loads(answer[2])["detail"].startswith(words)


def test_bad_places(http: str) -> None:
    assert problem(ask(f"{http}/nowhere"))[0] == 404
    assert "GET /openapi.json" in json.loads(ask(http)[2])["detail"]
    refused = ask(f"{http}/v1/namespaces", "PUT", {})
    assert problem(refused)[0] == 405
    assert set(refused[1]["Allow"].split(",")) == {"GET", "HEAD", "POST"}
    assert problem(ask(f"{http}/v1/blobs/pages/xyz")) == (400, "bad_request")
    assert problem(ask(f"{http}/v1/blobs/pages/{'00' * 16}")) == (404, "not_found")
    assert problem(ask(f"{http}/v1/blobs/nope/{'00' * 16}")) == (404, "unknown_namespace")


def test_blobs_and_ranges(http: str) -> None:
    expected = content(context(1))[SPEC.page_bytes : 2 * SPEC.page_bytes].tobytes()
    url = f"{http}/v1/blobs/pages/{blobs(http)[1]}"
    status, headers, body = ask(url)
    assert (status, body) == (200, expected)
    assert headers["ETag"] == f'"{blobs(http)[1]}"'
    status, headers, body = ask(url, "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(expected)), b"")
    for text, start, stop in (
        ("0-9", 0, 10),
        ("4090-4200", 4090, 4201),
        ("16000-", 16000, 16384),
        ("-5", 16379, 16384),
        ("0-99999", 0, 16384),
    ):
        status, headers, body = ask(url, Range=f"bytes={text}")
        assert (status, body) == (206, expected[start:stop]), text
        assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/16384"
    assert ask(url, Range="pages=1-2")[::2] == (200, expected)
    for text in ("16384-", "99999-100000", "5-2", "-0", "-", "x"):
        assert problem(ask(url, Range=f"bytes={text}"))[0] == 416


def test_the_state_of_the_disk_has_what_is_meant_for_others(http: str) -> None:
    assert json.loads(ask(f"{http}/v1/stat")[2])["ssd_state"] == {"state": "ok", "since": 0.0, "last_error": "", "errors": 0}
