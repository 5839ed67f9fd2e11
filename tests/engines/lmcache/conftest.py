"""These tests need LMCache, in an environment of its own: `make test-engines-lmcache`. Elsewhere they are not collected."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("lmcache") else ["test_*.py"]


@pytest.fixture(autouse=True)
def words(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the adapter says goes to LMCache's log, and from there to no other."""
    from kvstore_connectors.lmcache import log as logger  # made now, with its handlers

    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
