"""Pages for tests against real daemons: bytes as a function of the prefix, so that every fetch can be checked."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import Component, KVSpec
from kvstore_client import Client
from kvstore_client.blocking import Namespace

SPEC = KVSpec(4, (Component("full", 8, 2, 64),), max_slice_bytes=4096)
"""Pages of 4 tokens, 8 layers of 2 KiB each: 16 KiB in 4 slices."""

Tokens = npt.NDArray[np.uint32]


def context(seed: int, pages: int = 4) -> Tokens:
    """A context of its own, whose first page all contexts of the same ten share."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * SPEC.page_tokens, dtype=np.uint32)
    tokens[: SPEC.page_tokens] = seed // 10
    return tokens


def content(tokens: Tokens, first: int = 0, salt: bytes = b"") -> npt.NDArray[np.uint8]:
    """The bytes of all pages from `first` on."""
    pages = []
    for page in range(first, len(tokens) // SPEC.page_tokens):
        prefix = tokens[: (page + 1) * SPEC.page_tokens].tobytes()
        seed = int.from_bytes(blake2b(prefix + salt, digest_size=8).digest(), "little")
        pages.append(np.random.default_rng(seed).integers(0, 256, SPEC.page_bytes, dtype=np.uint8))
    return np.concatenate(pages) if pages else np.empty(0, np.uint8)


def open_namespace(client: Client, name: str = "pages") -> Namespace:
    return client.namespace(name, "rev-1", SPEC)


def fetch_checked(namespace: Namespace, tokens: Tokens) -> int:
    """Match, fetch and compare. Returns the pages that were there; wrong bytes fail the test."""
    with namespace.match(tokens) as match:
        out = np.zeros(match.pages * SPEC.page_bytes, np.uint8)
        namespace.fetch(match, out)
        assert np.array_equal(out, content(tokens[: match.tokens])), "wrong bytes were served"
        return match.pages
