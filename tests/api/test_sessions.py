"""What one client may have under way."""

import pytest

from kvstore.api.sessions import MAX_RUNS_UNDER_WAY, Session
from kvstore.errors import Busy
from kvstore.store.matching.rates import ClientLink, Rates


def test_the_fetches_of_a_client_are_bounded_in_bytes() -> None:
    session = Session(bytes(16), 1, "tenant", "client", max_in_flight=100, link=ClientLink(Rates(), "tenant"))
    with session.fetching(60), session.fetching(40):
        with pytest.raises(Busy) as refused, session.fetching(1):
            pytest.fail("it was let in")
        assert refused.value.retry_after_ms
    with session.fetching(1000):
        assert session.in_flight == 1000, "one that is larger than the limit may be, alone"
    assert session.in_flight == 0


def test_the_fetches_of_a_client_are_bounded_in_runs() -> None:
    session = Session(bytes(16), 1, "tenant", "client", link=ClientLink(Rates(), "tenant"))
    with session.fetching(1, MAX_RUNS_UNDER_WAY), pytest.raises(Busy, match="runs"), session.fetching(1, 1):
        pytest.fail("it was let in")
    with session.fetching(1, MAX_RUNS_UNDER_WAY + 1):
        pass
    assert (session.runs, session.in_flight) == (0, 0)
