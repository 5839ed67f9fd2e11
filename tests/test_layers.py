"""Dependencies point one way: checked on the imports of every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BELOW = {
    f"kvstore.{name}"
    for name in (
        "columns",
        "hash_index",
        "digests",
        "errors",
        "drift",
        "folders",
        "hints",
        "kvspec",
        "lmdb_files",
        "lmdb_find",
        "lmdb_walk",
        "memfds",
    )
}

ALLOWED = {
    "kvstore/columns.py": {"kvstore.errors"},
    "kvstore/hash_index.py": set(),
    "kvstore/kvspec.py": {"kvstore.errors"},
    "kvstore/digests.py": {"kvstore.errors"},
    "kvstore/hints.py": {"kvstore.errors"},
    "kvstore/drift.py": {"kvstore.kvspec"},
    "kvstore/prefill.py": {"kvstore.errors"},
    "kvstore/sizing.py": {"kvstore.errors", "kvstore.kvspec", "kvstore.prefill"},
    "kvstore/lmdb_files.py": {"kvstore.errors", "kvstore.folders", "kvstore.lmdb_walk"},
    "kvstore/lmdb_find.py": {"kvstore.lmdb_walk"},
    "kvstore/lmdb_walk.py": set(),
    "kvstore/fault_note.py": set(),
    "kvstore/folders.py": set(),
    "kvstore/machine.py": {"kvstore.size_text"},
    "kvstore/size_text.py": set(),
    "kvstore/memfds.py": set(),
    "kvstore/threads.py": {"kvstore.errors"},
    "kvstore/lease_times.py": {"kvstore.errors"},
    "kvstore/trace_record.py": {"kvstore.digests"},
    "kvstore/lab": {"kvstore.hints", "kvstore.lab", "kvstore.prefill", "kvstore.radix", "kvstore.tiers", "kvstore.trace_record", *BELOW},
    "kvstore/radix": {"kvstore.radix", *BELOW},
    "kvstore/tiers": {"kvstore.hints", "kvstore.threads", "kvstore.tiers", *BELOW},
    "kvstore/api/wire": {"kvstore.api.wire", "kvstore.digests", "kvstore.drift", "kvstore.errors", "kvstore.hints", "kvstore.kvspec"},
    "clients/kvstore_client": {
        "kvstore.api.wire",
        "kvstore.lease_times",
        "kvstore.machine",
        "kvstore.memfds",
        "kvstore.size_text",
        "kvstore_client",
    },
    "clients/kvstore_connectors": {"kvstore.api.wire", "kvstore_client", "kvstore_connectors"},
    "kvstore/tiers/__init__.py": set(),
    "clients/kvstore_workers": {"kvstore.api.wire", "kvstore.tiers.hbm", "kvstore_client", "kvstore_workers"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0].startswith("kvstore")}


@pytest.mark.parametrize("place", ALLOWED)
def test_imports(place: str) -> None:
    files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            assert any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[place]), f"{file.relative_to(ROOT)} imports {name}"


def test_hbm_imports_no_other_tier() -> None:
    """A worker has it without the daemon's packages."""
    for name in ("hbm", "device"):
        assert imports(ROOT / f"kvstore/tiers/{name}.py") <= {"kvstore.errors", "kvstore.tiers", "kvstore.tiers.device"}


def test_the_store_knows_no_sockets() -> None:
    for file in (ROOT / "kvstore/store").rglob("*.py"):
        source = file.read_text()
        assert "import socket" not in source
        assert "kvstore.api" not in source


def test_commands_start_without_what_only_others_need() -> None:
    """`kvstore status` is fast in a script: neither the daemon nor numpy is loaded for it."""
    code = "import sys, kvstore.cli.app, kvstore.cli.watch; print(*sorted({'numpy', 'aiohttp', 'pydantic', 'lmdb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_importing_leaves_the_collector_on_and_what_was_imported_aside() -> None:
    code = """import gc
from kvstore.cli.imports import imports
with imports():
    import email.message
print(gc.isenabled(), gc.get_freeze_count() > 1000)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True True\n"
