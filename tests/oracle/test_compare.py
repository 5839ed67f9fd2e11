"""kvstore's tree against the plain rule on random sequences, and the comparison itself: it must be able to fail. No SGLang here."""

from dataclasses import replace

import pytest

from tests.oracle.compare import Comparison, Tally, failure
from tests.oracle.content import STATE, WINDOW, Content, Setting, is_known_fault, masks, usable
from tests.oracle.model_cache import ModelCache
from tests.oracle.steps import Insert, Step, make_steps, shrink

SETTINGS = [
    Setting(2, 0, False, "model"),
    Setting(1, 3, False, "model"),
    Setting(4, 10, False, "model"),
    Setting(4, 13, False, "model"),
    Setting(2, 0, True, "model"),
    Setting(2, 5, True, "model"),
]
HYBRID = SETTINGS[-1]


class RootlessLookUp:
    """A look-up with the known fault: it takes the page it begins at for the root. With `blind` it does not ask for states either."""

    def __init__(self, setting: Setting, *, blind: bool = False) -> None:
        self.setting = setting
        self.rule = replace(setting, state=False) if blind else setting

    def hold(self, content: Content) -> None:
        self.content = content

    def usable(self, tokens: bytes, first: int) -> set[int]:
        found = masks(self.setting, self.content, tokens)
        return {first + b for b in usable(self.rule, found[first:]) if b}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_the_tree_agrees_with_the_plain_rule(setting: Setting) -> None:
    total = Tally()
    for number in range(8):
        total.add(Comparison(ModelCache(setting), setting, setting).run(make_steps(setting, f"suite/{number}")))
    assert total.longest > 200
    assert (total.short > 5) == (setting.window > 0 or setting.state), "the rule had nothing to do"


def test_a_wrong_rule_is_found_out_and_shrunk() -> None:
    setting = SETTINGS[2]

    def one_page_short(setting: Setting, found: list[int]) -> set[int]:
        return usable(replace(setting, window=setting.window - setting.page_tokens), found)

    def fails(steps: list[Step]) -> bool:
        return failure(Comparison(ModelCache(setting, one_page_short), setting, setting), steps) is not None

    steps = next(steps for number in range(50) if fails(steps := make_steps(setting, f"wrong/{number}")))
    least = shrink(setting, steps, fails)
    assert fails(least)
    assert len(least) == 2, "an insert and a query are enough"
    assert isinstance(least[0], Insert)
    assert not any(fails([step]) for step in least)


def test_the_known_fault_is_left_out_and_counted() -> None:
    setting, total = SETTINGS[3], Tally()
    for number in range(8):
        total.add(Comparison(ModelCache(setting), setting, setting, RootlessLookUp(setting)).run(make_steps(setting, f"fault/{number}")))
    assert 0 < total.known_faults < total.stored_boundaries


def test_nothing_but_the_known_fault_is_left_out() -> None:
    look_up = RootlessLookUp(HYBRID, blind=True)
    sequences = [make_steps(HYBRID, f"blind/{number}") for number in range(8)]
    failures = [failure(Comparison(ModelCache(HYBRID), HYBRID, HYBRID, look_up), steps) for steps in sequences]
    assert {kind for kind, _ in filter(None, failures)} == {"stored boundaries"}


def test_what_the_known_fault_is() -> None:
    setting = Setting(4, 10, False, "model")  # needs three pages
    found = [WINDOW, 0, WINDOW, WINDOW, WINDOW, WINDOW]
    assert is_known_fault(setting, found, 4, 2)
    assert not is_known_fault(setting, found, 4, 1), "page 1 has no window: it was to be seen"
    assert not is_known_fault(setting, found, 5, 2), "three pages are w"
    assert not is_known_fault(setting, found, 1, 0), "the root is sound"
    with_state = replace(setting, state=True)
    assert not is_known_fault(with_state, found, 4, 2), "the state is missing too"
    assert is_known_fault(with_state, [*found[:3], WINDOW | STATE], 4, 2)
