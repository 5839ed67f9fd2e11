"""Sizes as people write them."""

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}


def parse_size(value: object) -> int:
    """Bytes from an int, or from text such as `4GiB`, `512 MiB` or `1.5g` (units are powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write 4GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size)]
"""For a setting: bytes, however they are written."""
MaybeSize = Annotated[int | None, BeforeValidator(parse_size)]
"""One that is None if nobody gives it."""
