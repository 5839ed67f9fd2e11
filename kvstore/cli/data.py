"""`kvstore put`, `get` and `match`: pages by hand."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstore.cli.common import (
    DEFAULT_DATA,
    DEFAULT_TIMEOUT_S,
    EndpointOption,
    JsonOption,
    NamespaceArgument,
    PositionOption,
    PrefillOption,
    TimeoutOption,
    connect,
    counted,
    misses,
    moving_s,
    print_json,
    seconds_text,
    table_console,
)  # fmt: skip
from kvstore.cli.labels import DigestsOption, MaybeTokensOption, labels_of
from kvstore.cli.lacks import gap_text, lacks_of, no_whole_page_text, nothing_text, short_text
from kvstore.cli.whole_pages import all_parts, check_size, fetch, read_pages
from kvstore.errors import BadRequest, NotFound
from kvstore.size_text import size_text
from kvstore_client.estimate import Costs, Estimate


def put(
    namespace: NamespaceArgument,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            help="File with the bytes of the pages from --first-page on; of an .npy file those of its array. - for standard input.",
        ),
    ],
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    first_page: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="First page to put; those before must be in the store.")] = 0,
    durable: Annotated[bool, typer.Option("--durable", help="Wait until a power cut can't take them.")] = False,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Put the whole pages of a prefix; tokens past the last whole page are left out.

    The data is page after page. Of a hybrid model each page is all its components in order, on every page; the SDK can put less.
    """
    if "-" == str(data) in (tokens, digests):
        raise BadRequest("standard input can't be both the data and what names its pages: give one of them as a file")
    given = labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        labels, width = given.of(space.spec), space.spec.hash_bytes or space.spec.page_tokens
        pages = len(labels) // width
        if not pages:
            raise BadRequest(f"{len(labels)} tokens do not fill a page of {width}")
        if first_page >= pages:
            raise BadRequest(f"--first-page is {first_page}, and what was given fills {counted(pages, 'page')}, counted from 0")
        content = read_pages(data, (pages - first_page) * space.spec.page_bytes)
        check_size(space.spec, pages - first_page, len(content))
        parts = all_parts(space.spec)
        started = time.perf_counter()
        done = space.put(
            labels[: pages * width], content, first_page=first_page, parts=parts, durable=durable, timeout=moving_s(timeout, len(content))
        )
        seconds = time.perf_counter() - started
    if as_json:
        counts = {"new_pages": done.new_pages, "existing_pages": done.existing_pages, "gained_pages": done.gained_pages}
        print_json({**counts, "bytes": len(content), "seconds": seconds})
    else:
        were = f"{done.existing_pages} {'was' if done.existing_pages == 1 else 'were'} there"
        were += f" ({done.gained_pages} of them lacked something that they have now)" if done.gained_pages else ""
        typer.echo(f"{counted(done.new_pages, 'new page')}, {were}; {size_text(len(content))} in {seconds * 1000:.1f} ms")


@misses
def get(
    namespace: NamespaceArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the bytes of the matched pages; - for standard output.")],
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Fetch the longest prefix that is in the store. Exit code 1 if nothing of it is there, 2 for an error.

    Of a flat namespace that is the front of the list: it ends at the first digest that is not there.

    The bytes are page after page; of a hybrid model each page is those of its components, in order, that going on from the end of the
    prefix needs: windows and states of the last pages only.
    """
    if as_json and str(out) == "-":
        raise BadRequest("standard output can't be both the pages and --json: give --out a file")
    given = labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        asked = given.tokens(space.spec)
        with space.match(given.of(space.spec)) as match:
            if not match.pages:
                raise NotFound(nothing_text(namespace, space.spec, match))
            started = time.perf_counter()
            content = fetch(space, match, moving_s(timeout, match.pages * space.spec.page_bytes))
            seconds = time.perf_counter() - started
    pages, matched, gap, short = match.pages, match.tokens, gap_text(space.spec, match, asked), short_text(space.spec, match)
    if str(out) == "-":
        sys.stdout.buffer.write(content.data)
        if (whole := asked // space.spec.page_tokens) > pages:
            typer.echo(f"{pages} of {counted(whole, 'page')}{gap}{short and ': '}{short}", err=True)
        return
    try:
        content.tofile(out)
    except OSError as error:
        raise BadRequest(f"can't write {out}: {error.strerror}") from error
    if as_json:
        lacks = {"known_pages": match.known_pages, "lacks": lacks_of(space.spec, match)}
        print_json({"pages": pages, "tokens": matched, **lacks, "bytes": len(content), "seconds": seconds})
    else:
        of = f"{matched} of {asked} tokens"
        typer.echo(f"{counted(pages, 'page')} ({of}), {size_text(len(content))} in {seconds * 1000:.1f} ms{gap}")
        if short:
            typer.echo(short)


@misses
def match(
    namespace: NamespaceArgument,
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what loading it costs beside computing it, and where to cut.")] = False,
    prefill_us: PrefillOption = 0.0,
    prefill_ns_per_position: PositionOption = 0.0,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Say how much of a prefix is in the store, and where. Changes nothing. Exit code 1 if nothing of it is, 2 for an error.

    A prefill cost that is not given is that of the namespace.
    """
    given = labels_of(tokens, digests)
    costs = Costs(prefill_us, prefill_ns_per_position)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        found = space.match(given.of(space.spec), lease_s=0, estimate=costs if estimate or costs != Costs() else False)
        pages, matched, in_dram, asked = found.pages, found.tokens, found.dram_pages, given.tokens(space.spec)
    if as_json:
        told = {} if found.estimate is None else {"estimate": asdict(found.estimate)}
        lacks = {"known_pages": found.known_pages, "lacks": lacks_of(space.spec, found)}
        print_json({"pages": pages, "tokens": matched, "asked_tokens": asked, "dram_pages": in_dram, **lacks, **told})
    else:
        gap = gap_text(space.spec, found, asked)
        typer.echo(f"{matched} of {asked} tokens: {counted(pages, 'page')}, {in_dram} in DRAM and {pages - in_dram} only on SSD{gap}")
        if short := short_text(space.spec, found) or no_whole_page_text(space.spec, asked):
            typer.echo(short)
        if found.estimate is not None:
            _show(found.estimate, matched)
    if not pages:
        raise typer.Exit(1)


def _show(estimate: Estimate, tokens: int) -> None:
    console = table_console()
    table = Table("pages", "tier", "bytes", "to load", "to compute")
    for run in estimate.runs:
        last = run.first_page + run.pages - 1
        span = str(last) if run.pages == 1 else f"{run.first_page}-{last}"
        table.add_row(span, run.tier, size_text(run.nbytes), seconds_text(run.load_s), seconds_text(run.recompute_s))
    console.print(table)
    console.print(f"reckoned with a link of {size_text(estimate.link_bytes_s)}/s and {size_text(estimate.ssd_bytes_s)}/s from SSD")
    if estimate.recompute_s is None:
        console.print("no prefill cost is known: give --prefill-us, or create the namespace with it")
    else:
        console.print(
            f"best: load {estimate.tokens} tokens, compute {tokens - estimate.tokens}: {seconds_text(estimate.seconds)}; "
            f"loading all takes {seconds_text(estimate.load_s)}, computing all {seconds_text(estimate.recompute_s)}"
        )
