"""`kvstore doctor`: is this machine fit for a daemon?"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.cli.common import JsonOption, counted, print_json
from kvstore.errors import BadRequest

_COLOUR = {"ok": "green", "warn": "yellow", "bad": "red"}


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file, as for `kvstore serve`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Journal and blobs; by default ~/.local/share/kvstore.")] = None,
    dram: Annotated[str | None, typer.Option(help="DRAM tier to reckon with.")] = None,
    ssd: Annotated[str | None, typer.Option(help="SSD tier to reckon with.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure disk and loopback too: seconds, and 256 MiB written and deleted.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Say what is set badly on this machine for the daemon, why it matters, and how to mend it. Changes nothing.

    Reads the same settings as `kvstore serve`. Exit code 0: nothing is bad; 1: something is; 2: it could not look.
    """
    from kvstore.config import load_config
    from kvstore.doctor import CHECKS, Setup, read_facts, worst  # the other commands start faster without these
    from kvstore.doctor.probes import measure_disk, measure_loopback
    from kvstore.machine import existing

    settings = load_config({"data_dir": data_dir, "dram": dram, "ssd": ssd}, config)
    sizes = settings.store_config()
    setup = Setup(settings.data_dir, sizes.dram_bytes, sizes.ssd_bytes, settings.segment, settings.max_connections)
    facts = read_facts(setup)
    if measure:
        folder = existing(settings.data_dir)
        try:
            facts = replace(facts, disk=measure_disk(folder, facts.space.free), loopback=measure_loopback())
        except OSError as error:
            raise BadRequest(f"can't measure in {folder}: {error}; give a --data-dir that can be written, or --no-measure") from error
    findings = [finding for check in CHECKS if (finding := check(facts)) is not None]
    if as_json:
        print_json({"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]})
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            console.print(f"[{_COLOUR[finding.verdict]}]{finding.verdict:4}[/] {finding.name}: {finding.value}")
            if finding.verdict != "ok":
                console.print(f"       {finding.why}", markup=False)
                console.print(f"       mend: {finding.mend}", markup=False)
        counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _COLOUR}
        console.print(f"{counts['ok']} ok, {counted(counts['warn'], 'warning')}, {counts['bad']} bad")
    raise typer.Exit(1 if worst(findings) == "bad" else 0)
