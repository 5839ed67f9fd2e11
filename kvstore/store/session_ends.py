"""Where each session of a namespace was last: the page key of its last boundary, for as many sessions as there is room for."""

from collections import Counter, OrderedDict
from typing import NamedTuple

DEFAULT_SESSIONS = 65_536


class Line(NamedTuple):
    """A session's main line, or what it does as a sub-agent: branches of their own."""

    session: int
    sub_agent: bool


class SessionEnds:
    """The last boundary by line; the one not heard of for longest is forgotten when there are more than `most`."""

    def __init__(self, most: int = DEFAULT_SESSIONS) -> None:
        self._most = most
        self._keys: OrderedDict[Line, bytes] = OrderedDict()
        self._at: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, line: Line) -> bytes | None:
        """The page key of a line's last boundary."""
        return self._keys.get(line)

    def put(self, line: Line, key: bytes) -> None:
        """A line was last at the page of this key."""
        self.take(line)
        self._keys[line] = key
        self._at[key] += 1
        if len(self._keys) > self._most:
            self.take(next(iter(self._keys)))

    def take(self, line: Line) -> None:
        """Forget a line."""
        key = self._keys.pop(line, None)
        if key is not None:
            self._at[key] -= 1
            if not self._at[key]:
                del self._at[key]

    def any_at(self, key: bytes) -> bool:
        """Whether a line was last at the page of this key."""
        return key in self._at
