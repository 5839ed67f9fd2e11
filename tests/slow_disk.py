"""A disk that takes its time, in pytest's own processes: `KVSTORE_TEST_SLOW_DISK=0.1 python -m pytest -p tests.slow_disk tests/store`.

Every commit takes so many seconds more. What fails here and not without waits too briefly for one.
"""

import os
import time
from functools import wraps
from typing import Any

import pytest

from kvstore.radix.journal import Journal
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.text import RecipeFile


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is collected."""
    seconds = float(os.environ["KVSTORE_TEST_SLOW_DISK"])
    for kind in (BlobFile, Journal, RecipeFile):
        _delay(kind, seconds)


def _delay(kind: Any, seconds: float) -> None:
    commit = kind.commit

    @wraps(commit)
    def later(*given: Any) -> None:
        time.sleep(seconds)
        commit(*given)

    kind.commit = later
