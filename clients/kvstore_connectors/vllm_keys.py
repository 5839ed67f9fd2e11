"""What makes two equal runs of tokens different pages: adapters, images and salts, as typed extra keys of pages."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client import extra_digest

_READ = 1 << 20


def tokens_of(request: Any, count: int) -> npt.NDArray[np.uint32]:
    """The first `count` token ids of a request."""
    return np.array(request.all_token_ids[:count], np.uint32)


class AdapterDigests:
    """Digests of LoRA adapters' files, kept as long as the files stay as they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int], ...], str] = {}

    def digest(self, path: str) -> str | None:
        """A digest of an adapter's files; None if they are not there to be read."""
        root = Path(path)
        try:
            files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else []
            stamps = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files)
            if not stamps:
                return None
            if stamps not in self._known:
                state = sha256()
                for file in files:
                    name = file.relative_to(root).as_posix().encode()
                    state.update(len(name).to_bytes(4, "little") + name + file.stat().st_size.to_bytes(8, "little"))
                    with file.open("rb") as source:
                        while block := source.read(_READ):
                            state.update(block)
                self._known[stamps] = state.hexdigest()
            return self._known[stamps]
        except OSError:
            return None


def request_extras(request: Any, page_tokens: int, adapters: AdapterDigests) -> dict[int, bytes] | None:
    """The extra digests of a request's pages; None if its pages can't be told apart from others', and so must not be shared.

    The salt and the adapter are in the label of the first page, and with it in the prefix of all others. Each is a pair of a type
    and a value, both with their lengths, so that no adapter's name can be taken for a salt.
    """
    if getattr(request, "prompt_embeds", None) is not None or getattr(request, "pooling_params", None) is not None:
        return None
    keys: dict[int, list[tuple[str, bytes]]] = {}
    if request.cache_salt:
        keys.setdefault(0, []).append(("cache_salt", request.cache_salt.encode()))
    if request.lora_request is not None:
        digest = adapters.digest(request.lora_request.lora_path)
        if digest is None:
            return None
        keys.setdefault(0, []).append(("lora", digest.encode()))
    for page, position, name in media_pages(request.mm_features or (), page_tokens):
        keys.setdefault(page, []).append(("media", position.to_bytes(8, "little", signed=True) + name.encode()))
    return {page: extra_digest(pairs) for page, pairs in keys.items()}


def media_pages(features: Sequence[Any], page_tokens: int) -> list[tuple[int, int, str]]:
    """For each page that an image (or the like) is in: the page, where the image starts counted from the page, and its hash."""
    found: list[tuple[int, int, str]] = []
    for feature in features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        if length:
            pages = range(start // page_tokens, (start + length - 1) // page_tokens + 1)
            found += [(page, start - page * page_tokens, feature.identifier) for page in pages]
    return found
