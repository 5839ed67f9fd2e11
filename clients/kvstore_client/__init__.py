"""The kvstore SDK: an asynchronous client, and a blocking one on the same core."""

from kvstore.api.wire import (
    BadDigest,
    BadRequest,
    Busy,
    Component,
    Conflict,
    ConnectionLost,
    Corrupt,
    DeadlineExceeded,
    Ended,
    Forbidden,
    Hints,
    KVSpec,
    KVStoreError,
    MissingParent,
    NoSpace,
    NotFound,
    PartRange,
    ProtocolError,
    Turn,
    Unauthenticated,
    UnknownNamespace,
    Unsupported,
    VersionMismatch,
    extra_digest,
)
from kvstore_client.blocking import Client
from kvstore_client.client import DEFAULT_ENDPOINT, AsyncClient
from kvstore_client.estimate import Costs, Estimate, TierRun
from kvstore_client.fingerprint import fingerprint_folder, fingerprint_revision
from kvstore_client.namespace import Match, Namespace, PutResult
from kvstore_client.session import Session
from kvstore_client.streams import Follower, PutStream

__all__ = [
    "DEFAULT_ENDPOINT", "AsyncClient", "BadDigest", "BadRequest", "Busy", "Client", "Component", "Conflict", "ConnectionLost",
    "Corrupt", "Costs", "DeadlineExceeded", "Ended", "Estimate", "Follower", "Forbidden", "Hints", "KVSpec", "KVStoreError",
    "Match", "MissingParent", "Namespace", "NoSpace", "NotFound", "PartRange", "ProtocolError", "PutResult", "PutStream", "Session",
    "TierRun", "Turn", "Unauthenticated", "UnknownNamespace", "Unsupported", "VersionMismatch", "extra_digest",
    "fingerprint_folder", "fingerprint_revision",
]  # fmt: skip
