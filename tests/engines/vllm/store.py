"""What the tests look at in the store itself, through the SDK."""

import time

import numpy as np
import numpy.typing as npt

from kvstore_client import Client, PartRange
from kvstore_client.blocking import Namespace

PAGE = 128
"""Tokens of a page: vLLM's default block size on a CPU."""


def pages(tokens: list[int], page: int = PAGE) -> int:
    """Whole pages of a prompt that can be a prefix of it: the last token is always computed."""
    return (len(tokens) - 1) // page


def wait_for_pages(client: Client, tokens: list[int], wanted: int, seconds: float = 60.0) -> Namespace:
    """Wait until a namespace has so many pages of a prompt, and return it."""
    end = time.monotonic() + seconds
    have = 0
    while time.monotonic() < end:
        for namespace in client.namespaces():
            have = max(have, known := namespace.match(np.array(tokens, np.uint32), lease_s=0, parts=False).pages)
            if known >= wanted:
                return namespace
        time.sleep(0.05)
    raise AssertionError(f"{have} of {wanted} pages are in the store after {seconds:g} s")


def read_pages(namespace: Namespace, tokens: list[int], heads: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """The pages of a prompt as the store has them: (pages, layers, bytes of a block), of some heads or all."""
    spec = namespace.spec
    whole = spec.whole()
    low, high = heads or (0, whole.head_hi)
    wanted = PartRange(0, 0, whole.layer_hi, low, high)
    with namespace.match(np.array(tokens, np.uint32)) as match:
        out = np.empty(match.pages * spec.part_bytes(wanted), np.uint8)
        namespace.fetch(match, out, wanted=wanted)
        return out.reshape(match.pages, whole.layer_hi, -1)
