"""The OpenAPI document is true: schemathesis runs it against a real daemon, with all its checks."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.api.guard import Guard
from kvstore.api.http import ControlPlane
from kvstore.api.models import ComponentBody, Namespace, SpecBody
from kvstore.api.wire.messages import NamespaceInfo
from kvstore.kvspec import Component, KVSpec
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import content, context, open_namespace
from tests.integration.secured import ADMIN, ALICE_READS, write_tokens
from tests.integration.test_http import ask

EXAMPLES = os.environ.get("OPENAPI_EXAMPLES", "6")
TOKEN_EXAMPLES = os.environ.get("OPENAPI_EXAMPLES", "2")
"""Of each operation: what is new with tokens is the same for every body."""
pytestmark = pytest.mark.timeout(3600 if "OPENAPI_EXAMPLES" in os.environ else 300)
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("schemathesis.toml")


def schemathesis(daemon: DaemonProcess, *arguments: str, config: Path = CONFIG, examples: str = EXAMPLES) -> str:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{daemon.http}/openapi.json"]
    limits = ["--checks", "all", "--max-examples", examples, "--generation-deterministic", "--no-color"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.integration.schemathesis_hooks"}
    done = subprocess.run([*command, *limits, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_schemathesis_finds_nothing(daemon: DaemonProcess) -> None:
    found = schemathesis(daemon)
    assert "Tested: 0" not in found
    assert "skipped: " not in found.lower()


def test_schemathesis_finds_nothing_in_a_blob_that_is_there(daemon: DaemonProcess, tmp_path: Path) -> None:
    from kvstore_client import Client

    with Client(daemon.endpoint) as client:
        open_namespace(client, "blobs").put(context(1), content(context(1)))
    body = {"tokens": context(1).tolist(), "parts": True}
    blob = json.loads(ask(f"{daemon.http}/v1/namespaces/blobs/match", "POST", body)[2])["blobs"][0]
    config = tmp_path / "schemathesis.toml"
    config.write_text(f'[parameters]\n"path.namespace" = "blobs"\n"path.blob" = "{blob}"\n' + CONFIG.read_text())
    found = schemathesis(daemon, "--include-path-regex", "/v1/blobs/", "--phases", "coverage,fuzzing", config=config)
    assert "Missing test data" not in found


def test_schemathesis_finds_nothing_where_tokens_are_needed(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--tokens-file", str(write_tokens(tmp_path / "tokens.toml")), "--dram", "16MiB") as daemon:
        for token in (ADMIN, ALICE_READS):
            schemathesis(daemon, "--phases", "fuzzing", "--header", f"Authorization: Bearer {token}", examples=TOKEN_EXAMPLES)


def test_the_document_has_every_route_and_nothing_else(daemon: DaemonProcess) -> None:
    document: dict[str, Any] = json.loads(ask(f"{daemon.http}/openapi.json")[2])
    assert document["openapi"].startswith("3.1")
    written = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    app = ControlPlane([], Guard()).app
    served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None}
    assert written <= served
    assert {(m, p) for m, p in served if m != "HEAD"} == {(m, p) for m, p in written if m != "HEAD"}


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (ComponentBody, {f.name for f in fields(Component)}),
        (SpecBody, {f.name for f in fields(KVSpec)}),
        (Namespace, {f.name for f in msgspec.structs.fields(NamespaceInfo)} | {"tenant"}),
    ],
)
def test_models_have_the_fields_of_what_they_stand_for(model: Any, value: set[str]) -> None:
    assert set(model.model_fields) == value
