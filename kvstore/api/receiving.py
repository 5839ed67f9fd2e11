"""Slices coming in for a put, straight into its slots."""

from typing import Protocol

from kvstore.api.sessions import Session
from kvstore.api.wire import SLICES_META, Channel, Header
from kvstore.errors import BadRequest, KVStoreError, ProtocolError
from kvstore.store import Store

BEGIN_WAIT_S = 0.05
"""How long a connection waits with slices in hand for the room of a put that is sent at once: long enough to make a segment, and short
enough for the requests that come behind them."""


class Peer(Protocol):
    """The connection that they come in by."""

    store: Store
    session: Session
    channel: Channel


async def receive_slices(connection: Peer, header: Header, meta: bytes) -> KVStoreError | None:
    """Read a SLICES frame straight into its put's slots. A put that can't take them is told at its commit, too.

    The payload is read in any case, so that the connection goes on. Returns the error to report.
    """
    if len(meta) != SLICES_META.size:
        raise ProtocolError(f"a SLICES meta of {len(meta)} bytes, not {SLICES_META.size}")
    handle, page, part, first_slice = SLICES_META.unpack(meta)
    put = None
    try:
        put = connection.store.get_put(connection.session.owner, handle)
        if put.at_once:
            if not put.ready or put.error is not None:
                await connection.store.put_begun(put, BEGIN_WAIT_S)
            if not put.wants(page, part):
                await connection.channel.skip(header.payload_bytes + header.trailer_bytes)
                return None
        try:
            view, sizes = put.locate(page, part, first_slice, header.payload_bytes, header.pieces)
        except BadRequest:
            if not put.has(page, part, first_slice, header.pieces):
                raise
            await connection.channel.skip(header.payload_bytes)
            put.check_again(page, part, first_slice, await connection.channel.read(header.trailer_bytes))
            return None
    except KVStoreError as error:
        if put is not None:
            put.fail(error)
        await connection.channel.skip(header.payload_bytes + header.trailer_bytes)
        return error
    try:
        digests, claimed = await connection.channel.read_pieces(header, [(view, sizes)])
    except BaseException:
        put.release_writer(page, part, first_slice, len(sizes))
        raise
    try:
        put.received(page, part, first_slice, digests, claimed)
    except KVStoreError as error:
        put.fail(error)
        return error
    return None
