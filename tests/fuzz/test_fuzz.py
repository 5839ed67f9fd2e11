"""The short form of `make fuzz`, always the same inputs; and that the fuzzers find what they are to find."""

from pathlib import Path
from random import Random

import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.frames import BULK
from tests.fuzz import decoder, grammar, live

SEED = 20_260


def test_the_decoders_refuse_in_their_own_words() -> None:
    report = decoder.DecoderReport()
    decoder.fuzz(SEED, 0, 15_000, report)
    assert not report.failures, "\n".join(report.failures)
    for name in decoder.TARGETS:
        assert report.accepted[name] > 20, f"hardly any input of {name} is valid: {report}"
        assert report.refused[name] > 20, f"hardly any input of {name} is invalid: {report}"


def test_a_decoder_that_fails_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack_runs(data: bytes) -> list[object]:
        if len(data) > 32:
            raise IndexError
        return []

    monkeypatch.setattr(decoder, "unpack_runs", unpack_runs)
    report = decoder.DecoderReport()
    decoder.fuzz(SEED, 0, 100, report)
    assert report.failures
    assert "IndexError" in report.failures[0]


def test_the_live_socket(tmp_path: Path) -> None:
    report = live.fuzz(tmp_path / "data", SEED, 0, 150)
    assert not report.failures, "\n".join(report.failures)
    for kind in (FrameType.MATCHED, FrameType.FETCHED, FrameType.COMMITTED, FrameType.ERROR):
        assert report.replies[kind.name], f"no {kind.name} came back: the conversations are too poor"


def test_every_request_type_is_made() -> None:
    """A new frame type needs no word in the fuzzer; one without a message in the tables would not be fuzzed well."""
    made = {kind: grammar.request_frame(kind, 1, Random(1), grammar.World()) for kind in grammar.REQUEST_TYPES}
    assert all(frame[3] == kind for kind, frame in made.items())
    assert not set(grammar.REQUEST_TYPES) - set(grammar.REQUESTS) - BULK
