"""The daemon: a store, its data plane and its control plane, from start to a clean stop."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from pathlib import Path

from aiohttp import web

from kvstore import __version__
from kvstore.api.data_plane import DataPlane, bind_tcp, bind_unix
from kvstore.api.http import ControlPlane
from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.store import Store

_log = logging.getLogger("kvstore")

_DRAIN_S = 1.0
_MAX_UNIX_PATH = 107


async def serve(config: Config, stop: asyncio.Event | None = None) -> None:
    """Run a daemon until SIGTERM, SIGINT or `stop`. Then drain: refuse new work, flush, and say what was dropped."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _raise_descriptor_limit()
    store_config = config.store_config()
    _log.info("kvstore %s, data in %s", __version__, config.data_dir)
    for tier, size in (("DRAM", store_config.dram_bytes), ("SSD", store_config.ssd_bytes)):
        _log.info("%s tier: %.1f MiB", tier, size / (1 << 20))
    endpoints: list[str] = []
    control = ControlPlane(endpoints)
    http_socket, http_endpoint = bind_tcp(config.host, config.http_port)
    runner = web.AppRunner(control.app, access_log=None, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, http_socket).start()
        _log.info("control plane on http://%s", http_endpoint)
        async with Store(store_config) as store:
            data_plane = DataPlane(store, max_connections=config.max_connections)
            listeners = _bind(config)
            endpoints += [endpoint for _, endpoint in listeners]
            try:
                async with data_plane.listen(listeners):
                    control.ready = (store, data_plane)
                    _log.info("data plane on %s", ", ".join(endpoints))
                    await _first_of(store.loaded, stop, store.died)
                    if store.loaded.is_set():
                        _log.info("ready")
                    await _first_of(stop, store.died)
                    control.ready = None
                    _log.info("stopping: flushing what is only in DRAM, for at most %.0f s", config.shutdown_timeout)
            finally:
                _unix_path(config).unlink(missing_ok=True)
            if store.died.is_set():
                raise KVStoreError("a background task died, so the daemon ends: the log says of what")
    finally:
        await runner.cleanup()
    _log.info("stopped")
    if store.stuck:
        logging.shutdown()
        os._exit(1)  # a thread waits for a disk that does not answer; a normal end would wait for it


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _unix_path(config: Config) -> Path:
    return config.unix_socket or config.data_dir / "kvstore.sock"


def _bind(config: Config) -> list[tuple[socket.socket, str]]:
    bound = [bind_tcp(config.host, config.port)]
    path = _unix_path(config)
    if config.unix_socket is None and len(str(path)) > _MAX_UNIX_PATH:
        _log.warning("no Unix socket: %s is too long for one; give a shorter --unix-socket", path)
        return bound
    try:
        bound.append(bind_unix(path))
    except BaseException:
        bound[0][0].close()
        raise
    return bound


def _raise_descriptor_limit() -> None:
    """Every connection and every segment is a descriptor: take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            _log.debug("descriptor limit raised from %d to %d", soft, hard)
