"""Fixtures: the watchdog on blocking calls, and real daemons."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, BlockBusterFunction, blockbuster_ctx

from kvstore.radix.journal import Journal
from kvstore.store.datadir import DataDir
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.text import RecipeFile
from kvstore_workers.daemon_process import DaemonProcess
from tests.forked_daemon import launch_forked

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the suite starts some hundred processes: each would compile all of kvstore for itself
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # and numpy would start threads in each

PROCESSES = {"factory", "faults", "fuzz", "integration", "workers"}

BLOCKING = [
    *(
        (Journal, name)
        for name in (
            "commit",
            "load",
            "scan",
            "salvage",
            "probe",
            "namespaces",
            "page_numbers",
            "put_namespace",
            "drop_namespace",
            "__init__",
        )
    ),
    *((BlobFile, name) for name in ("commit", "read", "probe", "stored_blobs", "namespace_numbers", "drop_namespace", "__init__")),
    *(
        (RecipeFile, name)
        for name in (
            "commit",
            "read",
            "have",
            "oldest",
            "below",
            "keys",
            "scan",
            "numbers",
            "restamp",
            "forget",
            "drop_namespace",
            "recount",
            "salvage",
            "probe",
            "__init__",
        )
    ),
    (DataDir, "__init__"),
]


def pytest_configure(config: pytest.Config) -> None:
    """Daemons start quickly, but for engines, which have ideas of their own about processes."""
    if not any("engines" in Path(argument).parts for argument in config.args):
        DaemonProcess.launch = staticmethod(launch_forked)
        _give_random_tests_their_time()


def _give_random_tests_their_time() -> None:
    """On a busy machine any example may take long: that is no fault."""
    from hypothesis import HealthCheck, settings  # engines do without

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.fixture
def never_blocks() -> Iterator[BlockBuster]:
    """Fail on a blocking call in the event loop's thread: the standard ones, and every entry into LMDB."""
    with blockbuster_ctx() as watchdog:
        for owner, name in BLOCKING:
            watchdog.functions[f"{owner.__name__}.{name}"] = function = BlockBusterFunction(owner, name)
            function.activate()
        yield watchdog


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that the tests of a module share."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), "--dram", "64MiB", "--ssd", "256MiB") as running:
        yield running


@pytest.fixture(scope="module", params=["true", "false"], ids=["shared_memory", "connections"])
def either_daemon(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    """A daemon that clients on this machine share memory with, and one that they don't: what they get must be the same."""
    environment = {"KVSTORE_SHARED_MEMORY": request.param}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), "--dram", "64MiB", "--ssd", "256MiB", environment=environment) as running:
        yield running


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory for a daemon of one test."""
    return tmp_path / "data"


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are processors: half of the time a test waits for a daemon, or for a time to be over."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing all tests makes next to no garbage, and what it makes stays: no collection during a test looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes first: the quick ones at the end keep all workers busy until it."""
    items.sort(key=lambda item: item.path.parent.name not in PROCESSES)


def pytest_report_header() -> str:
    return f"kvstore tests: real daemons with {sys.executable}"
