"""`kvstore leases`: what holds pages in the tiers."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from kvstore.cli.common import (
    DEFAULT_HTTP,
    DEFAULT_TIMEOUT_S,
    HttpOption,
    JsonOption,
    TimeoutOption,
    counted,
    http_json,
    print_json,
    table_console,
)  # fmt: skip
from kvstore.size_text import size_text


def leases(
    namespace: Annotated[str, typer.Argument(help="Only those on this namespace, by name or id.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="How many are listed.")] = 20,
    http: HttpOption = DEFAULT_HTTP,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """List the leases and pins that keep pages from leaving, the largest first: of the token's tenant; with admin access, of all."""
    of = f"&namespace={quote(namespace, safe='')}" if namespace else ""
    told = http_json(http, f"/v1/leases?limit={limit}{of}", timeout=timeout)
    if as_json:
        print_json(told)
        return
    items = told["items"]
    tenants = any("tenant" in item for item in items)
    table = Table(*(["tenant"] if tenants else []), "namespace", "what", "by", "pages", "bytes", "in DRAM", "ends in")
    for item in items:
        cells = (item["name"], item["kind"], _by(item), f"{item['pages']:,}", size_text(item["nbytes"]), size_text(item["dram_bytes"]))
        table.add_row(*([item["tenant"]] if tenants else []), *cells, f"{item['ends_s']:,.0f} s")
    console = table_console()
    listed = f", of which the {len(items)} largest are" if len(items) < told["leases"] + told["pins"] else ""
    console.print(f"{counted(told['leases'], 'lease')} and {counted(told['pins'], 'pin')} on {size_text(told['nbytes'])}{listed}")
    if items:
        console.print(table)


def _by(item: dict[str, Any]) -> str:
    """Who holds it; what a client calls itself is anything."""
    if item["kind"] == "pin":
        return f"unpin with {item['pin']}" if "pin" in item else ""
    return escape("".join(each if each.isprintable() else "?" for each in item.get("client", "")))
