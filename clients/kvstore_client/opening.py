"""How a connection to a daemon comes to be: an address, a socket, TLS if it is asked for, and the greeting."""

import asyncio
import socket
import ssl

from kvstore.api.wire import PROTOCOL_VERSION, Channel, ConnectionLost, TlsChannel
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.messages import Hello
from kvstore.api.wire.same_host import MAX_SEGMENTS
from kvstore_client.answers import cut_off, without_a_word
from kvstore_client.connection import Connection
from kvstore_client.endpoints import new_socket, parse_endpoint, reason_of

_HANDSHAKE_S = 10.0


async def open_connection(
    endpoint: str, *, session: bytes = b"", client: str = "", token: str = "", tls: ssl.SSLContext | None = None,
    descriptors: bool = False, connected: socket.socket | None = None,
) -> Connection:  # fmt: skip
    """Connect, unless there is a `connected` socket, and shake hands.

    Over a Unix socket, with `descriptors`, file descriptors can be passed.
    Raises ConnectionLost, Unauthenticated, Busy (over the quota), VersionMismatch or NotFound (the session is over).
    """
    family, address = parse_endpoint(endpoint)
    sock = connected or new_socket(family, endpoint)
    channel: Channel
    if isinstance(address, str):
        channel = DescriptorChannel(sock, MAX_SEGMENTS) if descriptors else Channel(sock)
    else:
        channel = Channel(sock) if tls is None else TlsChannel(sock, tls, server_name=address[0])
    connection = Connection(channel)
    try:
        if connected is None:
            await asyncio.get_running_loop().sock_connect(sock, address)
        await _shake_hands(channel)
        await connection.start(Hello(versions=[PROTOCOL_VERSION], client=client, token=token, session=session))
    except OSError as error:
        channel.close()
        raise ConnectionLost(f"can't connect to {endpoint}: {reason_of(error)}; is a daemon there? (`kvstore serve` starts one)") from error
    except BaseException:
        channel.close()
        raise
    return connection


async def _shake_hands(channel: Channel) -> None:
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await channel.shake_hands()
    except TimeoutError:
        raise ConnectionLost("no TLS handshake: does the daemon speak TLS there?") from None
    except ConnectionLost as error:
        if error.__cause__ is None or cut_off(error):
            raise without_a_word("it does not speak TLS there") from error
        raise
