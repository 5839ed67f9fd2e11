"""Puts that can't but succeed once all of them is here, as most are: their client is answered first, and then they are taken in. Pure."""

from kvstore.radix.pages import MAX_DEPTH
from kvstore.store.puts.assembly import Assemblies
from kvstore.store.puts.put import Put

MOST_PARTS = 512


def is_plain(put: Put, assemblies: Assemblies) -> bool:
    """Whether all of a put has arrived, brings new, whole pages below one that is there, and nothing can keep them out as long as
    nobody else has a turn: there is room for them in every table. Of many parts the work is better done by steps.
    """
    space = put.space
    if not put.whole or put.shape[1] > MOST_PARTS or space.spec.flat or space.dropped or not put.brings_all or put.total_pages > MAX_DEPTH:
        return False
    if space.tree.pages.find_key(put.key(put.first_page)) >= 0 or not space.has_room(*put.shape):
        return False
    return assemblies.alone(space, put.request.put_id, put.parent, put.request.ranges)
