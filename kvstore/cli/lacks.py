"""What keeps a match of a hybrid model short, in words."""

from typing import Any

from kvstore.cli.common import counted


def lacks_text(usable: int, known: int, lacks: list[dict[str, Any]]) -> str:
    """Which components are missing where, so that not all of the pages that are there can be used."""
    each = "; ".join(
        f"{lack['kind']} (component {lack['component']}) is missing on {_pages(lack)}, and alone would let {lack['pages']} be used"
        for lack in lacks
    )
    return f"{counted(known, 'page')} {'is' if known == 1 else 'are'} there, of which {usable} can be used: {each}"


def _pages(lack: dict[str, Any]) -> str:
    first, last, missing = lack["first_page"], lack["last_page"] - 1, lack["missing_pages"]
    if missing == 1:
        return f"page {first}"
    return f"pages {first} to {last}" if missing == last - first + 1 else f"{missing} of the pages {first} to {last}"
