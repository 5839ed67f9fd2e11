"""Digests that a client says behind its bytes: it hashes them while the daemon copies, and says all of them with the COMMIT."""

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest

Run = tuple[int, int, int]
"""Page, part, and first slice of consecutive slices."""


class LateDigests:
    """Of one put: which slices come without digests, what was found of them, and what the client says. Pure.

    Bounded by the slices of the put: each run begins at another one.
    """

    def __init__(self) -> None:
        self._counts: dict[Run, int] = {}
        self._found: dict[Run, list[bytes]] = {}
        self._said: dict[Run, bytes] | None = None

    def expect(self, run: Run, slices: int) -> None:
        """So many slices come without digests. Raises BadRequest if some did from there on, or all digests are said."""
        if run in self._counts or self._said is not None:
            raise BadRequest(f"slices of page {run[0]}, part {run[1]} were sent twice, or behind the digests of all")
        self._counts[run] = slices

    def found(self, run: Run, digests: list[bytes]) -> bytes | None:
        """Slices have arrived with these digests. Returns what the client says they have; None if that is still to come."""
        if self._said is not None:
            return self._said[run]
        self._found[run] = digests
        return None

    def said(self, digests: bytes | memoryview) -> list[tuple[Run, list[bytes], bytes]]:
        """The client says all digests, by page, part and slice. Returns what has arrived: found, and said to be. Raises BadRequest."""
        slices = sum(self._counts.values())
        if len(digests) != slices * DIGEST_BYTES or (slices and self._said is not None):
            raise BadRequest(f"{len(digests)} bytes of digests for {slices} slices that came without: a COMMIT brings all of them, once")
        at, said = 0, {}
        for run in sorted(self._counts):
            end = at + self._counts[run] * DIGEST_BYTES
            said[run] = bytes(digests[at:end])
            at = end
        self._said = said
        found, self._found = self._found, {}
        return [(run, digests, said[run]) for run, digests in found.items()]
