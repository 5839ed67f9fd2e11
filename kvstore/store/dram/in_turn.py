"""What waits to be done for several owners, each of whom gets a turn, however much the others want. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class InTurn(Generic[T]):
    """At most so many things, each once: of an owner in the order in which they came, of owners one after the other."""

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, owner: str, thing: T, most: int) -> bool:
        """Let a thing wait. With `most` that wait already, whoever has more than this owner gives up its last; False if nobody has."""
        own = self._of.get(owner, {})
        if thing in own:
            return True
        if self._count >= most:
            richest = max(self._of, key=lambda other: len(self._of[other]), default=owner)
            if len(self._of.get(richest, ())) <= len(own) + 1:
                return False
            self._of[richest].popitem()
            self._count -= 1
        self._of.setdefault(owner, own)[thing] = None
        self._count += 1
        return True

    def first(self) -> tuple[str, T]:
        """Whose turn it is, and with what. There must be something."""
        owner, own = next(iter(self._of.items()))
        return owner, next(iter(own))

    def take(self) -> None:
        """Let go of the first, whose owner has the last turn from now on."""
        owner, thing = self.first()
        own = self._of.pop(owner)
        del own[thing]
        self._count -= 1
        if own:
            self._of[owner] = own

    def forget(self, owner: str) -> None:
        """Let go of all that an owner has waiting."""
        self._count -= len(self._of.pop(owner, ()))

    def clear(self) -> None:
        """Let go of everything."""
        self._of.clear()
        self._count = 0
