"""These tests need SGLang, in an environment of its own: `make test-engines-sglang`. Elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
