"""Plain models of the policies, a page at a time over lists, to compare ours with."""

from collections import Counter
from typing import Protocol

from tests.lab.traces import Prompt


class Model(Protocol):
    def use(self, page: Prompt) -> bool:
        """Use a page, which is in the cache afterwards. Returns whether it was before."""


class LRUModel:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pages: list[Prompt] = []

    def use(self, page: Prompt) -> bool:
        hit = page in self.pages
        if hit:
            self.pages.remove(page)
        self.pages.append(page)
        if len(self.pages) > self.capacity:
            self.pages.pop(0)
        return hit


class ARCModel:
    """The paper's, but a page enters before another one leaves."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.once: list[Prompt] = []
        self.again: list[Prompt] = []
        self.once_ghosts: list[Prompt] = []
        self.again_ghosts: list[Prompt] = []

    def use(self, page: Prompt) -> bool:
        for pages in (self.once, self.again):
            if page in pages:
                pages.remove(page)
                self.again.append(page)
                return True
        ones, others = len(self.once_ghosts), len(self.again_ghosts)
        if page in self.once_ghosts:
            self.target = min(self.target + max(1.0, others / ones), self.capacity)
            self.once_ghosts.remove(page)
            self.again.append(page)
        elif page in self.again_ghosts:
            self.target = max(self.target - max(1.0, ones / others), 0.0)
            self.again_ghosts.remove(page)
            self.again.append(page)
        else:
            self.once.append(page)
        if len(self.once) + len(self.again) > self.capacity:
            self.replace()
        return False

    def replace(self) -> None:
        if len(self.once) > int(self.target) or not self.again:
            self.once_ghosts.append(self.once.pop(0))
        else:
            self.again_ghosts.append(self.again.pop(0))
        del self.once_ghosts[: max(0, len(self.once) + len(self.once_ghosts) - self.capacity)]
        known = len(self.once) + len(self.again) + len(self.once_ghosts) + len(self.again_ghosts)
        del self.again_ghosts[: max(0, known - 2 * self.capacity)]


class S3FIFOModel:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.small_size = capacity, capacity // 10
        self.small: list[Prompt] = []
        self.main: list[Prompt] = []
        self.ghosts: list[Prompt] = []
        self.uses: Counter[Prompt] = Counter()

    def use(self, page: Prompt) -> bool:
        if page in self.small or page in self.main:
            self.uses[page] = min(self.uses[page] + 1, 3)
            return True
        if page in self.ghosts:
            self.ghosts.remove(page)
            self.main.append(page)
        else:
            self.small.append(page)
        while len(self.small) + len(self.main) > self.capacity:
            self.evict()
        return False

    def evict(self) -> None:
        if len(self.small) > self.small_size:
            page = self.small.pop(0)
            if self.uses[page] > 1:
                self.main.append(page)
            else:
                self.ghosts.append(page)
                del self.ghosts[: max(0, len(self.ghosts) - (self.capacity - self.small_size))]
            self.uses[page] = 0
        else:
            page = self.main.pop(0)
            if self.uses[page]:
                self.uses[page] -= 1
                self.main.append(page)
