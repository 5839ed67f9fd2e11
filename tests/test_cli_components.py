"""Components as they are written on a command line."""

import pytest

from kvstore.cli.components import component_of
from kvstore.errors import BadRequest
from kvstore.kvspec import Component

SHAPE: dict[str, int | str | None] = {"kv_heads": 2, "head_dim": 64, "dtype": "bf16", "planes": 2}


def test_what_is_left_out_is_as_the_options_say() -> None:
    assert component_of("window,layers=24,window=1024", SHAPE) == Component("window", 24, 2, 64, window=1024)
    said = component_of("state, layers = 3,kv-heads=1,head_dim=9,planes=1,dtype=f32", SHAPE)
    assert said == Component("state", 3, 1, 9, "f32", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window,layers=2", "window is 0: it must be set"),
        ("state,layers=2,window=5", "it must be set for a window component, and only there"),
        ("states,layers=2", "it begins with its kind, one of full, window, state, not with 'states'"),
        ("state,layers", "'layers' is not KEY=VALUE with one of layers, kv-heads"),
        ("state,heads=3", "'heads=3' is not KEY=VALUE"),
        ("state,layers=two", "layers is 'two', not a whole number"),
        ("state,layers=2,layers=3", "layers is given twice"),
        ("state,layers=2,dtype=f31", "dtype 'f31' is not one of"),
        ("state,layers=0", "layers is 0, not 1 to"),
        ("state,planes=1", "it lacks layers"),
        ("", "it begins with its kind"),
        ("full:2", "it begins with its kind, one of full, window, state, not with 'full:2'"),
    ],
)
def test_what_is_no_component_is_said(text: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        component_of(text, SHAPE)
    assert caught.value.message.startswith(f"--component {text}: ")
    assert words in caught.value.message
    with pytest.raises(BadRequest, match="it lacks layers, kv-heads, head-dim:"):
        component_of("full,planes=1", {})
