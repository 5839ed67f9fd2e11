"""The errors a caller can get, each with a code that is the same on the wire, over HTTP and in the SDK."""

from copy import copy
from typing import ClassVar, Self


class KVStoreError(Exception):
    """Base of every error that crosses the API.

    `code` is stable and meant for programs; the message says what was wrong, where, and what to do.
    `done_pages`: of a list of pages, those before this one are done, durably if that was asked for; of a prefix that was put, its pages
    before this one, counted from the root, are there, durably likewise.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.done_pages = 0

    def after(self, pages: int) -> Self:
        """The same error, of a list of which so many pages are done. Others may be told of the one that this is made from."""
        mine = copy(self)
        mine.done_pages = pages
        return mine


class BadRequest(KVStoreError):
    """The request contradicts itself, the KV spec or a stated limit."""

    code = "bad_request"
    http_status = 400


class ProtocolError(KVStoreError):
    """The bytes on the connection are not the protocol; the connection is closed after it."""

    code = "protocol"
    http_status = 400


class VersionMismatch(KVStoreError):
    """Client and daemon share no protocol version."""

    code = "version_mismatch"
    http_status = 400


class Unauthenticated(KVStoreError):
    """The daemon wants a bearer token, and was given none, or one that is wrong, expired or removed."""

    code = "unauthenticated"
    http_status = 401


class Forbidden(KVStoreError):
    """The token does not allow this."""

    code = "forbidden"
    http_status = 403


class UnknownNamespace(KVStoreError):
    """No such namespace for this tenant."""

    code = "unknown_namespace"
    http_status = 404


class NotFound(KVStoreError):
    """What was asked for is not (or no longer) in the store: a miss."""

    code = "not_found"
    http_status = 404


class Corrupt(NotFound):
    """The bytes did not verify; they were dropped and counted. For the caller it is a miss."""

    code = "corrupt"


class Conflict(KVStoreError):
    """The name is taken by something else, or the thing is in use."""

    code = "conflict"
    http_status = 409


class MissingParent(KVStoreError):
    """A put names pages whose prefix is not in the store."""

    code = "missing_parent"
    http_status = 409


class BadDigest(KVStoreError):
    """Bytes that were put do not match the digest sent with them."""

    code = "bad_digest"
    http_status = 422


class Busy(KVStoreError):
    """No room just now; try again after `retry_after_ms`."""

    code = "busy"
    http_status = 503


class NoSpace(KVStoreError):
    """It can't be kept: larger than the tier, or everything there is protected. Waiting will not help."""

    code = "no_space"
    http_status = 507


class DiskFailing(KVStoreError):
    """The disk under the SSD tier refuses writes or does not answer: nothing can be made durable just now. Memory puts go on."""

    code = "disk_failing"
    http_status = 503


class RebuildFailed(KVStoreError):
    """Pages could not be computed again: a recipe is missing, or the workers that tried it failed. The message says why."""

    code = "rebuild_failed"
    http_status = 502


class Unsupported(KVStoreError):
    """Well-formed, but not offered by this daemon."""

    code = "unsupported"
    http_status = 501


class Cancelled(KVStoreError):
    """The request was cancelled by the client, or the daemon is stopping."""

    code = "cancelled"
    http_status = 503


class DeadlineExceeded(KVStoreError):
    """The caller's deadline passed before the answer."""

    code = "deadline"
    http_status = 504


class ConnectionLost(KVStoreError):
    """The daemon could not be reached, or the connection broke and could not be restored in time."""

    code = "connection_lost"
    http_status = 503


class DataDirError(KVStoreError):
    """The data directory can't be used: locked by another daemon, or of a newer format."""

    code = "data_dir"


def _all_subclasses(cls: type[KVStoreError]) -> list[type[KVStoreError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found += _all_subclasses(child)
    return found


BY_CODE: dict[str, type[KVStoreError]] = {cls.code: cls for cls in _all_subclasses(KVStoreError)}


def error_from_code(code: str, message: str, retry_after_ms: int | None = None) -> KVStoreError:
    """The typed error for a code received from a daemon (an unknown code gives the base class)."""
    return BY_CODE.get(code, KVStoreError)(message, retry_after_ms=retry_after_ms)
