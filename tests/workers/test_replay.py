"""The simulated workers: the trace, the order of dependent requests, and a small demo from end to end."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import BadRequest
from kvstore_workers.generator import PageGenerator, prompt_tokens
from kvstore_workers.trace import BLOCK_TOKENS, dependencies, excerpt_path, model_hits, read_mooncake


def test_the_excerpt_and_its_model() -> None:
    requests = read_mooncake(excerpt_path())
    assert len(requests) == 500
    hit, asked = model_hits(requests)
    assert asked == sum(r.input_tokens for r in requests)
    assert 0.1 < hit / asked < 0.3
    for request in requests:
        assert len(request.blocks) == request.input_tokens // BLOCK_TOKENS


def test_a_request_depends_on_whoever_first_brought_its_blocks() -> None:
    requests = read_mooncake(excerpt_path())[:200]
    needs = dependencies(requests)
    for request, earlier in zip(requests, needs, strict=True):
        assert all(e < request.number for e in earlier)
        seen = {b for e in earlier for b in requests[e].blocks}
        first = request.blocks[0] if request.blocks else None
        known = any(first in r.blocks for r in requests[: request.number])
        assert (first in seen) == known


def test_equal_prefixes_give_equal_tokens_and_bytes_and_others_do_not() -> None:
    requests = read_mooncake(excerpt_path())[:40]
    generator = PageGenerator(4096)
    seeds: dict[int, bytes] = {}
    for request in requests:
        tokens = prompt_tokens(request)
        assert len(tokens) == request.input_tokens
        for block, seed in zip(request.blocks, generator.seeds(tokens), strict=True):
            assert seeds.setdefault(block, seed) == seed
    assert len(set(seeds.values())) == len(seeds)
    page, other = np.zeros(512, np.uint64), np.zeros(512, np.uint64)
    first, second = list(seeds.values())[:2]
    generator.fill(first, page)
    generator.fill(second, other)
    assert generator.wrong_bytes(first, page) == 0
    assert generator.wrong_bytes(first, other) > 4000
    page.view(np.uint8)[17] ^= 1
    assert generator.wrong_bytes(first, page) == 1


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timestamp": 0}\n')
    with pytest.raises(BadRequest, match="line 2"):
        read_mooncake(path)


@pytest.mark.timeout(100)
def test_the_demo_from_end_to_end() -> None:
    """Forty requests, three workers, DRAM for a fraction: right to the byte, and the hits that are due."""
    command = [sys.executable, "-m", "kvstore_workers.demo", "--requests", "40", "--workers", "3", "--bytes-per-token", "64"]
    done = subprocess.run([*command, "--compute-us", "0", "--dram", "8MiB", "--ssd", "128MiB"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong bytes" in done.stdout


@pytest.mark.timeout(100)
def test_the_demo_fails_when_a_tier_is_idle() -> None:
    command = [sys.executable, "-m", "kvstore_workers.demo", "--requests", "5", "--workers", "1", "--bytes-per-token", "32"]
    done = subprocess.run([*command, "--compute-us", "0", "--dram", "64MiB", "--ssd", "64MiB"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "not both tiers" in done.stdout
