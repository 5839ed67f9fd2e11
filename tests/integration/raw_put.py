"""Puts of which every frame is made here."""

from typing import Any

from kvstore.api.wire import SLICES_META, FrameType, slice_digest, unpack
from kvstore.api.wire.frames import encode_bulk
from kvstore.api.wire.put_messages import PutReady, PutStart
from tests.integration.pages import SPEC, content, context
from tests.integration.raw import RawClient

LAYOUT = SPEC.slice_layout(SPEC.whole())
WHOLE = [(0, 0, 8, 0, 2)]


def start_put(raw: RawClient, seed: int, **changes: Any) -> PutReady:
    message: dict[str, Any] = {"namespace": "pages", "put_id": b"p" * 16, "first_page": 0, "parts": WHOLE} | changes
    header, meta, _ = raw.ask(FrameType.PUT, PutStart(**message), context(seed).tobytes())
    assert header.type is FrameType.PUT_READY, meta
    return unpack(PutReady, meta)


def slices_frame(handle: int, page: int, part: int, first: int, slices: list[bytes], digests: list[bytes] | None = None) -> bytes:
    payload = b"".join(slices)
    digests = [slice_digest(s) for s in slices] if digests is None else digests
    head = encode_bulk(FrameType.SLICES, 5, SLICES_META.pack(handle, page, part, first), len(payload), len(digests))
    return head + payload + b"".join(digests)


def page_slices(seed: int, page: int, salt: bytes = b"") -> list[bytes]:
    data = content(context(seed), salt=salt)[page * SPEC.page_bytes : (page + 1) * SPEC.page_bytes].tobytes()
    return [data[o : o + s] for o, s in zip(LAYOUT.offsets, LAYOUT.sizes, strict=False)]


def send_all(raw: RawClient, ready: PutReady, seed: int, salt: bytes = b"") -> None:
    for page in range(ready.first_needed, ready.total_pages):
        raw.send_raw(slices_frame(ready.handle, page, 0, 0, page_slices(seed, page, salt)))
