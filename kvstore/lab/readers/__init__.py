"""Reading traces: Mooncake's block lists, recorded coding-agent sessions, and kvstore's own records."""

from kvstore.lab.readers.lines import BadTrace
from kvstore.lab.readers.read import FORMATS, ReadOptions, read_trace

__all__ = ["FORMATS", "BadTrace", "ReadOptions", "read_trace"]
