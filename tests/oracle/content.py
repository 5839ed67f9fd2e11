"""What a cache holds, and the match rule in its plainest form: the third party when a tree and the oracle disagree.

Nothing of kvstore's rule is used here. Tokens are uint32, little-endian, as bytes: the prefix after b pages is a slice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

WINDOW = 1
STATE = 2

Prefix = bytes
"""The tokens of a path from the root, whole pages. It stands for its last page."""

Content = dict[Prefix, int]
"""Every page there is (a page has its `full` parts, or is not), and which optional parts it has: WINDOW, STATE."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of tree. `window` is w in tokens, 0 for a model without; `core` is the oracle's tree: python or rust."""

    page_tokens: int
    window: int
    state: bool
    core: str

    @property
    def page_bytes(self) -> int:
        """Bytes of the tokens of a page."""
        return 4 * self.page_tokens

    @property
    def name(self) -> str:
        """What the report calls it."""
        kinds = ["full"] + [f"window({self.window})"] * bool(self.window) + ["state"] * self.state
        return f"{'+'.join(kinds)}, pages of {self.page_tokens}, {self.core} tree"

    def pages(self, tokens: bytes) -> int:
        """Whole pages in a run of tokens."""
        return len(tokens) // self.page_bytes

    def prefixes(self, tokens: bytes) -> Iterator[Prefix]:
        """The prefixes of the tokens, one a page."""
        return (tokens[:end] for end in range(self.page_bytes, len(tokens) + 1, self.page_bytes))


def masks(setting: Setting, content: Content, tokens: bytes) -> list[int]:
    """The optional parts of the pages of the longest prefix there is."""
    found = []
    for prefix in setting.prefixes(tokens):
        if prefix not in content:
            break
        found.append(content[prefix])
    return found


def usable(setting: Setting, found: list[int]) -> set[int]:
    """The boundaries of a path that can be used, by the rule: for a window the last w tokens, for a state the last page; 0 always."""
    return {b for b in range(len(found) + 1) if _window_is_there(setting, found, b) and _state_is_there(setting, found, b)}


def _window_is_there(setting: Setting, found: list[int], boundary: int) -> bool:
    first_token = max(boundary * setting.page_tokens - setting.window, 0)
    return not setting.window or all(found[p] & WINDOW for p in range(first_token // setting.page_tokens, boundary))


def _state_is_there(setting: Setting, found: list[int], boundary: int) -> bool:
    return not setting.state or boundary == 0 or bool(found[boundary - 1] & STATE)


def is_known_fault(setting: Setting, found: list[int], boundary: int, first: int) -> bool:
    """Whether accepting this boundary in a look-up from page `first` on is the oracle's known fault, and nothing else.

    The fault: all pages from `first` to the boundary have their windows, but they are fewer than w tokens, and `first` is not the root.
    """
    if not setting.window or first == 0 or not _state_is_there(setting, found, boundary):
        return False
    run = found[first:boundary]
    return len(run) * setting.page_tokens < setting.window and all(parts & WINDOW for parts in run)


def after_insert(setting: Setting, before: Content, tokens: bytes, first: int, first_window: int) -> Content:
    """What there is after an insert of `tokens` whose own pages begin at `first` and have windows from `first_window` on."""
    after = dict(before)
    for page, prefix in enumerate(setting.prefixes(tokens)):
        after.setdefault(prefix, 0)
        if setting.window and page >= max(first, first_window):
            after[prefix] |= WINDOW
    if setting.state and tokens:
        after[tokens] |= STATE
    return after
