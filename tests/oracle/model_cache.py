"""A cache that is the reference rule over plain content. It stands in for the oracle in the default suite, which has no SGLang."""

import random
from collections.abc import Callable

from tests.oracle.content import STATE, WINDOW, Content, Setting, after_insert, masks, usable
from tests.oracle.steps import FULL_KIND, STATE_KIND, WINDOW_KIND

Rule = Callable[[Setting, list[int]], set[int]]


class ModelCache:
    """Evicts at random: full from the leaves, windows and states anywhere but where a lock holds them. `rule` can be a wrong one."""

    def __init__(self, setting: Setting, rule: Rule = usable) -> None:
        self.setting = setting
        self._rule = rule
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._content: Content = {}
        self._locks: list[bytes] = []
        self._rng = random.Random(0)

    def insert(self, tokens: bytes, first_window: int, *, reuse: bool) -> int:
        """As the oracle's."""
        first = self.longest(tokens) if reuse else 0
        self._content = after_insert(self.setting, self._content, tokens, first, first_window)
        return first

    def longest(self, tokens: bytes) -> int:
        """As the oracle's."""
        return max(self.usable(tokens))

    def usable(self, tokens: bytes) -> set[int]:
        """As the oracle's."""
        return self._rule(self.setting, masks(self.setting, self._content, tokens))

    def full_pages(self, tokens: bytes) -> int:
        """As the oracle's."""
        return len(masks(self.setting, self._content, tokens))

    def evict(self, kind: str, pages: int) -> None:
        """As the oracle's, in random order."""
        for _ in range(pages):
            if kind == FULL_KIND:
                parents = {prefix[: -self.setting.page_bytes] for prefix in self._content}
                self._drop([p for p in self._content if p not in parents and not self._is_locked(p)])
            part = {FULL_KIND: 0, WINDOW_KIND: WINDOW, STATE_KIND: STATE}[kind]
            holders = sorted(p for p, mask in self._content.items() if mask & part and not self._is_locked(p))
            if holders:
                self._content[self._rng.choice(holders)] &= ~part

    def _drop(self, leaves: list[bytes]) -> None:
        if leaves:
            del self._content[self._rng.choice(sorted(leaves))]

    def _is_locked(self, prefix: bytes) -> bool:
        return any(locked.startswith(prefix) for locked in self._locks)

    def lock(self, tokens: bytes) -> int:
        """As the oracle's."""
        pages = self.longest(tokens)
        if pages:
            self._locks.append(tokens[: pages * self.setting.page_bytes])
        return pages

    def unlock(self, which: int, *, only_window: bool) -> int | None:
        """As the oracle's."""
        if not self._locks or only_window:
            return None
        which %= len(self._locks)
        del self._locks[which]
        return which

    def content(self) -> Content:
        """All there is."""
        return dict(self._content)

    def check(self) -> None:
        """Nothing to check."""

    def drain(self) -> None:
        """Nothing to give back."""
