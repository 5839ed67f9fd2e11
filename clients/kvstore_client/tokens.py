"""Tokens and extra keys as they travel: a uint32 buffer, never a list."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest

Tokens = npt.NDArray[np.uint32] | bytes | bytearray | memoryview
Extras = Mapping[int, bytes]


def token_view(tokens: Tokens) -> memoryview:
    """The bytes of tokens, not copied. Raises BadRequest for what is neither a one-dimensional array of uint32 nor bytes."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise BadRequest(f"tokens are a {tokens.ndim}-d array of {tokens.dtype}; give a 1-d array of uint32")
        return np.ascontiguousarray(tokens).data.cast("B")
    try:
        return memoryview(tokens).cast("B")
    except TypeError:
        raise BadRequest(f"tokens are a {type(tokens).__name__}; give an array: np.asarray(token_ids, np.uint32)") from None


def with_extras(view: memoryview, extras: Extras | None, pages: int | None = None) -> tuple[list[int], bytes | memoryview]:
    """The payload of a request: tokens, then the extra digests of its first `pages` pages (of all, if not given)."""
    chosen = sorted(page for page in extras or () if pages is None or page < pages)
    if not extras or not chosen:
        return [], view
    return chosen, b"".join([view, *(extras[page] for page in chosen)])
