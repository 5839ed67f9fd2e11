"""What a validation found wrong, in the words of the rest: which field, what it was, and what is allowed."""

import json
import re
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

_SHOWN = 60

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object of names and values",
    "model": "an object of names and values",
    "path": "a path",
    "finite": "a finite number",
}
"""What is wanted, by the first word of the error's type."""
_LIMITS = {"gt": "more than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}
_LENGTHS = {"min_length": "at least {}", "max_length": "at most {}"}


def explain(error: ValidationError, *, secret: bool = False, tagged: bool = False, seconds: Collection[str] = ()) -> list[str]:
    """A sentence for each thing that is wrong. `secret` leaves the values out. `seconds` are the fields that are times.

    `tagged` says that the model is one of several, told apart by a tag: pydantic puts that before the names of the fields.
    """
    return [_sentence(one, seconds, secret=secret, skip=int(tagged)) for one in error.errors(include_url=False, include_input=not secret)]


def _sentence(error: Any, seconds: Collection[str], *, secret: bool, skip: int) -> str:
    kind, context = error["type"], error.get("ctx", {})
    field = ".".join(str(part) for part in error["loc"][skip:])
    named = field or "the body"
    if kind == "value_error":  # our own words
        own = str(context.get("error", error["msg"]))
        return f"{field}: {own}" if field else own
    if kind == "missing":
        return f"{named} is missing"
    if kind == "extra_forbidden":
        return f"{named} is not known: it may be misspelt"
    if kind == "json_invalid":
        return f"the body is not JSON: {context.get('error', error['msg'])}"
    there = f"{named} is wrong: it must be" if secret or "input" not in error else f"{named} is {_shown(error['input'])}, not"
    for name, words in _LIMITS.items():
        if name in context:
            return f"{there} {words.format(_number(context[name]))}"
    for name, words in _LENGTHS.items():
        if name in context:
            text = kind.startswith("string") or context.get("field_type") == "Value"  # a secret is no list
            unit = "characters" if text else "items"
            value = error.get("input")
            count = f" ({len(value)})" if isinstance(value, str | list | tuple | dict) else ""
            return f"{named} has the wrong number of {unit}{count}: {words.format(context[name])}"
    if "expected" in context:
        return f"{there} {context['expected']}"
    if "pattern" in context:
        if (choice := re.fullmatch(r"\^\(([a-z_|]+)\)\$", context["pattern"])) is not None:
            return f"{there} one of {choice[1].replace('|', ', ')}"
        return f"{there} of the form {context['pattern']}"
    wanted = _WANTED.get(kind.partition("_")[0])
    if field in seconds and wanted == _WANTED["float"]:
        wanted = "a number of seconds, without a unit"
    return f"{there} {wanted}" if wanted is not None else f"{named}: {error['msg']}"


def _number(limit: Any) -> str:
    return f"{limit:.10g}" if isinstance(limit, float) else str(limit)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
