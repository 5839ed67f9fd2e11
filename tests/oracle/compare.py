"""Runs a sequence of steps on the oracle and on kvstore's tree, and compares all that both can be asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from tests.oracle.content import Content, Setting, after_insert, is_known_fault, masks, usable
from tests.oracle.mirrored_tree import MirroredTree
from tests.oracle.steps import Evict, Insert, Lock, Query, QueryAll, Step, Unlock


class Cache(Protocol):
    """What is compared with: SGLang's cache, or the model in its place."""

    def reset(self) -> None: ...
    def insert(self, tokens: bytes, first_window: int, *, reuse: bool) -> int: ...
    def longest(self, tokens: bytes) -> int: ...
    def usable(self, tokens: bytes) -> set[int]: ...
    def full_pages(self, tokens: bytes) -> int: ...
    def evict(self, kind: str, pages: int) -> None: ...
    def lock(self, tokens: bytes) -> int: ...
    def unlock(self, which: int, *, only_window: bool) -> int | None: ...
    def content(self) -> Content: ...
    def check(self) -> None: ...
    def drain(self) -> None: ...


class LookUp(Protocol):
    """A second thing to compare with: a look-up of boundaries over stored pages, from any page on."""

    def hold(self, content: Content) -> None: ...
    def usable(self, tokens: bytes, first: int) -> set[int]: ...


@dataclass(slots=True)
class Tally:
    """What was done and compared. `short` counts longest boundaries behind which more full pages were there: the rule at work."""

    sequences: int = 0
    steps: int = 0
    longest: int = 0
    short: int = 0
    boundaries: int = 0
    inserts: int = 0
    evictions: int = 0
    stored_boundaries: int = 0
    known_faults: int = 0

    def add(self, other: "Tally") -> None:
        """Sum up."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    @property
    def comparisons(self) -> int:
        """Answers compared."""
        return self.longest + self.boundaries + self.stored_boundaries


@dataclass
class Disagreement(Exception):
    """Two of the three differ: the rule in plain form, kvstore, the oracle."""

    kind: str
    step: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.detail}"


@dataclass(slots=True)
class Comparison:
    """One sequence on both sides. `rule` is what kvstore goes by: the setting, unless something is to go wrong."""

    cache: Cache
    setting: Setting
    rule: Setting
    look_up: LookUp | None = None
    tally: Tally = field(default_factory=Tally)
    content: Content = field(default_factory=dict)
    at: int = 0

    def run(self, steps: Sequence[Step]) -> Tally:
        """Run the steps from an empty start; raises Disagreement, AssertionError from either side's own check, or what a side raises."""
        self.cache.reset()
        tree = MirroredTree(self.rule)
        for step in steps:
            self._step(step, tree)
            self.at += 1
        self.tally.steps += self.at
        self._compare_stored([s.tokens for s in steps if isinstance(s, QueryAll)], tree)
        self.cache.drain()
        self.tally.sequences += 1
        return self.tally

    def _step(self, step: Step, tree: MirroredTree) -> None:
        match step:
            case Query():
                self._compare_longest(step.tokens, tree)
                return
            case QueryAll():
                self._compare_all(step.tokens, tree)
            case Insert():
                self._insert(step)
            case Evict():
                self.cache.evict(step.kind, step.pages)
                self.tally.evictions += 1
            case Lock():
                if pages := self.cache.lock(step.tokens):
                    tree.pin(step.tokens, pages)
            case Unlock():
                if (gone := self.cache.unlock(step.which, only_window=step.only_window)) is not None:
                    tree.unpin(gone)
        self.cache.check()
        self.content = self.cache.content()
        tree.follow(self.content)
        tree.check()

    def _insert(self, step: Insert) -> None:
        """What an insert leaves behind is foretold, not only mirrored."""
        first_window = self.setting.pages(step.tokens) - step.windows
        first = self.cache.insert(step.tokens, first_window, reuse=step.reuse)
        expected = after_insert(self.setting, self.content, step.tokens, first, first_window)
        self.tally.inserts += 1
        if (found := self.cache.content()) != expected:
            raise Disagreement("insert", self.at, f"the oracle holds {_difference(self.setting, expected, found)}")

    def _compare_longest(self, tokens: bytes, tree: MirroredTree) -> None:
        found = masks(self.rule, self.content, tokens)
        wanted, ours, theirs = max(usable(self.rule, found)), tree.longest(tokens), self.cache.longest(tokens)
        self.tally.longest += 1
        self.tally.short += 0 < wanted < len(found)
        full = (len(found), tree.full_pages(tokens), self.cache.full_pages(tokens))
        if len(set(full)) > 1:
            raise Disagreement("full pages", self.at, "rule {}, kvstore {}, oracle {}".format(*full))
        if not wanted == ours == theirs:
            raise Disagreement("longest", self.at, f"rule {wanted}, kvstore {ours}, oracle {theirs}; optional parts {found}")

    def _compare_all(self, tokens: bytes, tree: MirroredTree) -> None:
        found = masks(self.rule, self.content, tokens)
        wanted, ours, theirs = usable(self.rule, found), tree.usable(tokens), self.cache.usable(tokens)
        self.tally.boundaries += self.setting.pages(tokens) + 1
        if not wanted == ours == theirs:
            raise Disagreement("boundaries", self.at, f"rule {wanted}, kvstore {ours}, oracle {theirs}; optional parts {found}")

    def _compare_stored(self, prompts: Sequence[bytes], tree: MirroredTree) -> None:
        """Ask the look-up for the boundaries behind every page of the prompts."""
        if self.look_up is None:
            return
        self.look_up.hold(self.content)
        for tokens in prompts:
            found = masks(self.rule, self.content, tokens)
            ours = tree.usable(tokens)
            for first in range(len(found)):
                theirs = self.look_up.usable(tokens, first)
                wanted = {b for b in ours if b > first}
                faults = {b for b in theirs - wanted if is_known_fault(self.rule, found, b, first)}
                self.tally.stored_boundaries += len(found) - first
                self.tally.known_faults += len(faults)
                if wanted != theirs - faults:
                    detail = f"from page {first}: kvstore {wanted}, oracle {theirs}; optional parts {found}"
                    raise Disagreement("stored boundaries", self.at, detail)


def _difference(setting: Setting, expected: Content, found: Content) -> str:
    wrong = [p for p in expected.keys() | found.keys() if expected.get(p) != found.get(p)]
    first = min(wrong, key=len)
    return f"{found.get(first)} at page {setting.pages(first) - 1} of a path, not {expected.get(first)} ({len(wrong)} pages differ)"


def failure(comparison: Comparison, steps: Sequence[Step]) -> tuple[str, str] | None:
    """Run the steps. None if they pass, else the kind of the failure and all about it."""
    try:
        comparison.run(steps)
    except Disagreement as found:
        return found.kind, str(found)
    except AssertionError as found:
        return "check", f"check at step {comparison.at}: {found}"
    except Exception as found:  # noqa: BLE001  (whatever either side raises is a finding, to be shrunk like any other)
        return type(found).__name__, f"{type(found).__name__} at step {comparison.at}: {found}"
    return None
