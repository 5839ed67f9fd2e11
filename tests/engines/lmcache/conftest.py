"""These tests need LMCache, in an environment of its own: `make test-engines-lmcache`. Elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lmcache") else ["test_*.py"]
