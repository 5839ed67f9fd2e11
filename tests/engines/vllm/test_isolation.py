"""What must not be shared is not: engines that differ in a salt or in a dtype."""

from pathlib import Path

import numpy as np

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.store import PAGE, pages, wait_for_pages

TOKENS = prompt("docs/http.md", 400)
SHARED = pages(TOKENS) * PAGE


def test_salts_and_dtypes(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "data", "--dram", "256MiB", "--ssd", "512MiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        with EngineProcess(connector(daemon.endpoint)) as first:
            for salt in ("one", ""):
                assert first.ask(TOKENS, salt=salt)["cached"] == 0
                first.call("forget")
            wait_for_pages(client, TOKENS, pages(TOKENS))
        with EngineProcess(connector(daemon.endpoint)) as second:
            assert second.ask(TOKENS, salt="two")["cached"] == 0
            second.call("forget")
            assert second.ask(TOKENS, salt="one")["cached"] == SHARED
            second.call("forget")
            assert second.ask(TOKENS)["cached"] == SHARED
        (namespace,) = client.namespaces()
        with EngineProcess(connector(daemon.endpoint), dtype="float32") as third:
            assert third.ask(TOKENS)["cached"] == 0
            wait_for_pages(client, TOKENS, pages(TOKENS))
        spaces = client.namespaces()
        assert len(spaces) == 2
        assert {space.spec.components[0].dtype for space in spaces} == {"bf16", "f32"}
        assert namespace.match(np.array(TOKENS, np.uint32), lease_s=0).pages == pages(TOKENS)
