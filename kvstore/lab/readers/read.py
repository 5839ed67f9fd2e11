"""Which reader a file needs, and what it can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.lab.readers.lines import MAX_PAGE_TOKENS, BadTrace, Lines
from kvstore.lab.readers.mooncake import read_mooncake
from kvstore.lab.readers.recorded import read_recorded
from kvstore.lab.readers.weka import read_weka
from kvstore.lab.trace import Trace

FORMATS = ("mooncake", "weka", "kvstore")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace. `page_tokens` 0 takes what the format says; start times are for agent sessions only."""

    format: str = "auto"
    page_tokens: int = 0
    start_hours: float = 24.0
    seed: int = 1
    keep_duplicates: bool = False
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in FORMATS:
            raise BadTrace(f"no trace format {self.format!r}: one of auto, {', '.join(FORMATS)}")
        if not 0 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise BadTrace(f"pages of {self.page_tokens} tokens")
        if not 0 < self.start_hours < 1e6:
            raise BadTrace(f"starts over {self.start_hours} hours")


def read_trace(path: Path, options: ReadOptions) -> Trace:
    """The requests of a file, plain or gzip. Raises BadTrace."""
    lines = Lines(path, skip_bad=options.skip_bad)
    kind = _kind_of(path, lines) if options.format == "auto" else options.format
    if kind == "mooncake":
        trace = read_mooncake(path, lines, options.page_tokens)
    elif kind == "weka":
        trace = read_weka(
            path, lines, options.page_tokens, hours=options.start_hours, seed=options.seed, keep_duplicates=options.keep_duplicates
        )
    else:
        if options.page_tokens:
            raise BadTrace(f"{path} says itself how many tokens its pages have: leave --page-tokens out")
        trace = read_recorded(path, lines)
    if not trace.unique_pages:
        raise BadTrace(f"{path} has no request with a whole page" + (f"; {trace.skipped} bad lines were left out" if trace.skipped else ""))
    return trace


def _kind_of(path: Path, lines: Lines) -> str:
    """The format, from the fields of the first line."""
    first = lines.first()
    try:
        fields: Any = msgspec.json.decode(first)
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{path}, line 1: {error}; say what it is with --format {'|'.join(FORMATS)}") from error
    if isinstance(fields, dict):
        if fields.get("kind") == "header":
            return "kvstore"
        if {"timestamp", "hash_ids"} <= fields.keys():
            return "mooncake"
        if {"block_size", "hash_id_scope", "requests"} <= fields.keys():
            return "weka"
    raise BadTrace(f"{path}, line 1: no format that is known; say what it is with --format {'|'.join(FORMATS)}")
