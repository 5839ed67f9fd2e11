"""What tests of computing pages again share: contexts and their pages, what the daemon says of it, and workers in processes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client import (
    Component,
    KVSpec,
)
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.rebuild_worker import SimulatedModel
from tests.forked_daemon import Fork, forked_module
from tests.integration.test_http import ask

SPEC = KVSpec(4, (Component("full", 4, 2, 32, "f32"),), max_slice_bytes=4096)
Tokens = npt.NDArray[np.uint32]


def tokens(pages: int = 4, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, pages * SPEC.page_tokens, dtype=np.uint32)


def put(namespace: Namespace, ids: Tokens, model: str = "generator", **options: Any) -> npt.NDArray[np.uint8]:
    pages = SimulatedModel(namespace.spec, model).pages(ids, 0, len(ids) // SPEC.page_tokens)
    namespace.put(ids, pages, **options)
    return pages


def dropped(namespace: Namespace, ids: Tokens, model: str = "generator", from_page: int = 0) -> npt.NDArray[np.uint8]:
    """Put pages, and drop them to text."""
    pages = put(namespace, ids, model)
    assert namespace.drop_to_text(ids, from_page=from_page) == len(pages) - from_page
    return pages


def fetched(namespace: Namespace, ids: Tokens, rebuild_s: float = 20.0) -> npt.NDArray[np.uint8]:
    with namespace.match(ids, rebuild_s=rebuild_s) as match:
        out = np.empty((match.pages, namespace.spec.page_bytes), np.uint8)
        if match.pages:
            namespace.fetch(match, out)
        return out


def state(daemon: DaemonProcess, namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(f"{daemon.http}/v1/namespaces/{namespace.id}/rebuild")[2])
    return found


def settled(daemon: DaemonProcess, namespace: Namespace, pages: int) -> dict[str, Any]:
    """The state once all rebuilt pages are compared, which is some milliseconds after they are there."""
    while True:
        found = state(daemon, namespace)
        if found["same_pages"] + found["new_version_pages"] + found["uncompared_pages"] >= pages:
            return found


def totals(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = json.loads(ask(f"{daemon.http}/v1/stat")[2])["totals"]
    return found


@contextmanager
def worker(daemon: DaemonProcess, namespace: Namespace, *arguments: str) -> Iterator[Fork]:
    """A rebuild worker in a process of its own."""
    place = ("--endpoint", daemon.endpoint, "--namespace", namespace.id)
    with forked_module("kvstore_workers.rebuild_worker", *place, *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        yield process
