"""kvstore's own trace format: what was asked of a daemon, as lines of JSON that `kvstore simulate` replays.

The first line is a `Header`, then come `NamespaceLine`s and `UseLine`s in the order of time; a namespace's line stands before
its first use. A page is named by 8 bytes (`page_ids`): a digest of its page key under a secret that is drawn for one recording and
written nowhere, so that equal ids mean equal whole prefixes, and nobody can try a guessed prompt against the file. See docs/lab.md.
"""

from base64 import b64decode, b64encode
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES

FORMAT = "kvstore-trace"
VERSION = 1
ID_BYTES = 8

Op = Literal["request", "get", "put", "abandon"]


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """The first line. `started` is the wall clock in seconds at `t` = 0.

    `stored_pages`: so many pages the store held then; nothing else tells of them. Older recordings don't say.
    """

    format: str = FORMAT
    version: int = VERSION
    started: float = 0.0
    stored_pages: int = 0


class NamespaceLine(msgspec.Struct, frozen=True, tag_field="kind", tag="namespace"):
    """A namespace that later lines name by `ns`, a number of this file's own. `bytes_per_token` is 0 if it is not known."""

    ns: int
    page_tokens: int
    bytes_per_token: float = 0.0


class Hints(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client said of its request, if it said anything. `session` is a number of this file's own; no text of a client's."""

    session: int | None = None
    role: str | None = None
    """Who speaks last in the prompt: `user`, `tool`, `system` or `subagent`."""
    end: str | None = None
    """How the turn ended: `tool_use`, `end_turn`, `subagent_done` or `max_tokens`."""
    ttl_s: float | None = None
    hot: bool = False


class UseLine(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="use"):
    """One use of a prefix, `t` seconds after the start.

    `op` says what it was: `get` looks a prompt up and uses what is there; `put` brings the pages that are not there; `request`
    is both at once; `abandon` says that the pages from number `first` on are not wanted any more.
    """

    t: float
    ns: int
    pages: str
    """All pages of the prefix from the root, hits or not, as `encode_ids` gives them."""
    tokens: int
    """Tokens of the prompt (of the prefix, for `put`), those after the last whole page included."""
    op: Op = "request"
    first: int = 0
    hints: Hints | None = None


Line = Header | NamespaceLine | UseLine
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


def page_ids(keys: bytes, secret: bytes) -> npt.NDArray[np.uint64]:
    """The ids of pages given by their page keys (32 bytes each), about 1 µs a page. `secret`: 16 to 64 random bytes of one recording."""
    parts = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    return np.frombuffer(b"".join(blake2b(key, digest_size=ID_BYTES, key=secret).digest() for key in parts), "<u8")


def encode_ids(ids: npt.NDArray[np.uint64]) -> str:
    """Page ids as text: base64 of 8 little-endian bytes each."""
    return b64encode(ids.astype("<u8", copy=False).tobytes()).decode()


def decode_ids(text: str) -> npt.NDArray[np.uint64]:
    """The inverse of `encode_ids`. Raises ValueError."""
    return np.frombuffer(b64decode(text, validate=True), "<u8")


def encode_line(line: Line) -> bytes:
    """A line, with its end."""
    return _ENCODER.encode(line) + b"\n"


def decode_line(data: bytes) -> Line:
    """The inverse of `encode_line`. Raises ValueError (msgspec's errors are) that says what is wrong."""
    return _DECODER.decode(data)
