"""The daemon: a store, its data plane and its control plane, from start to a clean stop."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from kvstore import __version__
from kvstore.api.auth import parse_token_list
from kvstore.api.certificate import Certificate
from kvstore.api.data_plane import DataPlane, bind_tcp, bind_unix
from kvstore.api.guard import Guard
from kvstore.api.http import ControlPlane
from kvstore.api.same_host import SameHost
from kvstore.config import Config
from kvstore.errors import BadRequest, KVStoreError
from kvstore.heap import keep_freed_memory
from kvstore.machine import outgrows, read_disk, read_memory, tight, too_much
from kvstore.recorder import Recorder
from kvstore.size_text import size_text
from kvstore.store import Clock, Store, StoreConfig
from kvstore.threads import started_pool

_log = logging.getLogger("kvstore")

_DRAIN_S = 1.0
_MAX_UNIX_PATH = 107
_DEFAULT_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""What Python takes, too: for what blocks and belongs to none of the other threads."""


async def serve(config: Config, stop: asyncio.Event | None = None, clock: Clock | None = None) -> None:
    """Run a daemon until SIGTERM, SIGINT or `stop`. Then drain: refuse new work, flush, and say what was dropped.

    With a `clock` of your own, the store's time is that of what is replayed.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _raise_descriptor_limit()
    keep_freed_memory()
    loop.set_default_executor(started_pool(_DEFAULT_THREADS, "kvstore-other"))
    store_config = config.store_config()
    _say_what_was_chosen(store_config)
    guard = await _guard(config)
    certificate = await _certificate(config)
    tls = None if certificate is None else certificate.context
    endpoints: list[str] = []
    control = ControlPlane(endpoints, guard)
    http_socket, http_endpoint = await bind_tcp("host", config.host, config.http_port)
    runner = web.AppRunner(control.app, access_log=None, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, http_socket, ssl_context=tls).start()
        _log.info("control plane on %s://%s", "http" if tls is None else "https", http_endpoint)
        async with Store(store_config, clock) as store, _recording(config, store) as recorder, _events(config, store):
            listeners = await _bind(config)
            endpoints += [endpoint for _, endpoint in listeners]
            data_plane = DataPlane(
                store, guard, tls=tls, max_connections=config.max_connections, client_timeout_s=config.client_timeout,
                host=_same_host(config, endpoints), max_in_flight=config.client_in_flight,
            )  # fmt: skip
            try:
                async with data_plane.listen(listeners), _watching(guard, certificate, config, store, data_plane):
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
    if store.stuck or (recorder is not None and recorder.stuck):
        logging.shutdown()
        os._exit(1)  # a thread waits for a disk that does not answer; a normal end would wait for it


def _say_what_was_chosen(chosen: StoreConfig) -> None:
    """In the log. Raises BadRequest for a DRAM tier that the machine has no memory for."""
    memory = read_memory()
    if refusal := too_much(chosen.dram_bytes, memory):
        raise BadRequest(refusal)
    _log.info("kvstore %s, data in %s", __version__, chosen.data_dir)
    for tier, size in (("DRAM", chosen.dram_bytes), ("SSD", chosen.ssd_bytes)):
        _log.info("%s tier: %s", tier, size_text(size))
    _log.info("policy: %s", chosen.policy)
    warnings = [tight(chosen.dram_bytes, memory)]
    with contextlib.suppress(OSError):  # what can't be used is an error when it is opened
        warnings.append(outgrows(chosen.ssd_bytes, read_disk(chosen.data_dir)))
    for warning in filter(None, warnings):
        _log.warning("%s", warning)


async def _guard(config: Config) -> Guard:
    if config.tokens_file is not None:
        guard = await Guard.of_file(config.tokens_file)
    elif config.tokens is not None:
        guard = Guard(parse_token_list(config.tokens.get_secret_value()))
    else:
        guard = Guard()
        if not config.loopback:
            _log.warning("insecure: everybody who can reach %s may read and delete everything", ", ".join((config.host, *config.listen)))
    return guard


@contextlib.asynccontextmanager
async def _recording(config: Config, store: Store) -> AsyncIterator[Recorder | None]:
    """Meanwhile, record requests, if that is wanted."""
    if config.record is None:
        yield None
        return
    async with Recorder(
        config.record, max_bytes=config.record_max_bytes, keep=config.record_keep, with_tokens=config.record_tokens,
        stored_pages=store.figures.pages,
    ) as recorder:  # fmt: skip
        recorder.stats = store.stats
        store.uses.observers.append(recorder)
        try:
            yield recorder
        finally:
            store.uses.observers.remove(recorder)


@contextlib.asynccontextmanager
async def _events(config: Config, store: Store) -> AsyncIterator[None]:
    """Meanwhile, publish what comes to the tiers and leaves them, if anybody is to know."""
    if store.tier_events is None:
        yield
        return
    from kvstore.api.events import EventPublisher  # with ZeroMQ, which nobody else needs

    publisher = EventPublisher(store.tier_events, config.event_settings(), store.stats, store.epoch // 1000)
    await publisher.open([space.settings for space in store.all_spaces()], store.died)
    try:
        yield
    finally:
        await publisher.close()


async def _certificate(config: Config) -> Certificate | None:
    if config.tls_cert is None or config.tls_key is None:
        if not config.loopback:
            _log.warning("no TLS: tokens and pages travel in the clear; give tls_cert and tls_key")
        return None
    return await asyncio.to_thread(Certificate, config.tls_cert, config.tls_key, config.tls_client_ca)


@contextlib.asynccontextmanager
async def _watching(
    guard: Guard, certificate: Certificate | None, config: Config, store: Store, data_plane: DataPlane
) -> AsyncIterator[None]:
    """Meanwhile, keep up with the token file, at once on SIGHUP: quotas, and who may stay. And with the certificate."""

    def tick() -> None:
        store.quotas.replace(config.quotas() | (guard.table.quotas if guard.table is not None else {}))
        data_plane.expel()

    tick()
    loop = asyncio.get_running_loop()
    hangup = asyncio.Event()

    async def renew() -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            guard.hurry()
            if certificate is not None:
                await certificate.renew()

    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    tasks = [asyncio.create_task(guard.watch(tick), name="kvstore-tokens"), asyncio.create_task(renew(), name="kvstore-renew")]
    for task in tasks:
        task.add_done_callback(lambda ended: None if ended.cancelled() else store.died.set())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _same_host(config: Config, endpoints: list[str]) -> SameHost:
    """What clients on this machine get: shared memory over the Unix socket, if there is one and it is switched on."""
    there = config.shared_memory and any(endpoint.startswith("unix:") for endpoint in endpoints)
    return SameHost(f"unix:{_unix_path(config).absolute()}" if there else "", config.users())


def _unix_path(config: Config) -> Path:
    return config.unix_socket or config.data_dir / "kvstore.sock"


async def _bind(config: Config) -> list[tuple[socket.socket, str]]:
    bound: list[tuple[socket.socket, str]] = []
    try:
        more = [("listen", *address) for address in config.more_addresses()]
        for setting, host, port in [("host", config.host, config.port), *more]:
            listener, endpoint = await bind_tcp(setting, host, port)
            bound.append((listener, endpoint if config.tls_cert is None else f"tls://{endpoint}"))
        path = _unix_path(config)
        if config.unix_socket is None and len(str(path)) > _MAX_UNIX_PATH:
            _log.warning("no Unix socket: %s is too long for one; give a shorter --unix-socket", path)
        else:
            bound.append(bind_unix(path, for_others=bool(config.unix_users)))
    except BaseException:
        for listener, _ in bound:
            listener.close()
        raise
    return bound


def _raise_descriptor_limit() -> None:
    """Every connection and every segment is a descriptor: take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            _log.debug("descriptor limit raised from %d to %d", soft, hard)
