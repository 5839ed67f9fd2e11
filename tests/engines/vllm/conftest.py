"""These tests need vLLM, in an environment of its own: `make test-engines-vllm`. Elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
