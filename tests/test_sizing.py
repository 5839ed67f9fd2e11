"""Sizing against numbers calculated by hand."""

import json
import subprocess
from typing import Any

import pytest

from kvstore.errors import BadRequest
from kvstore.prefill import Prefill
from kvstore.sizing import Demand, Link, Model, Plan, parse_count, parse_prefill, parse_rate, plan
from tests.commands import kvstore

LLAMA_8B = Model.of(layers=32, kv_heads=8, head_dim=128)
"""2 planes * 32 layers * 8 heads * 128 * 2 bytes = 131,072 bytes a token."""
CONSTANT = Prefill.measured([(10_000, 1)])


def made(model: Model = LLAMA_8B, contexts: tuple[int, ...] = (128_000,), **changes: Any) -> Plan:
    given = {"links": [Link("25GB/s", 25e9)], "prefill": CONSTANT, "latency_s": 0.0}
    return plan(model, Demand(contexts, 8), **{**given, **changes})


def test_a_classical_model() -> None:
    found = made()
    assert found.bytes_per_token == 131_072
    (context,) = found.contexts
    assert context.load_bytes == 128_000 * 131_072 == 16_777_216_000
    assert context.transfers[0].seconds == pytest.approx(0.67108864)
    assert context.recompute_s == pytest.approx(12.8)
    assert context.transfers[0].faster_than_recompute == pytest.approx(12.8 / 0.67108864)
    assert context.break_even_bytes_s == pytest.approx(1.31072e9)
    assert found.hbm_bytes == 8 * 2 * 16_777_216_000
    page = 64 * 131_072  # 8 MiB and 8 digests, in slots of whole pages
    assert found.dram_bytes == pytest.approx(8 * 16_777_216_000 * (page + 4096) / page / 0.85)


def test_tiers_with_warm_and_kept_sessions_and_a_shared_root() -> None:
    model = Model(1000, page_tokens=100)  # a page is 100,016 bytes stored: 25 blocks of 4,096, 391 times 256
    found = plan(model, Demand((10_000, 30_050), 2, warm=3, kept=10, shared_tokens=5_000, double_buffer=False))
    assert found.hbm_bytes == 2 * (10_000_000 + 30_050_000) / 2
    kept = (10_000_000 + 30_000_000) / 2  # whole pages only
    assert found.dram_bytes == pytest.approx((5_000_000 + 5 * (kept - 5_000_000)) * 100_096 / 100_000 / 0.85)
    assert found.ssd_bytes == pytest.approx((5_000_000 + 10 * (kept - 5_000_000)) * 102_400 / 100_000)


def test_a_hybrid_model() -> None:
    model = Model.of(layers=48, kv_heads=4, head_dim=64, window_layers=24, window_tokens=1000, state_layers=12, state_bytes=1_000_000)
    layer = 2 * 4 * 64 * 2  # 1,024 bytes a token
    assert (model.full_bytes, model.window_bytes, model.state_bytes) == (12 * layer, 24 * layer, 12_000_000)
    long = 6400 * 12_288 + 1024 * 24_576 + 12_000_000  # a window of 1,000 tokens is 16 pages of 64
    assert model.load_bytes(6400) == model.load_bytes(6463) == long
    assert model.load_bytes(640) == 640 * (12_288 + 24_576) + 12_000_000, "no more window than there are pages"
    assert model.load_bytes(63) == 0
    assert model.working_bytes(6463) == 6463 * 12_288 + 1000 * 24_576 + 12_000_000
    assert model.stored_bytes(6400, boundaries=3) == 6400 * 12_288 + 3 * (1024 * 24_576 + 12_000_000)


def test_prefill_that_grows_with_position() -> None:
    prefill = Prefill.measured([(5_000, 110_000), (10_000, 10_000)])
    assert prefill.base_s == pytest.approx(9e-5, rel=1e-4)
    assert prefill.slope_s == pytest.approx(2e-9)
    assert prefill.seconds(100_000) == pytest.approx(9 + 10)
    assert 10_000 / prefill.seconds(10_000) == pytest.approx(10_000)
    assert 110_000 / prefill.seconds(110_000) == pytest.approx(5_000)


def test_from_which_prefix_on_loading_pays() -> None:
    def tokens(link: Link, prefill: Prefill = CONSTANT, model: Model = LLAMA_8B) -> int | None:
        return plan(model, Demand((1000,), 1), [link], prefill).links[0].break_even_tokens

    assert tokens(Link("slow", 1e9)) is None, "131 µs a token against 100"
    assert tokens(Link("fast", 2e9)) == 64, "from the first page"
    assert tokens(Link("late", 2e9, 0.01)) == 320, "0.01 s / (100 - 65.536 µs) = 290.2 tokens, in pages"
    growing = Prefill(9e-5, 2e-9)
    assert tokens(Link("slow", 1e9), growing) == 41_088, "131.072 = 90 + p/1000 µs: p = 41,072"
    state = Model(1000, state_bytes=1e9, page_tokens=1)
    assert tokens(Link("one", 1e9), Prefill(1e-4), state) == 10_102, "1 s = T * (100 - 1 µs): T = 10,101.01"


def test_no_link_is_fast_enough_where_the_latency_alone_takes_longer() -> None:
    found = made(contexts=(64,), latency_s=1.0)
    assert found.contexts[0].break_even_bytes_s is None


def test_without_a_prefill_rate_nothing_is_said_of_it() -> None:
    found = made(prefill=None)
    assert found.contexts[0].recompute_s is None
    assert found.contexts[0].transfers[0].faster_than_recompute is None
    assert found.links[0].break_even_tokens is None


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("200Gbit/s", 25e9), ("200 gbps", 25e9), ("25", 25e9), ("1GiB/s", 2**30), ("500MB/s", 5e8), ("1.6Tbit/s", 2e11)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "count"), [("128000", 128_000), ("128k", 128_000), ("128Ki", 131_072), ("1.5M", 1_500_000)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count
    assert parse_prefill(f"9000@{text}") == (9000, count)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: Model(0), "bytes per token are 0"),
        (lambda: Model(float("nan")), "full_bytes"),
        (lambda: Model(1, window_bytes=1), "window"),
        (lambda: Model(1, page_tokens=0), "page_tokens"),
        (lambda: Model.of(layers=0, kv_heads=1, head_dim=1), "layers is 0"),
        (lambda: Model.of(layers=4, kv_heads=1, head_dim=1, window_layers=4, window_tokens=9), "leave 0 of 4"),
        (lambda: Model.of(layers=4, kv_heads=1, head_dim=1, state_layers=1), "go together"),
        (lambda: Model.of(layers=4, kv_heads=1, head_dim=1, dtype="int3"), "dtype"),
        (lambda: Demand((), 1), "no context"),
        (lambda: Demand((0,), 1), "context length is 0"),
        (lambda: Demand((5,), 0), "concurrent"),
        (lambda: Demand((5,), 1, shared_tokens=6), "shared"),
        (lambda: Demand((5,), 2, warm=2, kept=3), "fewer than the 4"),
        (lambda: Link("x", 0), "rate of link x"),
        (lambda: Prefill.measured([]), "0 prefill rates"),
        (lambda: Prefill.measured([(0, 5)]), "prefill rate is 0"),
        (lambda: Prefill.measured([(5, 5), (4, 5)]), "must differ"),
        (lambda: Prefill.measured([(5, 5), (6, 50)]), "faster for the longer"),
        (lambda: Prefill.measured([(9, 10), (1, 20)]), "than attention can explain"),
        (lambda: parse_rate("fast"), "not a rate"),
        (lambda: parse_rate("5 parsecs"), "not a rate"),
        (lambda: parse_count("-5"), "not a number of tokens"),
        (lambda: parse_prefill("x@5"), "not a prefill rate"),
    ],
)
def test_nonsense_is_said_by_name(work: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        work()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvstore("plan", *arguments)


def test_the_command() -> None:
    shape = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "-n", "8", "-c", "32k,128k")
    rates = ("-l", "25GB/s", "-l", "10Gbit/s", "-p", "10000@10k", "-p", "5000@110k")
    said = json.loads(command(*shape, *rates, "--json").stdout)
    assert [context["tokens"] for context in said["contexts"]] == [32_000, 128_000]
    assert said["contexts"][1]["transfers"][1]["seconds"] == pytest.approx(16_777_216_000 / 1.25e9)
    text = command(*shape, *rates).stdout
    assert "give --prefill" not in text
    assert "give --prefill RATE@LENGTH" in command(*shape).stdout
    for words in ("131,072 bytes a token", "16.8 GB", "671 ms", "At 25GB/s loading is faster than computing from 64 tokens on", "SSD"):
        assert words in text
    refused = command("--bytes-per-token", "0", "-n", "1", "-c", "1000")
    assert (refused.returncode, refused.stderr.strip().count("\n")) == (2, 0)
    assert "bytes per token are 0" in refused.stderr
