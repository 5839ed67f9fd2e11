"""Digests of pieces, computed while the bytes pass: each is hashed in the cache it was just copied into. Pure.

Hashing a slice in one go after it was received, or before it is sent, reads it from memory once more. Over 16 MiB fetches
that costs a quarter of the throughput (docs/decisions/0004-hash-while-streaming.md).
"""

from xxhash import xxh3_128, xxh3_128_digest

CHUNK = 128 << 10
"""Bytes hashed at a time as they arrive: well inside a second-level cache."""


class PieceHasher:
    """Digests of consecutive pieces in one contiguous buffer that fills up from its start."""

    __slots__ = ("_at", "_done", "_piece", "_sizes", "_state", "_view", "digests")

    def __init__(self, view: memoryview, sizes: tuple[int, ...] | list[int]) -> None:
        self._view = view
        self._sizes = sizes
        self._piece = 0
        self._at = 0
        self._done = 0
        self._state: xxh3_128 | None = None
        self.digests: list[bytes] = []

    def advance(self, filled: int) -> None:
        """The buffer is filled up to `filled` bytes."""
        view, sizes, piece, at = self._view, self._sizes, self._piece, self._at
        while piece < len(sizes):
            end = at + sizes[piece]
            if filled < end:
                break
            if self._state is None:
                self.digests.append(xxh3_128_digest(view[at:end]))
            else:
                self._state.update(view[self._done : end])
                self.digests.append(self._state.digest())
                self._state = None
            at = self._done = end
            piece += 1
        self._piece, self._at = piece, at
        if filled - self._done >= CHUNK:
            if self._state is None:
                self._state = xxh3_128()
            self._state.update(self._view[self._done : filled])
            self._done = filled
