"""Which lengths of prefix a pool can restore. Pure."""

from collections.abc import Sequence


def restorable(there: Sequence[bool], before: int, trailing: int, *, at_root: bool) -> set[int]:
    """The lengths, in pages after the first `before`, that a pool can restore with the pages that it has.

    With `trailing` the last so many pages of a prefix are needed, the `before` pages ahead of the list included; at the root, what is
    shorter will do if it is all of it. Where nothing is known of what is ahead (no keys were passed) the list is taken to begin at the
    root, as SGLang's own backends do. With 0, every page is needed from the first of the list on.
    """
    pages = len(there) - before
    if not trailing:
        whole = next((page for page in range(pages) if not there[before + page]), pages)
        return set(range(1, whole + 1))
    found, run = set(), 0
    for page, here in enumerate(there):
        run = run + 1 if here else 0
        length = page + 1 - before
        if length >= 1 and (run >= trailing or (at_root and run == page + 1)):
            found.add(length)
    return found
