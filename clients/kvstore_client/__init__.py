"""The kvstore SDK: an asynchronous client, and a blocking one on the same core."""

from kvstore.api.wire import (
    BadDigest,
    BadRequest,
    Busy,
    Cancelled,
    Component,
    Conflict,
    ConnectionLost,
    Corrupt,
    DeadlineExceeded,
    DiskFailing,
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
    RebuildFailed,
    Turn,
    Unauthenticated,
    UnknownNamespace,
    Unsupported,
    VersionMismatch,
    extra_digest,
)
from kvstore_client.blocking import Client
from kvstore_client.blocking_rebuild import RebuildWorker
from kvstore_client.buffers import SharedBuffer
from kvstore_client.client import DEFAULT_ENDPOINT, AsyncClient
from kvstore_client.estimate import Costs, Estimate, TierRun
from kvstore_client.fingerprint import fingerprint_folder, fingerprint_revision
from kvstore_client.match import Lack, Match
from kvstore_client.namespace import Namespace
from kvstore_client.openai_rebuild import OpenAIRebuilder
from kvstore_client.put import PutResult
from kvstore_client.rebuild import ELSEWHERE, AsyncRebuildWorker, Rebuilt, Wanted
from kvstore_client.scattered import Scattered
from kvstore_client.session import Session
from kvstore_client.streams import Follower, PutStream
from kvstore_client.text import Given
from kvstore_client.view import LocalView, PartView

__all__ = [
    "DEFAULT_ENDPOINT", "ELSEWHERE", "AsyncClient", "AsyncRebuildWorker", "BadDigest", "BadRequest", "Busy", "Cancelled", "Client",
    "Component", "Conflict", "ConnectionLost", "Corrupt", "Costs", "DeadlineExceeded", "DiskFailing", "Ended", "Estimate", "Follower",
    "Forbidden", "Given", "Hints", "KVSpec", "KVStoreError", "Lack", "LocalView", "Match", "MissingParent", "Namespace", "NoSpace",
    "NotFound", "OpenAIRebuilder", "PartRange", "PartView", "ProtocolError", "PutResult", "PutStream", "RebuildFailed",
    "RebuildWorker", "Rebuilt", "Scattered", "Session", "SharedBuffer", "TierRun", "Turn", "Unauthenticated", "UnknownNamespace",
    "Unsupported", "VersionMismatch", "Wanted", "extra_digest", "fingerprint_folder", "fingerprint_revision",
]  # fmt: skip
