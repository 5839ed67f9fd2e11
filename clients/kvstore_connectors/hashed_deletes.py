"""Deletes of pages that each stand alone, many at a time: what is leased stays, and the rest goes."""

from collections.abc import Sequence

from kvstore_client import Conflict
from kvstore_client.namespace import Namespace
from kvstore_connectors.hashed_pages import labels

_BATCH_PAGES = 256


async def delete_pages(namespace: Namespace, names: Sequence[bytes]) -> set[bytes]:
    """Delete pages of a flat namespace. Returns the labels of those that were there and are gone; of those that are leased nothing goes."""
    gone: set[bytes] = set()
    different = list(dict.fromkeys(names))
    for first in range(0, len(different), _BATCH_PAGES):
        some = different[first : first + _BATCH_PAGES]
        found = await namespace.match(labels(some), lease_s=0, holes=True)
        gone |= await _delete(namespace, [some[page] for page in found.there()])
    return gone


async def _delete(namespace: Namespace, names: list[bytes]) -> set[bytes]:
    """A list goes as a whole or not at all: it is halved until those are found that somebody leases."""
    if not names:
        return set()
    try:
        await namespace.delete(labels(names))
    except Conflict:
        half = len(names) // 2
        return await _delete(namespace, names[:half]) | await _delete(namespace, names[half:]) if half else set()
    return set(names)
