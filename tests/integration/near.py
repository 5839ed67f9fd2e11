"""What tests of shared memory share: contexts near and far, and proof of which way the bytes came."""

from kvstore_client import AsyncClient
from kvstore_client.match import Match
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat


def sent_bytes(daemon: DaemonProcess) -> int:
    """Payload bytes that the daemon has sent over sockets so far."""
    return int(stat(daemon.http)["totals"]["fetch_bytes"])


def segments_of(match: Match) -> set[int]:
    """The segments that a match's blobs lie in."""
    return {place.segment for place in match.places().values() if place is not None}


async def is_near(client: AsyncClient) -> bool:
    """Whether the client has shared memory with its daemon."""
    await client.ping()
    return await client.same_host.connection() is not None
