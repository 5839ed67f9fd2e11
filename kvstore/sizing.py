"""The arithmetic of sizing: what contexts weigh, how long they travel, and when computing them again is faster. Pure.

The formulae, and what they leave out, are in docs/sizing.md. Bytes, tokens and seconds throughout.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import BadRequest
from kvstore.kvspec import DTYPE_BYTES
from kvstore.prefill import Prefill

_BLOCK_BYTES = 4096
"""Of the SSD tier; and what large DRAM slots are multiples of."""
DRAM_SHARE = 0.85
"""What of the DRAM tier is in use when the mover has done its work: `low_watermark`."""
_SLOT_ALIGN, _LARGE_SLOT = 256, 256 << 10
_SLICE_BYTES, _DIGEST_BYTES = 1 << 20, 16
_LONGEST = 1 << 40
_RATE_UNITS = {"": 1e9, "gb/s": 1e9, "mb/s": 1e6, "tb/s": 1e12, "gib/s": 2.0**30, "gbit/s": 1e9 / 8, "mbit/s": 1e6 / 8, "tbit/s": 1e12 / 8}
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1024, "mi": 1 << 20}


def _check(name: str, value: float, *, low: float = 0.0, high: float = math.inf, above: bool = False) -> None:
    """Raise BadRequest unless a value is a number in range; with `above`, more than `low`."""
    if not (math.isfinite(value) and (value > low if above else value >= low) and value <= high):
        bound = f"more than {low:g}" if above else f"at least {low:g}"
        raise BadRequest(f"{name} is {value:g}: it must be {bound}" + (f" and at most {high:g}" if high < math.inf else ""))


# --- what is given ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """What a model keeps: bytes a token of attention over everything and of sliding windows, and bytes of one recurrent checkpoint."""

    full_bytes: float
    window_bytes: float = 0.0
    window_tokens: int = 0
    state_bytes: float = 0.0
    page_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("full_bytes", "window_bytes", "state_bytes"):
            _check(name, getattr(self, name), high=1e12)
        _check("page_tokens", self.page_tokens, low=1, high=1 << 20)
        _check("window_tokens", self.window_tokens, high=_LONGEST)
        if not self.full_bytes:
            raise BadRequest("bytes per token are 0: a model has at least one layer of attention over everything")
        if (self.window_bytes > 0) != (self.window_tokens > 0):
            raise BadRequest("layers with a window and the window's length go together")

    @classmethod
    def of(
        cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str = "bf16", planes: int = 2, window_layers: int = 0,
        window_tokens: int = 0, state_layers: int = 0, state_bytes: int = 0, page_tokens: int = 64,
    ) -> "Model":  # fmt: skip
        """From a model's shape: `layers` in all, of which some have a window, and some a recurrent state of `state_bytes` each."""
        for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("planes", planes)):
            _check(name, value, low=1, high=1 << 20)
        for name, value in (("window_layers", window_layers), ("state_layers", state_layers), ("state_bytes", state_bytes)):
            _check(name, value, high=1e12)
        if dtype not in DTYPE_BYTES:
            raise BadRequest(f"dtype is {dtype!r}, not one of {', '.join(DTYPE_BYTES)}")
        full = layers - window_layers - state_layers
        if full < 1:
            raise BadRequest(
                f"{window_layers} layers with a window and {state_layers} with a state leave {full} of {layers} with full attention"
            )
        if (state_layers > 0) != (state_bytes > 0):
            raise BadRequest("layers with a state and the bytes of one go together")
        layer = planes * kv_heads * head_dim * DTYPE_BYTES[dtype]
        return cls(full * layer, window_layers * layer, window_tokens, state_layers * state_bytes, page_tokens)

    def whole_pages(self, tokens: int) -> int:
        """Tokens of the whole pages of a context: what is kept of it."""
        return tokens // self.page_tokens * self.page_tokens

    def load_bytes(self, tokens: int) -> float:
        """What has to travel to go on from the last whole page of a context."""
        kept = self.whole_pages(tokens)
        window = -(-self.window_tokens // self.page_tokens) * self.page_tokens
        return self.full_bytes * kept + self.window_bytes * min(kept, window) + (self.state_bytes if kept else 0.0)

    def working_bytes(self, tokens: int) -> float:
        """What a context takes up where it is computed with."""
        return self.full_bytes * tokens + self.window_bytes * min(tokens, self.window_tokens) + self.state_bytes

    def stored_bytes(self, tokens: int, boundaries: int = 1) -> float:
        """What is kept of a context from which one can go on at so many places."""
        kept = self.whole_pages(tokens)
        return self.full_bytes * kept + boundaries * (self.load_bytes(tokens) - self.full_bytes * kept)


@dataclass(frozen=True, slots=True)
class Demand:
    """How many sessions, and how long: `contexts` are lengths in tokens that are equally frequent.

    `concurrent` sessions are being computed, `warm` ones pause for seconds or minutes, and `kept` ones in all may come back later.
    All of them share their first `shared_tokens`.
    """

    contexts: tuple[int, ...]
    concurrent: int
    warm: int = 0
    kept: int = 0
    shared_tokens: int = 0
    boundaries: int = 1
    double_buffer: bool = True

    def __post_init__(self) -> None:
        if not self.contexts:
            raise BadRequest("no context length is given")
        for tokens in self.contexts:
            _check("a context length", tokens, low=1, high=_LONGEST)
        _check("the number of concurrent sessions", self.concurrent, low=1, high=1e12)
        _check("the number of boundaries", self.boundaries, low=1, high=1e9)
        for name in ("warm", "kept"):
            _check(f"the number of {name} sessions", getattr(self, name), high=1e12)
        _check("shared_tokens", self.shared_tokens)
        if self.shared_tokens > min(self.contexts):
            raise BadRequest(f"{self.shared_tokens} shared tokens are more than the shortest context of {min(self.contexts)}")
        if self.kept and self.kept < self.concurrent + self.warm:
            raise BadRequest(
                f"{self.kept} sessions kept in all are fewer than the {self.concurrent + self.warm} that are concurrent or warm"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, as it was written."""

    name: str
    bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check(f"the rate of link {self.name}", self.bytes_s, above=True)
        _check("the latency", self.latency_s, high=3600)

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes travel."""
        return self.latency_s + nbytes / self.bytes_s


# --- what comes out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transfer:
    """One context over one link."""

    link: str
    seconds: float
    faster_than_recompute: float | None
    """How many times; None without a prefill rate."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One context length. `break_even_bytes_s`: with a slower link, computing all of it again is faster; None if none is fast enough."""

    tokens: int
    load_bytes: float
    recompute_s: float | None
    break_even_bytes_s: float | None
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One link. From a prefix of `break_even_tokens` on, loading is faster than computing; None if it never is, or nothing is known."""

    link: str
    bytes_s: float
    break_even_tokens: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is needed, in bytes, and how long things take."""

    bytes_per_token: float
    hbm_bytes: float
    dram_bytes: float
    ssd_bytes: float
    contexts: tuple[ContextPlan, ...]
    links: tuple[LinkPlan, ...]


def plan(model: Model, demand: Demand, links: Sequence[Link] = (), prefill: Prefill | None = None, latency_s: float = 0.0) -> Plan:
    """Do the arithmetic. `latency_s` is that of the link whose rate is asked for."""
    mean = sum(model.working_bytes(tokens) for tokens in demand.contexts) / len(demand.contexts)
    busy = demand.concurrent + demand.warm
    return Plan(
        bytes_per_token=model.full_bytes + model.window_bytes,
        hbm_bytes=demand.concurrent * mean * (2 if demand.double_buffer else 1),
        dram_bytes=_pool(model, demand, busy) * _rounding(model, _slot_unit(model)) / DRAM_SHARE,
        ssd_bytes=_pool(model, demand, max(demand.kept, busy)) * _rounding(model, _BLOCK_BYTES),
        contexts=tuple(_context(model, tokens, links, prefill, latency_s) for tokens in demand.contexts),
        links=tuple(LinkPlan(link.name, link.bytes_s, _break_even_tokens(model, link, prefill)) for link in links),
    )


def _pool(model: Model, demand: Demand, sessions: int) -> float:
    """Bytes of so many sessions, what they share counted once."""
    mean = sum(model.stored_bytes(tokens, demand.boundaries) for tokens in demand.contexts) / len(demand.contexts)
    shared = model.full_bytes * model.whole_pages(demand.shared_tokens)
    return shared + sessions * (mean - shared)


def _slot_unit(model: Model) -> int:
    """What the DRAM slots of a page, in one part, are multiples of."""
    return _SLOT_ALIGN if model.full_bytes * model.page_tokens < _LARGE_SLOT else _BLOCK_BYTES


def _rounding(model: Model, unit: int) -> float:
    """How much larger the bytes of a page, in one part with its digests, are in whole units."""
    page = model.full_bytes * model.page_tokens
    stored = page + _DIGEST_BYTES * math.ceil(page / _SLICE_BYTES)
    return math.ceil(stored / unit) * unit / page


def _context(model: Model, tokens: int, links: Sequence[Link], prefill: Prefill | None, latency_s: float) -> ContextPlan:
    nbytes = model.load_bytes(tokens)
    recompute = None if prefill is None else prefill.seconds(model.whole_pages(tokens))
    transfers = []
    for link in links:
        seconds = link.seconds(nbytes)
        transfers.append(Transfer(link.name, seconds, recompute / seconds if recompute is not None and seconds else None))
    rate = nbytes / (recompute - latency_s) if recompute is not None and recompute > latency_s else None
    return ContextPlan(tokens, nbytes, recompute, rate, tuple(transfers))


def _break_even_tokens(model: Model, link: Link, prefill: Prefill | None) -> int | None:
    """The shortest prefix, in whole pages, that is loaded at least as fast as it is computed.

    What loading saves is convex in the length, and negative or zero at none: so it changes its sign once, and can be bisected.
    """
    if prefill is None:
        return None
    low, high = 0, _LONGEST // model.page_tokens  # in pages
    if not _pays(model, link, prefill, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _pays(model, link, prefill, middle) else (middle, high)
    return high * model.page_tokens


def _pays(model: Model, link: Link, prefill: Prefill, pages: int) -> bool:
    tokens = pages * model.page_tokens
    return link.seconds(model.load_bytes(tokens)) <= prefill.seconds(tokens)


# --- as people write it ----------------------------------------------------------------------------------------------------


def parse_rate(text: str) -> float:
    """Bytes a second from `25GB/s`, `200Gbit/s` or `25` (GB/s). Raises BadRequest."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*(?:/s)?)\s*", text)
    unit = None if not found else found[2].lower().replace("gbps", "gbit/s")
    if found is None or unit not in _RATE_UNITS:
        raise BadRequest(f"{text!r} is not a rate: write 25GB/s, 200Gbit/s or 12.5GiB/s")
    return float(found[1]) * _RATE_UNITS[unit]


def parse_count(text: str) -> int:
    """A number of tokens from `128000`, `128k` or `128Ki`. Raises BadRequest."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]i?)?\s*", text)
    if not found:
        raise BadRequest(f"{text!r} is not a number of tokens: write 128000, 128k or 128Ki")
    return int(float(found[1]) * _COUNT_UNITS[(found[2] or "").lower()])


def parse_prefill(text: str) -> tuple[float, int]:
    """(tokens a second, length) from `9000@32k`, or a rate at any length from `9000`. Raises BadRequest."""
    rate, at, length = text.partition("@")
    try:
        return float(rate), parse_count(length) if at else 1
    except ValueError:
        raise BadRequest(f"{text!r} is not a prefill rate: write TOKENS_PER_SECOND@LENGTH, such as 9000@32k") from None
