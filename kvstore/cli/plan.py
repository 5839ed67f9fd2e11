"""`kvstore plan`: sizing."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kvstore.cli.common import JsonOption, print_json, seconds_text, table_console
from kvstore.errors import BadRequest
from kvstore.kvspec import DTYPE_BYTES
from kvstore.prefill import Prefill
from kvstore.size_text import size_text
from kvstore.sizing import Demand, Link, Model, Plan, parse_count, parse_prefill, parse_rate
from kvstore.sizing import plan as make_plan


def plan(
    context: Annotated[
        list[str], typer.Option("--context", "-c", help="Length of a context in tokens (128000, 128k, 128Ki); may be repeated.")
    ],
    sessions: Annotated[int, typer.Option("--sessions", "-n", help="Sessions being computed at a time.")],
    layers: Annotated[int | None, typer.Option(help="Layers in all.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements a head.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_BYTES)}.")] = "bf16",
    planes: Annotated[int, typer.Option(help="2 for keys and values, 1 for a compressed latent.")] = 2,
    bytes_per_token: Annotated[float | None, typer.Option(help="Instead of the model's shape.")] = None,
    window_layers: Annotated[int, typer.Option(help="Of the layers, those with a sliding window.")] = 0,
    window: Annotated[int, typer.Option(help="Its length in tokens.")] = 0,
    state_layers: Annotated[int, typer.Option(help="Of the layers, those with a recurrent state.")] = 0,
    state_bytes: Annotated[int, typer.Option(help="Bytes of one layer's state.")] = 0,
    page_tokens: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    warm: Annotated[int | None, typer.Option(help="Sessions that pause for seconds or minutes, to be in DRAM; by default as many.")] = None,
    kept: Annotated[int, typer.Option(help="Sessions in all that may come back, to be on SSD; by default those above.")] = 0,
    shared: Annotated[str, typer.Option(help="Tokens at the start that all sessions share.")] = "0",
    boundaries: Annotated[
        int, typer.Option(help="Places of a context from which one can go on (windows and states are kept for each).")
    ] = 1,
    double_buffer: Annotated[bool, typer.Option(help="Load the next contexts while the present ones are computed.")] = True,
    link: Annotated[list[str] | None, typer.Option("--link", "-l", help="25GB/s, 200Gbit/s, 12.5GiB/s; may be repeated.")] = None,
    latency_ms: Annotated[float, typer.Option(help="Before the first byte of a load.")] = 0.0,
    prefill: Annotated[
        list[str] | None,
        typer.Option("--prefill", "-p", help="TOKENS_PER_SECOND@LENGTH of a whole prompt; twice, at two lengths, for how the cost grows."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much HBM, DRAM and SSD sessions need, how long their contexts travel, and when computing them again is faster.

    The formulae are in docs/sizing.md. Exit code 2 for numbers that make no sense.
    """
    shape = (layers, kv_heads, head_dim)
    if bytes_per_token is not None:
        if any(value is not None for value in shape) or window_layers or state_layers:
            raise BadRequest("give either --bytes-per-token or the model's shape, not both")
        model = Model(bytes_per_token, page_tokens=page_tokens)
    elif layers is None or kv_heads is None or head_dim is None:
        raise BadRequest("say what a token weighs: --layers, --kv-heads and --head-dim, or --bytes-per-token")
    else:
        model = Model.of(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, planes=planes, window_layers=window_layers,
            window_tokens=window, state_layers=state_layers, state_bytes=state_bytes, page_tokens=page_tokens,
        )  # fmt: skip
    lengths = tuple(parse_count(part) for text in context for part in text.split(","))
    demand = Demand(lengths, sessions, sessions if warm is None else warm, kept, parse_count(shared), boundaries, double_buffer)
    links = [Link(text, parse_rate(text), latency_ms / 1000) for text in link or []]
    rates = [parse_prefill(text) for text in prefill or []]
    made = make_plan(model, demand, links, Prefill.measured(rates) if rates else None, latency_ms / 1000)
    if as_json:
        print_json(asdict(made))
    else:
        _print(made, demand)


def _print(made: Plan, demand: Demand) -> None:
    console = table_console()
    need = Table("tier", "needed", "for", title=f"{made.bytes_per_token:,.0f} bytes a token")
    busy = demand.concurrent + demand.warm
    need.add_row("HBM", _tier(made.hbm_bytes), f"{demand.concurrent:,} sessions" + (", double-buffered" if demand.double_buffer else ""))
    need.add_row("DRAM", _tier(made.dram_bytes), f"{busy:,} sessions, with room for the mover")
    need.add_row("SSD", _tier(made.ssd_bytes), f"{max(demand.kept, busy):,} sessions, in blocks of 4 KiB")
    console.print(need)
    table = Table("context", "load", *(f"at {link.link}" for link in made.links), "recompute", "as fast as a load at")
    for context in made.contexts:
        table.add_row(
            f"{context.tokens:,}", _bytes(context.load_bytes), *(_transfer(t.seconds, t.faster_than_recompute) for t in context.transfers),
            seconds_text(context.recompute_s),
            "?" if context.break_even_bytes_s is None else f"{context.break_even_bytes_s / 1e9:.3g} GB/s",
        )  # fmt: skip
    console.print(table)
    if made.contexts[0].recompute_s is None:
        console.print("What computing takes is not known: give --prefill RATE@LENGTH, as measured, to see when loading is faster.")
    for link in made.links if made.contexts[0].recompute_s is not None else ():
        pays = "never" if link.break_even_tokens is None else f"from {link.break_even_tokens:,} tokens on"
        console.print(f"At {link.link} loading is faster than computing {pays}.")


def _transfer(seconds: float, factor: float | None) -> str:
    return seconds_text(seconds) + ("" if factor is None else f" ({factor:.3g} x)")


def _tier(count: float) -> str:
    return f"{_bytes(count)} ({size_text(count)})"


def _bytes(count: float) -> str:
    """Decimal units, as links and disks are sold, to three figures."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB" if count < 1000 else f"{count:,.0f} PB"
