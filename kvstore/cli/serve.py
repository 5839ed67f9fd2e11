"""`kvstore serve`."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.imports import imports
from kvstore.config import load_config


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see docs/configuration.md.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Journal and blobs; by default ~/.local/share/kvstore.")] = None,
    dram: Annotated[str | None, typer.Option(help="DRAM tier, for example 64GiB; by default a quarter of what is available.")] = None,
    ssd: Annotated[
        str | None, typer.Option(help="SSD tier; by default half of the disk that is free or the store's, at most 256 GiB.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="Further addresses of the data plane, HOST or HOST:PORT, with commas; see docs/links.md.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Data plane port, 0 for any; by default 7421.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port, 0 for any; by default 7420.")] = None,
    unix_socket: Annotated[Path | None, typer.Option(help="Unix socket; by default kvstore.sock in the data directory.")] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens and quotas; see docs/security.md.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Allow another address than loopback without tokens.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for both planes.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Who signs the certificates that clients then need (PEM).")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Which pages leave a tier first: classifier, lru, arc or s3fifo; by default classifier.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Record requests to this file, for `kvstore simulate`; packed if it ends in .gz.")
    ] = None,
    record_tokens: Annotated[bool | None, typer.Option("--record-tokens", help="Record the tokens of prompts too.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error; by default info.")] = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Needs no configuration; it logs what it chose. Everything can also be set in the TOML file, or as KVSTORE_* in the
    environment (KVSTORE_DRAM=64GiB). Flags win over the environment, and that over the file.
    """
    flags = {
        "data_dir": data_dir,
        "dram": dram,
        "ssd": ssd,
        "host": host,
        "listen": listen,
        "port": port,
        "http_port": http_port,
        "unix_socket": unix_socket,
        "tokens_file": tokens_file,
        "insecure": insecure,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "policy": policy,
        "record": record,
        "record_tokens": record_tokens,
        "log_level": log_level,
    }
    settings = load_config(flags, config)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    with imports():
        from kvstore.daemon import serve as run  # the other commands start faster without the daemon's imports
        from kvstore.loop import Loop

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(run(settings))
