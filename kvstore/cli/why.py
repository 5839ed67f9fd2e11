"""`kvstore why`: where the pages of a prefix are, and why."""

from base64 import b64encode
from itertools import groupby
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from kvstore.cli.common import (
    DEFAULT_HTTP,
    DEFAULT_TIMEOUT_S,
    HttpOption,
    JsonOption,
    NamespaceArgument,
    TimeoutOption,
    counted,
    http_json,
    misses,
    print_json,
    table_console,
)  # fmt: skip
from kvstore.cli.labels import DigestsOption, MaybeTokensOption, labels_of
from kvstore.cli.lacks import lacks_text
from kvstore.errors import NotFound
from kvstore.kvspec import KVSpec


@misses
def why(
    namespace: NamespaceArgument,
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    first_page: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Only from this page on.")] = 0,
    http: HttpOption = DEFAULT_HTTP,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Say where the pages of a prefix are, what the policy makes of them, and who would go first.

    Exit code 1 if nothing of it is there, 2 for an error.
    """
    given = labels_of(tokens, digests)
    path = f"/v1/namespaces/{quote(namespace, safe='')}"
    spec = KVSpec.from_dict(http_json(http, path, timeout=timeout)["spec"])
    body = {"tokens_base64": b64encode(given.of(spec)).decode("ascii"), "first_page": first_page}
    told = http_json(http, f"{path}/why", method="POST", body=body, timeout=timeout)
    nothing = NotFound(_nothing(namespace, told["pages"], first_page))
    if not told["found"]:
        raise nothing
    if as_json:
        print_json(told)
    else:
        _show(told)
    if all(page["gone"] for page in told["found"]):
        raise nothing


def _nothing(namespace: str, pages: int, first_page: int) -> str:
    """What is said where no page is there of those asked about; `pages` are there of the whole prefix."""
    if not pages:
        return f"no page of this prefix is in {namespace}"
    return f"{counted(pages, 'page')} of this prefix {'is' if pages == 1 else 'are'} in {namespace}, but none from page {first_page} on"


def _show(told: dict[str, Any]) -> None:
    console = table_console()
    gone, about = f", {told['gone']} after them are gone" if told["gone"] else "", "about " if told["estimated"] else ""
    candidates = f"{about}{counted(told['candidates'], 'page')} can leave DRAM"
    console.print(f"{counted(told['pages'], 'page')} there{gone}; policy {told['policy']}; {candidates}")
    if told.get("lacks"):
        console.print(lacks_text(told["usable_pages"], told["pages"], told["lacks"]), markup=False)
    rows = Table("pages", "tiers", "uses", "idle", "gap", "chance", "decision")
    for _, group in groupby(told["found"], key=_alike):
        pages = list(group)
        last = pages[-1]
        span = str(pages[0]["page"]) if len(pages) == 1 else f"{pages[0]['page']}-{last['page']}"
        rows.add_row(span, _tiers(last), *_known(last.get("estimate")), last["decision"])
    console.print(rows)


def _alike(page: dict[str, Any]) -> tuple[object, ...]:
    """Pages in a row that differ in nothing that matters are shown as one; the last of them goes first."""
    known = page.get("estimate") or {}
    return _tiers(page), page["leased"], known.get("uses"), known.get("abandoned"), round(known.get("idle_s", 0.0)), known.get("value")


def _tiers(page: dict[str, Any]) -> str:
    return "none" if page["gone"] else " ".join(name for name, there in (("dram", page["in_dram"]), ("ssd", page["on_ssd"])) if there)


def _known(estimate: dict[str, Any] | None) -> list[str]:
    if estimate is None:
        return ["", "", "", ""]
    gap = f"{estimate['gap_s']:.0f} s" if estimate["gap_s"] else ""
    return [str(estimate["uses"]), f"{estimate['idle_s']:.0f} s", gap, f"{estimate['chance']:.0%}"] if estimate["uses"] else [""] * 4
