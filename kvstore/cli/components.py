"""Components of a KV spec as they are written on a command line."""

from collections.abc import Mapping
from typing import get_args

from kvstore.errors import BadRequest
from kvstore.kvspec import Component, ComponentKind

_NUMBERS = ("layers", "kv_heads", "head_dim", "planes", "window")
_KEYS = (*_NUMBERS, "dtype")
_KINDS = get_args(ComponentKind)
EXAMPLE = "window,layers=24,window=1024"
HELP = (
    f"A further component of a hybrid model: KIND,KEY=VALUE,…, such as {EXAMPLE} (attention over the last 1024 tokens) or "
    "state,layers=24,kv-heads=1,head-dim=4096,planes=1,dtype=f32 (a recurrent state). KIND is full, window or state; the keys are layers, "
    "kv-heads, head-dim, dtype, planes and window; what is left out is as the options of these names say. Give it once for each."
)


def component_of(text: str, defaults: Mapping[str, int | str | None]) -> Component:
    """A component of its text; what that leaves out is taken from the defaults. Raises BadRequest."""
    kind, *pairs = [word.strip() for word in text.split(",")]
    if kind not in _KINDS:
        raise BadRequest(f"--component {text}: it begins with its kind, one of {', '.join(_KINDS)}, not with {kind!r} (as in {EXAMPLE})")
    found: dict[str, int | str] = {}
    for pair in pairs:
        key, equals, value = (word.strip() for word in pair.partition("="))
        key = key.replace("-", "_")
        if not equals or key not in _KEYS:
            raise BadRequest(f"--component {text}: {pair!r} is not KEY=VALUE with one of {_dashed(_KEYS)}")
        if key in found:
            raise BadRequest(f"--component {text}: {_dashed((key,))} is given twice")
        found[key] = _number(text, key, value) if key in _NUMBERS else value
    whole = {"window": 0} | {key: value for key, value in defaults.items() if value is not None} | found
    if missing := [key for key in _NUMBERS if key not in whole]:
        raise BadRequest(f"--component {text}: it lacks {_dashed(missing)}: say it there ({EXAMPLE}), or once for all by an option")
    try:
        return Component(kind, **whole)  # type: ignore[arg-type]
    except BadRequest as error:
        raise BadRequest(f"--component {text}: {error.message}") from None


def _number(text: str, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise BadRequest(f"--component {text}: {_dashed((key,))} is {value!r}, not a whole number") from None


def _dashed(keys: tuple[str, ...] | list[str]) -> str:
    return ", ".join(key.replace("_", "-") for key in keys)
