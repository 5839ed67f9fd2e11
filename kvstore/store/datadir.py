"""The data directory: who owns it, and in which format it is."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import DataDirError
from kvstore.folders import sync_folder

FORMAT = 2
"""Version of everything on disk. A daemon opens its own format only; `kvstore migrate` makes it of an older one."""
OLDEST = 1
"""The oldest that there is a migration from."""
BLOBS = "blobs"
"""The folder of the SSD tier in it."""

_NOTE = "format.json"
_LOADING = "loading"
_ID_BYTES = 16
_NOT_HERE = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


class DataDirInUse(DataDirError):
    """Another process holds the directory."""


class DataDir:
    """An exclusive hold on a data directory, from construction to `close`. Of this format, or of one from `oldest` on."""

    def __init__(self, path: Path, *, oldest: int = FORMAT) -> None:
        self.path = path
        self.journal = path / "journal"
        self.blobs = path / BLOBS
        self.recipes = path / "recipes"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            os.close(self._folder)
            raise _unusable(path, error) from error
        try:
            self._take_lock()
            self.format = self._check_format(oldest)
            self.id = self._own_id()
            """16 random bytes that stay with the directory: by them clients know one store from another."""
        except OSError as error:
            self.close()
            raise _unusable(path, error) from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        """Of the folder, too: past a lock file that was deleted a second would come in, and each write over what the other has."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _where_folders_can_be_locked():
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DataDirInUse(
                f"the data directory {self.path} is in use by another process (pid {holder}): stop it, or give this one its own --data-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        with contextlib.suppress(OSError):  # it is for people; a full disk is no reason not to start
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _check_format(self, oldest: int) -> int:
        if (found := read_format(self.path)) is None:
            if self.journal.exists() or self.blobs.exists():
                raise DataDirError(f"{self.path / _NOTE} is missing, but there is data beside it: restore the file, or move the data away")
            self.set_format(FORMAT)
            return FORMAT
        if type(found) is int and oldest <= found <= FORMAT:
            return found
        if type(found) is int and OLDEST <= found < FORMAT:
            raise DataDirError(
                f"the data directory {self.path} is of format {found}, this version of kvstore reads format {FORMAT}: "
                f"run `{migrate_command(self.path)}`"
            )
        raise DataDirError(
            f"the data directory {self.path} is of format {found}, this daemon reads format {FORMAT}: "
            "use the version of kvstore that wrote it, or another --data-dir"
        )

    def set_format(self, number: int) -> None:
        """Say, durably, in which format everything in it is."""
        _write_durably(self.path / _NOTE, json.dumps({"format": number}).encode())

    def _own_id(self) -> bytes:
        file = self.path / "id"
        with contextlib.suppress(OSError, ValueError):  # without it, or if it is damaged, the store is a new one to its clients: no more
            if len(found := bytes.fromhex(file.read_text("ascii"))) == _ID_BYTES:
                return found
        made = secrets.token_bytes(_ID_BYTES)
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            _write_durably(file, f"{made.hex()}\n".encode())
        return made

    def begin_loading(self) -> int:
        """Note that what is there is about to be read. Returns how many starts in a row ended before they had read it all."""
        note = self.path / _LOADING
        try:
            before = int(note.read_bytes()[:8])
        except (FileNotFoundError, ValueError):
            before = 0
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            note.write_bytes(str(before + 1).encode())
        return before

    def end_loading(self) -> None:
        """All was read, or the daemon was told to stop."""
        with contextlib.suppress(OSError):
            (self.path / _LOADING).unlink(missing_ok=True)

    def close(self) -> None:
        """Let another daemon have it."""
        os.close(self._lock)
        os.close(self._folder)


def _unusable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(f"the data directory {path} can't be used: {error}")


@contextlib.contextmanager
def _where_folders_can_be_locked() -> Iterator[None]:
    """Not on NFS: there the lock file is all there is."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def read_format(path: Path) -> object:
    """What a data directory says its format is, a number if all is well; None if it does not say. Raises DataDirError."""
    file = path / _NOTE
    try:
        return json.loads(file.read_bytes())["format"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirError(f"{file} is damaged ({error}); it should read {json.dumps({'format': FORMAT})}") from error


def migrate_command(path: Path) -> str:
    """What to run where the format is an older one."""
    return f"kvstore migrate --data-dir {shlex.quote(str(path))}"


def _write_durably(file: Path, data: bytes) -> None:
    temporary = file.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(file)
    sync_folder(file.parent)
