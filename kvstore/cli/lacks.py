"""What keeps a match short, in words."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.cli.common import counted
from kvstore.kvspec import KVSpec

if TYPE_CHECKING:  # `kvstore why` starts quicker without the SDK
    from kvstore_client.blocking_match import Match


def no_whole_page_text(spec: KVSpec, asked_tokens: int) -> str:
    """What is said of a prompt that fills no page; nothing of a longer one."""
    return f"{counted(asked_tokens, 'token')} fill no page: one has {spec.page_tokens}" if asked_tokens < spec.page_tokens else ""


def lacks_of(spec: KVSpec, match: "Match") -> list[dict[str, Any]]:
    """Which components are missing, as JSON has it."""
    return [{**asdict(lack), "kind": spec.components[lack.component].kind} for lack in match.lacks]


def nothing_text(namespace: str, spec: KVSpec, match: "Match", *, whole_list: bool = False) -> str:
    """Why there is nothing to use. `whole_list` if a list does not end at its first gap."""
    if match.lacks:
        return f"no page of this prefix can be used in {namespace}: {short_text(spec, match)}"
    if spec.flat:
        none = f"none of these digests is in {namespace}"
        return none if whole_list else f"the first of these digests is not in {namespace}, and it ends at the first that is not there"
    return f"no page of this prefix is in {namespace}"


def gap_text(spec: KVSpec, match: "Match", asked_tokens: int) -> str:
    """What is said where the list of a flat namespace goes on after what was found; nothing for a prefix."""
    if not spec.flat or match.lacks or match.tokens >= asked_tokens:
        return ""
    return f"; it ends before digest {match.pages} (from 0 on), the first that is not there"


def short_text(spec: KVSpec, match: "Match") -> str:
    """Which components keep a match short; nothing if none does."""
    return lacks_text(match.pages, match.known_pages, lacks_of(spec, match)) if match.lacks else ""


def lacks_text(usable: int, known: int, lacks: list[dict[str, Any]]) -> str:
    """Which components are missing where, so that not all of the pages that are there can be used."""
    each = "; ".join(
        f"{lack['kind']} (component {lack['component']}) is missing on {_pages(lack)}, so at most {lack['pages']} can be used"
        for lack in lacks
    )
    return f"{counted(known, 'page')} {'is' if known == 1 else 'are'} there, of which {usable} can be used: {each}"


def _pages(lack: dict[str, Any]) -> str:
    first, last, missing = lack["first_page"], lack["last_page"] - 1, lack["missing_pages"]
    if missing == 1:
        return f"page {first}"
    return f"pages {first} to {last}" if missing == last - first + 1 else f"{missing} of the pages {first} to {last}"
