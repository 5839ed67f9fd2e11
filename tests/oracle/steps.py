"""Random sequences of steps, made up front from a seed, so that any part of a sequence can be run again by itself."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.oracle.content import Setting

FULL_KIND, WINDOW_KIND, STATE_KIND = "full", "window", "state"


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert whole pages, with windows on the last `windows` of them and a state at the end.

    `reuse`: as an engine does, match first and bring only what is behind the match; otherwise bring all pages anew.
    """

    tokens: bytes
    windows: int
    reuse: bool


@dataclass(frozen=True, slots=True)
class Query:
    """Compare the longest usable boundary of a prompt, which may end within a page."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class QueryAll:
    """Compare all usable boundaries of a prompt."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class Evict:
    """Have one component give up so many pages (states: so many states), the least recent first."""

    kind: str
    pages: int


@dataclass(frozen=True, slots=True)
class Lock:
    """Match a prompt and lock what was found."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class Unlock:
    """Undo a lock. With `only_window`, the window's part of it, as decode does when its window has moved on."""

    which: int
    only_window: bool


Step = Insert | Query | QueryAll | Evict | Lock | Unlock
_QUERIES_A_STEP = 3


class _Maker:
    """Prompts that share prefixes: most go on from a cut of an earlier one, over an alphabet of two or three tokens."""

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self.setting = setting
        self.rng = rng
        self.alphabet = rng.choice((2, 2, 3))
        self.known: list[tuple[int, ...]] = [()]

    def _cut(self) -> tuple[int, ...]:
        prompt = self.rng.choice(self.known)
        pages = len(prompt) // self.setting.page_tokens
        return prompt[: self.rng.randint(0, pages) * self.setting.page_tokens] if self.rng.random() < 0.7 else prompt

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, 1 + self.alphabet) for _ in range(count))

    def insert(self) -> Insert:
        prompt = self._cut() + self._tokens(self.rng.randint(0, 6) * self.setting.page_tokens)
        prompt = prompt or self._tokens(self.setting.page_tokens)
        self.known.append(prompt)
        pages = len(prompt) // self.setting.page_tokens
        windows = pages if self.rng.random() < 0.3 else self.rng.randint(0, pages)
        return Insert(_encode(prompt), windows, self.rng.random() < 0.5)

    def prompt(self) -> bytes:
        prompt = self.rng.choice(self.known)
        if self.rng.random() < 0.5:
            prompt = prompt[: self.rng.randint(0, len(prompt))]
        if self.rng.random() < 0.5:
            prompt += self._tokens(self.rng.randint(1, 2 * self.setting.page_tokens))
        return _encode(prompt)

    def change(self) -> Step:
        kinds = [FULL_KIND] + [WINDOW_KIND] * 2 * bool(self.setting.window) + [STATE_KIND] * 2 * self.setting.state
        draw = self.rng.random()
        if draw < 0.42:
            return self.insert()
        if draw < 0.75:
            return Evict(self.rng.choice(kinds), self.rng.randint(1, 5))
        if draw < 0.88:
            return Lock(self.prompt())
        return Unlock(self.rng.randrange(8), self.rng.random() < 0.3)


def _encode(prompt: tuple[int, ...]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


def make_steps(setting: Setting, seed: str) -> list[Step]:
    """The sequence of a seed: 10 to 30 changes, each followed by a few queries."""
    rng = random.Random(seed)
    maker = _Maker(setting, rng)
    steps: list[Step] = [maker.insert()]
    for _ in range(rng.randint(10, 30)):
        steps.append(maker.change())
        steps.extend(Query(maker.prompt()) for _ in range(_QUERIES_A_STEP))
        if rng.random() < 0.1:
            steps.append(QueryAll(maker.prompt()))
    steps.extend(QueryAll(maker.prompt()) for _ in range(_QUERIES_A_STEP))
    return steps


def shrink(setting: Setting, steps: Sequence[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """A part of a failing sequence that still fails, from which no step and no last page of a prompt can be left out."""
    best = list(steps)
    changed = True
    while changed:
        changed = False
        size = len(best)
        while size:
            at = len(best) - size
            while at >= 0:
                shorter = best[:at] + best[at + size :]
                if len(shorter) < len(best) and fails(shorter):
                    best, changed = shorter, True
                at -= size
            size //= 2
        for at, step in enumerate(best):
            while (smaller := _one_page_less(setting, step)) is not None and fails([*best[:at], smaller, *best[at + 1 :]]):
                best[at] = step = smaller
                changed = True
    return best


def _one_page_less(setting: Setting, step: Step) -> Step | None:
    if isinstance(step, (Evict, Unlock)):
        return None
    pages = setting.pages(step.tokens)
    least = 1 if isinstance(step, Insert) else 0
    if pages <= least:
        return None
    tokens = step.tokens[: (pages - 1) * setting.page_bytes]
    if isinstance(step, Insert):
        return replace(step, tokens=tokens, windows=min(step.windows, pages - 1))
    return replace(step, tokens=tokens)


def describe(step: Step) -> str:
    """A step as one can read it in a report: tokens as a list."""
    if isinstance(step, (Evict, Unlock)):
        return repr(step)
    tokens = np.frombuffer(step.tokens, "<u4").tolist()
    more = f", windows={step.windows}, reuse={step.reuse}" if isinstance(step, Insert) else ""
    return f"{type(step).__name__}({tokens}{more})"
