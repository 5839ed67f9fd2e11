"""Fixtures of several files."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvstore_client import Client, KVSpec
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.rebuilds import SPEC

_names = count()


@pytest.fixture
def space(daemon: DaemonProcess) -> Iterator[Callable[..., Namespace]]:
    """Makes namespaces with recipes; they are dropped at the end."""
    made: list[Namespace] = []
    with Client(daemon.endpoint) as client:

        def make(rebuild: str = "exact", spec: KVSpec = SPEC, **options: Any) -> Namespace:
            name = f"rebuild-{next(_names)}"
            made.append(client.namespace(name, f"revision of {name}", spec, recipes=True, rebuild=rebuild, **options))
            return made[-1]

        yield make
        for one in made:
            one.drop()
