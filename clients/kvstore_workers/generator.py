"""Tokens of a trace's blocks, and the bytes of pages as a function of their whole prefix.

Stands in for a model: the same prefix always gives the same bytes, any other prefix gives others, so every fetched byte can
be checked. Independent of the product's own digests.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore_workers.trace import BLOCK_TOKENS, Request

_VOCABULARY = 128_000
_SEED = 20260


def block_tokens(block: int) -> npt.NDArray[np.uint32]:
    """The 512 tokens that stand for a block id."""
    return np.random.Generator(np.random.Philox(key=block)).integers(0, _VOCABULARY, BLOCK_TOKENS, dtype=np.uint32)


def prompt_tokens(request: Request) -> npt.NDArray[np.uint32]:
    """A request's prompt, its last partial block included."""
    blocks = [block_tokens(b) for b in request.blocks]
    rest = request.input_tokens - len(request.blocks) * BLOCK_TOKENS
    if rest > 0 and request.tail_block is not None:
        blocks.append(block_tokens(request.tail_block)[:rest])
    return np.concatenate(blocks) if blocks else np.empty(0, np.uint32)


class PageGenerator:
    """Bytes of pages of `page_bytes` (a multiple of 8) each."""

    def __init__(self, page_bytes: int, page_tokens: int = BLOCK_TOKENS) -> None:
        self.page_bytes = page_bytes
        self._page_tokens = page_tokens
        words = page_bytes // 8
        self._base = np.random.Generator(np.random.Philox(key=_SEED)).integers(0, 1 << 64, 2 * words, dtype=np.uint64)
        self._scratch = np.empty(words, np.uint64)

    def seeds(self, tokens: npt.NDArray[np.uint32]) -> list[bytes]:
        """One seed a whole page, each a digest of all tokens up to that page's end."""
        state, found = blake2b(digest_size=16), []
        for first in range(0, len(tokens) - self._page_tokens + 1, self._page_tokens):
            state.update(tokens[first : first + self._page_tokens].tobytes())
            found.append(state.copy().digest())
        return found

    def fill(self, seed: bytes, out: npt.NDArray[np.uint64]) -> None:
        """Write a page's bytes: a stretch of noise chosen by the seed, plus the seed."""
        start = int.from_bytes(seed[8:], "little") % len(out)
        with np.errstate(over="ignore"):
            np.add(self._base[start : start + len(out)], np.uint64(int.from_bytes(seed[:8], "little")), out=out)

    def wrong_bytes(self, seed: bytes, found: npt.NDArray[np.uint64]) -> int:
        """How many bytes of a page are not what they should be."""
        self.fill(seed, self._scratch)
        if np.array_equal(self._scratch, found):
            return 0
        return int((self._scratch.view(np.uint8) != found.view(np.uint8)).sum())
