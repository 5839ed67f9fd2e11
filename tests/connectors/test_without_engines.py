"""A connector that is imported where its engine is not says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "install", "page"),
    [
        ("vllm", "vllm", "pip install vllm==", "docs/vllm.md"),
        ("vllm_tier", "vllm", "pip install vllm==", "docs/vllm.md"),
        ("lmcache", "lmcache", "pip install lmcache==", "docs/lmcache.md"),
        ("sglang", "sglang", "pip install sglang==", "docs/sglang.md"),
        ("sglang", "torch", "pip install sglang==", "docs/sglang.md"),
    ],
)
def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, module: str, missing: str, install: str, page: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing or name.startswith("kvstore_connectors.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"kvstore_connectors.{module}")
    assert type(caught.value) is ImportError
    said = str(caught.value)
    assert install in said
    assert page in said
    assert "torch" in said or missing in said
