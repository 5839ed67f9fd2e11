"""Prompts of real text, cut to a number of tokens."""

from functools import lru_cache

from tests.engines.vllm.engine_process import MODEL, ROOT


@lru_cache
def _tokens(name: str) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    text = "".join((ROOT / part).read_text() for part in name.split("+"))
    return tuple(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids)


def prompt(name: str, tokens: int, start: int = 0) -> list[int]:
    """So many tokens of files of this repository, joined by `+`."""
    found = list(_tokens(name)[start : start + tokens])
    assert len(found) == tokens, f"{name} has only {len(_tokens(name))} tokens"
    return found
