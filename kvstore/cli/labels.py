"""What pages are named by on the command line: token ids, or digests where an engine gives nothing else."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from kvstore.errors import BadRequest
from kvstore.kvspec import KVSpec

if TYPE_CHECKING:  # imported where it is needed: commands that don't need numpy start in half the time without
    import numpy as np
    import numpy.typing as npt

_TEXT = b"0123456789+-,[] \t\r\n"
"""What lists of numbers are written with. As raw numbers, four such bytes would be more than 150 million: no token id."""
_HEX = b"0123456789abcdefABCDEF,[]\"' \t\r\n"
"""What lists of digests are written with. Of 16 random bytes all would be among these once in 10^14 times."""
_SHOWN = 60
_LARGEST_ID = (1 << 32) - 1
LONGEST = 64 << 20
"""Bytes that are read of what names pages, so that no input, which may never end, takes all memory."""

TOKENS_HELP = "Token ids: 1,2,3 or @FILE (.npy, numbers as text, or raw uint32 little-endian), or - for numbers on standard input."
DIGESTS_HELP = (
    "Or, where pages are labelled with digests, those: in hex, with commas; @FILE (hex, .npy of uint8, or raw bytes); or - for hex."
)
TokensOption = Annotated[str, typer.Option("--tokens", "-t", help=TOKENS_HELP)]
MaybeTokensOption = Annotated[str | None, typer.Option("--tokens", "-t", help=TOKENS_HELP)]
DigestsOption = Annotated[str | None, typer.Option("--digests", help=DIGESTS_HELP)]


@dataclass(frozen=True, slots=True)
class Labels:
    """What was given, before it is known which of the two a namespace takes. `pieces` are digests that were told apart."""

    raw: memoryview
    of_digests: bool = False
    pieces: tuple[bytes, ...] = ()

    def of(self, spec: KVSpec) -> memoryview:
        """The labels as calls of the SDK take them: bytes of digests, or uint32.

        Raises BadRequest if the namespace's are of the other kind, or length.
        """
        width = spec.hash_bytes
        if self.of_digests != bool(width):
            kind, option = (f"digests of {width} bytes", "--digests") if width else ("token ids", "--tokens")
            raise BadRequest(f"the pages of this namespace are labelled with {kind}: give {option}")
        for number, piece in enumerate(self.pieces):
            if len(piece) != width:
                raise BadRequest(f"digest {number} has {len(piece)} bytes, and those of this namespace have {width}")
        if width and len(self.raw) % width:
            raise BadRequest(f"{len(self.raw)} bytes are not a whole number of digests of {width} bytes")
        return self.raw if width else self.raw.cast("I")

    def tokens(self, spec: KVSpec) -> int:
        """Of how many tokens the prefix is that was asked about."""
        return len(self.raw) // spec.hash_bytes * spec.page_tokens if spec.hash_bytes else len(self.raw) // 4


def labels_of(tokens: str | None, digests: str | None) -> Labels:
    """What the two options give, of which one is to be there. Raises BadRequest."""
    if tokens is not None and digests is None:
        return Labels(parse_tokens(tokens).data.cast("B"))
    if digests is not None and tokens is None:
        return parse_digests(digests)
    raise BadRequest("say which pages: by --tokens or, where they are labelled with digests, by --digests")


def parse_digests(text: str) -> Labels:
    """Digests as given on the command line. Raises BadRequest."""
    import numpy as np

    try:
        if text == "-":
            return _hex(_bounded(sys.stdin.buffer).decode())
        if not text.startswith("@"):
            return _hex(text)
        path = Path(text[1:])
        if path.suffix == ".npy":
            loaded = load_npy(path, _bounded)
            if loaded.ndim not in (1, 2) or loaded.dtype != np.uint8:
                raise ValueError(f"a {loaded.ndim}-d array of {loaded.dtype}, not uint8 with one digest a row")
            if not loaded.size:
                raise ValueError("there are none")
            rows = np.ascontiguousarray(loaded)
            return Labels(rows.data.cast("B"), True, tuple(map(bytes, rows)) if loaded.ndim == 2 else ())
        with path.open("rb") as file:
            raw = _bounded(file)
        return Labels(memoryview(raw), True) if raw.translate(None, _HEX) else _hex(raw.decode())
    except (OSError, ValueError) as error:
        raise BadRequest(f"can't read digests from {text[:_SHOWN]!r}: {error}") from error


def _hex(text: str) -> Labels:
    """Digests in hex between commas, brackets, quotes or white space."""
    words = re.sub(r"[,\[\]\"']", " ", text).split()
    if not words:
        raise ValueError("there are none")
    pieces = []
    for number, word in enumerate(words):
        try:
            pieces.append(bytes.fromhex(word))
        except ValueError:
            raise ValueError(f"{word[:_SHOWN]!r}, the number {number} from 0 on, is not in hex") from None
    return Labels(memoryview(b"".join(pieces)), True, tuple(pieces))


def parse_tokens(text: str) -> "npt.NDArray[np.uint32]":
    """Token ids as given on the command line. Pass on its `data`. Raises BadRequest."""
    import numpy as np

    try:
        if text == "-":
            return _numbers(_bounded(sys.stdin.buffer).decode())
        if text.startswith("@"):
            path = Path(text[1:])
            if path.suffix == ".npy":
                loaded = load_npy(path, _bounded)
                if loaded.ndim != 1 or loaded.dtype.kind not in "iu":
                    raise ValueError(f"a {loaded.ndim}-d array of {loaded.dtype}, not a 1-d array of integers")
                return _ids(loaded.tolist()) if loaded.size else np.empty(0, np.uint32)
            with path.open("rb") as file:
                raw = _bounded(file)
            if path.suffix == ".txt" or not raw.translate(None, _TEXT):
                return _numbers(raw.decode())
            if len(raw) % 4:
                raise ValueError(f"{len(raw)} bytes are not a whole number of uint32")
            return np.frombuffer(raw, "<u4").astype(np.uint32)
        return _numbers(text)
    except (OSError, ValueError) as error:
        raise BadRequest(f"can't read tokens from {text[:_SHOWN]!r}: {error}") from error


def _bounded(source: BinaryIO) -> bytes:
    """What there is to read, if it is not too much. Raises ValueError."""
    found = source.read(LONGEST + 1)
    if len(found) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST >> 20} MiB: name fewer pages at once")
    return found


def load_npy(path: Path, read: Callable[[BinaryIO], bytes] | None = None) -> "npt.NDArray[Any]":
    """The array in an .npy file, which `read` reads if it is given.

    Raises ValueError, also for an array of Python objects: only pickle could read it, which runs what is in it.
    """
    from numpy.lib import format as npy

    with path.open("rb") as file:
        source = io.BytesIO(read(file)) if read else file
        try:
            return npy.read_array(source, allow_pickle=False)
        except ValueError as error:
            if "Object arrays" not in str(error):
                raise ValueError("it is not what numpy.save writes") from error
            raise ValueError("it holds Python objects: save numbers, as with numpy.save(FILE, numpy.array(VALUES, 'uint32'))") from None


def _numbers(text: str) -> "npt.NDArray[np.uint32]":
    """Token ids between commas, brackets or white space."""
    parts = text.translate(str.maketrans(",[]", "   ")).split()
    if not parts:
        raise ValueError("there are none")
    return _ids([_number(part) for part in parts])


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word[:_SHOWN]!r} is no number") from None


def _ids(numbers: list[int]) -> "npt.NDArray[np.uint32]":
    """Token ids. Raises ValueError for a number that is none."""
    import numpy as np

    if (lowest := min(numbers)) < 0 or max(numbers) > _LARGEST_ID:
        raise ValueError(f"a token id is from 0 to {_LARGEST_ID}, not {lowest if lowest < 0 else max(numbers)}")
    return np.array(numbers, np.uint32)
