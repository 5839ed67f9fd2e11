"""Models with sliding windows beside full attention, and engines of several tensor-parallel ranks."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.store import PAGE, pages, read_pages, wait_for_pages

WINDOW = 200
TOKENS = [token % 1000 for token in prompt("docs/http.md", 900)]
SHORT = prompt("docs/http.md", 300)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights in which every other layer looks at a window only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("hybrid") / "model"
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=4096,
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_windows_are_kept_beside_full_attention(hybrid: Path, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "data", "--dram", "128MiB", "--ssd", "256MiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        options = {"model": str(hybrid), "skip_tokenizer_init": True}
        with EngineProcess(connector(daemon.endpoint), **options) as first:
            cold = first.ask(TOKENS)
            own = first.ask(TOKENS)
            namespace = wait_for_pages(client, TOKENS, pages(TOKENS))
        assert sorted(component.kind for component in namespace.spec.components) == ["full", "window"]
        with EngineProcess(connector(daemon.endpoint), **options) as second:
            loaded = second.ask(TOKENS)
            second.call("forget")
            shorter = second.ask(TOKENS[: 4 * PAGE + 5], 1)
        assert cold["cached"] == 0
        assert loaded["cached"] == own["cached"] == pages(TOKENS) * PAGE
        assert loaded["tokens"] == own["tokens"]
        assert shorter["cached"] == 4 * PAGE


def test_ranks_of_another_number_read_what_ranks_wrote(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "data", "--dram", "128MiB", "--ssd", "256MiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        with EngineProcess(connector(daemon.endpoint), tensor_parallel_size=3) as three:
            assert three.ask(SHORT)["cached"] == 0
            namespace = wait_for_pages(client, SHORT, pages(SHORT))
            written = read_pages(namespace, SHORT)
        with EngineProcess(connector(daemon.endpoint)) as one:
            loaded = one.ask(SHORT, dump=tmp_path / "loaded.npy")
        assert loaded["cached"] == pages(SHORT) * PAGE
        assert np.array_equal(np.load(tmp_path / "loaded.npy")[: pages(SHORT)], written[: pages(SHORT)])
