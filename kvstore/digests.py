"""Digests and names derived from bytes: slice digests, blob ids, extra-key digests and page keys.

Two kinds, for two jobs. `xxh3_128` guards bytes against accidents at memory speed. Names that decide what a prefix *is*
(page keys, extra keys, namespaces) are BLAKE2b, so that nobody can make two prefixes share one.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b

from xxhash import xxh3_128_digest

from kvstore.errors import BadRequest

DIGEST_BYTES = 16
KEY_BYTES = 32
NO_EXTRA = bytes(KEY_BYTES)
_PAGE_KEY_PERSON = b"kvstore.page"
_EXTRA_PERSON = b"kvstore.extra"


slice_digest = xxh3_128_digest
"""xxh3_128 of one slice, big-endian canonical form, 16 bytes."""
blob_id = xxh3_128_digest
"""The content address of a part: xxh3_128 over its slice digests in order (16 bytes each)."""


def extra_digest(keys: Iterable[tuple[str, bytes]]) -> bytes:
    """The 32-byte digest of a page's extra keys, each a (type, value) pair.

    Both are length-prefixed before digesting, so no two different lists can give the same input. An empty list is
    32 zero bytes. Raises BadRequest for anything but pairs of text and bytes.
    """
    state = blake2b(digest_size=KEY_BYTES, person=_EXTRA_PERSON)
    empty = True
    if isinstance(keys, str | bytes) or not hasattr(keys, "__iter__"):
        raise BadRequest(f"the extra keys are {keys!r}, not (type, value) pairs, such as [('image', digest)]")
    for pair in keys:
        kind, value = _extra_key(pair)
        empty = False
        name = kind.encode()
        state.update(len(name).to_bytes(4, "little") + name + len(value).to_bytes(8, "little") + value)
    return NO_EXTRA if empty else state.digest()


def _extra_key(pair: object) -> tuple[str, bytes]:
    if isinstance(pair, tuple | list) and len(pair) == 2:
        kind, value = pair
        if isinstance(kind, str) and isinstance(value, bytes | bytearray | memoryview):
            with suppress(ValueError):  # a view that was released
                return kind, bytes(value)
    raise BadRequest(f"an extra key is {pair!r}, not a pair of text, which names its type, and bytes, such as ('image', digest)")


def page_key(parent: bytes, label: bytes) -> bytes:
    """The page key: BLAKE2b-256 over the parent's key and the page's label (token ids, then extra digest)."""
    return blake2b(parent + label, digest_size=KEY_BYTES, person=_PAGE_KEY_PERSON).digest()


def page_key_chain(parent: bytes, labels: Iterable[bytes]) -> Iterator[bytes]:
    """Page keys of consecutive pages, each chained to the one before."""
    for label in labels:
        parent = page_key(parent, label)
        yield parent
