"""Lets clients in or refuses them, and keeps up with the token file while the daemon runs."""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.api.auth import EVERYBODY, Grant, TokenTable, parse_token_file
from kvstore.errors import BadRequest, KVStoreError, Unauthenticated

_log = logging.getLogger("kvstore.auth")

_CHECK_S = 1.0
_MAX_FILE = 4 << 20

Signature = tuple[int, int, int, int]
"""What changes when a file does: inode, size, and both times in ns."""


class TokenFile:
    """The token file. Blocking: call from an executor."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def signature(self) -> Signature | None:
        """The file as it is now; None if it is not there."""
        try:
            return _signature(self.path.stat())
        except OSError:
            return None

    def load(self) -> tuple[TokenTable, Signature]:
        """Read it. Raises BadRequest if it can't be read, is not private, or is not valid."""
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a FIFO must not hold us up
                found = os.fstat(file.fileno())
                self._check(found)
                data = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise BadRequest(f"the token file {self.path} can't be read: {error.strerror or error}") from None
        if len(data) > _MAX_FILE:
            raise BadRequest(f"the token file {self.path} is over {_MAX_FILE >> 20} MiB")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"the token file {self.path} is not UTF-8") from None
        return parse_token_file(text, f"the token file {self.path}"), _signature(found)

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"the token file {self.path} is not a file")
        if found.st_mode & 0o077:
            raise BadRequest(f"others may read the token file {self.path} (mode {found.st_mode & 0o777:04o}): chmod 600 it")
        if found.st_uid not in (0, os.geteuid()):
            raise BadRequest(f"the token file {self.path} belongs to another user (uid {found.st_uid})")


def _signature(found: os.stat_result) -> Signature:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Guard:
    """Says what a token stands for. Without any tokens everybody is the tenant `default` with all access."""

    def __init__(self, table: TokenTable | None = None) -> None:
        self._table = table
        self._file: TokenFile | None = None
        self._seen: Signature | None = None
        self._hurry = asyncio.Event()

    @classmethod
    async def of_file(cls, path: Path) -> "Guard":
        """With the tokens of a file, which `watch` keeps up with. Raises BadRequest if it is no good."""
        file = TokenFile(path)
        table, seen = await asyncio.to_thread(file.load)
        guard = cls(table)
        guard._file, guard._seen = file, seen
        return guard

    @property
    def required(self) -> bool:
        """Whether a token is needed."""
        return self._table is not None

    @property
    def table(self) -> TokenTable | None:
        """The tokens as they are now."""
        return self._table

    def admit(self, secret: str) -> Grant:
        """What a secret stands for. Raises Unauthenticated."""
        if self._table is None:
            return EVERYBODY
        if not secret:
            raise Unauthenticated(
                "this daemon wants a bearer token: give one by KVSTORE_TOKEN, `kvstore --token TOKEN …`, or token= in the SDK"
            )
        grant = self._table.find(secret, time.time())
        if grant is None:
            raise Unauthenticated("the token is not known here, or it has expired")
        return grant

    def holds(self, grant: Grant) -> bool:
        """Whether a grant given out earlier is still good: neither removed, changed nor expired."""
        return self._table is None or self._table.holds(grant, time.time())

    def hurry(self) -> None:
        """Re-read the file now (SIGHUP)."""
        self._hurry.set()

    async def watch(self, tick: Callable[[], None]) -> None:
        """Once a second, re-read the file if it has changed, and call `tick`, which sends off those whose token is over."""
        while True:
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            hurried = self._hurry.is_set()
            self._hurry.clear()
            if self._file is not None:
                await self._keep_up(self._file, hurried)
            tick()

    async def _keep_up(self, file: TokenFile, hurried: bool) -> None:
        signature = await asyncio.to_thread(file.signature)
        if signature == self._seen and not hurried:
            return
        self._seen = signature
        try:
            table, self._seen = await asyncio.to_thread(file.load)
        except KVStoreError as error:
            _log.error("the tokens stay as they were: %s", error.message)
        except Exception:  # noqa: BLE001 - whatever is in the file, the watch goes on: tokens must be able to end
            _log.exception("the tokens stay as they were: %s can't be read", file.path)
        else:
            self._table = table
            _log.info("tokens re-read from %s: there are %d", file.path, len(table.grants))
