"""Tokens and extra keys as they travel: a buffer of uint32, or of digests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, KVSpec
from kvstore_client.arguments import readable

Tokens = npt.NDArray[np.uint32] | npt.NDArray[np.uint8] | bytes | bytearray | memoryview | Sequence[bytes]
"""Token ids as an array (or a buffer) of uint32. In a namespace of digests those: an array of one a row, their bytes, or a list of them."""
Extras = Mapping[int, bytes]


def token_view(tokens: Tokens, spec: KVSpec) -> memoryview:
    """The bytes of tokens, or of a namespace's digests, not copied. Raises BadRequest for what are none."""
    if spec.hash_bytes:
        return _digest_view(tokens, spec.hash_bytes)
    ids = tokens if isinstance(tokens, np.ndarray) else _array(tokens)
    if ids.dtype != np.uint32 or ids.ndim != 1:
        raise BadRequest(f"tokens are a {ids.ndim}-d array of {ids.dtype}; give a 1-d array of uint32")
    return np.ascontiguousarray(ids).data.cast("B")


def _array(tokens: object) -> npt.NDArray[Any]:
    """What is no array, but says of what numbers it is. Bytes do not: they may be of 64 bits each, or digests."""
    how = "give an array: np.asarray(token_ids, np.uint32)"
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
        array = np.asarray(view)
    except (TypeError, ValueError):
        raise BadRequest(f"tokens are a {type(tokens).__name__}; {how}") from None
    if view.itemsize == 1:
        what = (
            "bytes"
            if isinstance(tokens, bytes)
            else "a memoryview of bytes"
            if isinstance(tokens, memoryview)
            else f"a {type(tokens).__name__}"
        )
        raise BadRequest(f"tokens are {what}, which may be of anything; {how}, or np.frombuffer(tokens, np.uint32) if they are of uint32")
    return array


def _digest_view(digests: Tokens, width: int) -> memoryview:
    if isinstance(digests, list | tuple) and all(isinstance(one, bytes) and len(one) == width for one in digests):
        digests = b"".join(digests)
    if isinstance(digests, np.ndarray):
        rows = digests.dtype == np.uint8 and digests.ndim == 2 and digests.shape[1] == width
        fine = rows or (digests.ndim == 1 and digests.dtype == np.uint8)
        given = f"a {digests.ndim}-d array of {digests.dtype}"
    else:
        fine, given = isinstance(digests, bytes | bytearray), f"a {type(digests).__name__}"
        if isinstance(digests, memoryview):
            readable(digests, "the digests")  # one that was released says nothing of its numbers
            fine, given = digests.itemsize == 1, f"a memoryview of {digests.format!r}"
    if not fine:
        raise BadRequest(
            f"this namespace is of digests of {width} bytes, and these are {given}: give a uint8 array of shape (pages, {width}), "
            "a list of bytes, or their bytes one after the other"
        )
    view = readable(np.ascontiguousarray(digests) if isinstance(digests, np.ndarray) else digests, "the digests")
    if len(view) % width:
        raise BadRequest(f"{len(view)} bytes of digests: give some of {width} bytes each")
    return view


def with_extras(view: memoryview, extras: Extras | None, pages: int | None = None) -> tuple[list[int], bytes | memoryview]:
    """The payload of a request: tokens, then the extra digests of its first `pages` pages (of all, if not given)."""
    chosen = sorted(page for page in extras or () if pages is None or page < pages)
    if not extras or not chosen:
        return [], view
    return chosen, b"".join([view, *(extras[page] for page in chosen)])
