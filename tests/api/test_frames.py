"""Frames and messages: what is encoded decodes, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.api.wire import FrameType, decode_header, encode, pack, unpack
from kvstore.api.wire.frames import HEADER_BYTES, MAX_BULK_PAYLOAD, MAX_CONTROL_PAYLOAD, MAX_META, encode_bulk
from kvstore.api.wire.messages import CreateNamespace, Hello, MatchRequest
from kvstore.api.wire.put_messages import PutStart
from kvstore.errors import ProtocolError


@given(
    st.sampled_from([t for t in FrameType if t not in (FrameType.SLICES, FrameType.DATA)]),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=300),
    st.binary(max_size=300),
)
def test_a_control_frame_round_trips(kind: FrameType, request: int, meta: bytes, payload: bytes) -> None:
    raw = b"".join(bytes(b) for b in encode(kind, request, meta, payload))
    header = decode_header(raw[:HEADER_BYTES])
    assert (header.type, header.request, header.meta_bytes, header.payload_bytes) == (kind, request, len(meta), len(payload))
    header.verify(raw[:HEADER_BYTES], meta, payload)


@given(st.binary(min_size=1, max_size=100), st.binary(max_size=100), st.data())
def test_any_flipped_bit_of_a_control_frame_is_noticed(meta: bytes, payload: bytes, data: st.DataObject) -> None:
    raw = bytearray(b"".join(bytes(b) for b in encode(FrameType.MATCH, 9, meta, payload)))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        decode_header(raw[:HEADER_BYTES]).verify(
            raw[:HEADER_BYTES], bytes(raw[HEADER_BYTES : HEADER_BYTES + len(meta)]), bytes(raw[HEADER_BYTES + len(meta) :])
        )


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
def test_garbage_gives_a_bounded_header_or_an_error(raw: bytes, plausible: bool) -> None:
    if plausible:
        raw = b"kV\x01" + raw[3:]
    try:
        header = decode_header(raw)
    except ProtocolError:
        return
    assert header.meta_bytes <= MAX_META
    assert header.payload_bytes <= (MAX_BULK_PAYLOAD if header.type is FrameType.SLICES else MAX_CONTROL_PAYLOAD)
    assert header.trailer_bytes <= 16 * header.payload_bytes


def test_a_bulk_frame_states_its_pieces() -> None:
    header = decode_header(encode_bulk(FrameType.SLICES, 1, b"meta", 100, 3)[:HEADER_BYTES])
    assert header.bulk
    assert header.trailer_bytes == 48
    for payload, pieces in ((MAX_BULK_PAYLOAD + 1, 1), (2, 3), (0, 0), (100, 0)):
        with pytest.raises(ProtocolError):
            decode_header(encode_bulk(FrameType.SLICES, 1, b"", payload, pieces)[:HEADER_BYTES])


def test_an_overlong_frame_is_not_even_encoded() -> None:
    with pytest.raises(ProtocolError):
        encode(FrameType.MATCH, 1, b"", bytes(MAX_CONTROL_PAYLOAD + 1))


@given(st.binary(max_size=200))
def test_a_message_is_of_its_kind_or_an_error(meta: bytes) -> None:
    for kind in (Hello, MatchRequest, PutStart):
        try:
            found = unpack(kind, meta)
        except ProtocolError:
            continue
        assert isinstance(found, kind)


def test_messages_ignore_what_they_do_not_know() -> None:
    class Later(Hello):
        novelty: int = 0

    assert unpack(Hello, pack(Later(versions=[1], novelty=5))) == Hello(versions=[1])
    with pytest.raises(ProtocolError):
        unpack(Hello, pack(MatchRequest(namespace="x")))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_a_message_nested_without_end_is_malformed(opening: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(CreateNamespace, b"\x81\xa4spec" + opening * 100_000 + b"\xc0")
