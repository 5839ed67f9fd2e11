"""kvstore's tree, brought to hold what the oracle holds, and asked with kvstore's own rule."""

import numpy as np

from kvstore.digests import NO_EXTRA, page_key_chain
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.radix.check import check
from kvstore.radix.components import ComponentRules
from kvstore.radix.tree import RadixTree
from kvstore.radix.values import NewPages
from tests.oracle.content import STATE, WINDOW, Content, Prefix, Setting

ROOT_KEY = b"oracle".ljust(32, b".")
CAPACITY = 4096


class MirroredTree:
    """One RadixTree. It changes only through `follow`, `pin` and `unpin`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        components = [Component("full", layers=2, kv_heads=1, head_dim=1)]
        if setting.window:
            components.append(Component("window", layers=1, kv_heads=1, head_dim=1, window=setting.window))
        if setting.state:
            components.append(Component("state", layers=1, kv_heads=1, head_dim=1))
        spec = KVSpec(setting.page_tokens, tuple(components))
        optional = [WINDOW] * bool(setting.window) + [STATE] * setting.state
        self._bit = {part: 1 << index for index, part in enumerate(optional, start=1)}
        self._optional_ranges = tuple(spec.whole(index) for index in range(1, len(components)))
        self._ranges = (PartRange(0, 0, 1, 0, 1), PartRange(0, 1, 2, 0, 1), *self._optional_ranges)
        self._tree = RadixTree(ROOT_KEY, setting.page_tokens, CAPACITY, ComponentRules.of(spec))
        self._content: Content = {}
        self._pins: list[bytes] = []
        self._buries = False

    # --- asking -----------------------------------------------------------------------------------------------------------

    def full_pages(self, tokens: bytes) -> int:
        """Whole pages of the prompt that are there, usable or not."""
        return self._tree.match(tokens).pages

    def longest(self, tokens: bytes) -> int:
        """The longest usable boundary, in pages, as the store finds it. A match from there on must end where the first did."""
        tree = self._tree
        known = tree.match(tokens)
        slots = tree.path_slots(known)
        path = tree.shorten(known, tree.rules.longest(tree.pages.components[slots]))
        assert tree.path_slots(path).tolist() == slots[: path.pages].tolist(), "a path was not shortened to its first pages"
        if path.pages:
            base = tree.path_to(tree.pages.find_key(tree.key_at(path)))
            rest = tree.match(tokens[path.pages * self.setting.page_bytes :], {}, base)
            assert tree.path_slots(rest).tolist() == slots.tolist(), "a match from a boundary on ends elsewhere"
        return path.pages

    def usable(self, tokens: bytes) -> set[int]:
        """All usable boundaries."""
        tree = self._tree
        masks = tree.pages.components[tree.path_slots(tree.match(tokens))]
        return set(np.flatnonzero(tree.rules.usable(masks)).tolist())

    # --- following --------------------------------------------------------------------------------------------------------

    def follow(self, after: Content) -> None:
        """Change the tree to hold `after`: removed, buried, dropped, added and inserted pages and parts."""
        before = self._content
        for prefix in sorted(before.keys() - after.keys(), key=len):
            self._lose(prefix, after)
        for prefix in before.keys() & after.keys():
            if lost := before[prefix] & ~after[prefix]:
                self._tree.take_components(self._slot(prefix), self._component_mask(lost))
            if gained := after[prefix] & ~before[prefix]:
                slot = np.array([self._slot(prefix)], np.int32)
                self._tree.add_parts(slot, self._optional_blobs([gained]), self._optional_ranges)
        new = sorted(after.keys() - before.keys(), key=len)
        while new:
            longest = new[-1]
            self._insert(longest, after)
            new = [prefix for prefix in new if not longest.startswith(prefix)]
        self._content = dict(after)

    def _lose(self, prefix: Prefix, after: Content) -> None:
        """Remove a page that is the first of its path to go, with all below it; every other time it stays as a ghost."""
        parent = prefix[: -self.setting.page_bytes]
        if parent and parent not in after:
            return
        self._buries = not self._buries
        if self._buries:
            self._tree.bury(self._slot(prefix))
        else:
            self._tree.remove(self._slot(prefix))

    def _insert(self, tokens: Prefix, after: Content) -> None:
        base = self._tree.match(tokens)
        wanted = [after[prefix] for prefix in list(self.setting.prefixes(tokens))[base.pages :]]
        blobs = np.concatenate([np.zeros((len(wanted), 2), np.int32), self._optional_blobs(wanted)], axis=1)
        keys = b"".join(self._keys(tokens)[base.pages :])
        self._tree.extend(base, tokens[base.pages * self.setting.page_bytes :], {}, NewPages(keys, b"v" * 16, blobs, self._ranges))

    def _optional_blobs(self, wanted: list[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        columns = [[0 if mask & part else -1 for mask in wanted] for part in self._bit]
        return np.array(columns, np.int32).reshape(len(columns), len(wanted)).T

    def _component_mask(self, parts: int) -> int:
        return sum(bit for part, bit in self._bit.items() if parts & part)

    def _keys(self, tokens: Prefix) -> list[bytes]:
        size = self.setting.page_bytes
        return list(page_key_chain(ROOT_KEY, (tokens[at : at + size] + NO_EXTRA for at in range(0, len(tokens), size))))

    def _slot(self, prefix: Prefix) -> int:
        slot = self._tree.pages.find_key(self._keys(prefix)[-1])
        assert slot >= 0, "a page that was put is not in the tree"
        return slot

    def pin(self, tokens: bytes, pages: int) -> None:
        """Lease the first pages of a prompt: from now on they may not go."""
        path = self._tree.match(tokens[: pages * self.setting.page_bytes])
        assert path.pages == pages, "what the oracle locked is not in the tree"
        self._pins.append(self._tree.pin(path))

    def unpin(self, which: int) -> None:
        """Undo a lease."""
        self._tree.unpin(self._pins.pop(which))

    def check(self) -> None:
        """kvstore's own check of its invariants, and that the tree holds what it was told; raises AssertionError."""
        check(self._tree)
        assert self._tree.page_count == len(self._content), "the tree holds other pages than it was told"
        for prefix, parts in self._content.items():
            mask = int(self._tree.pages.components[self._slot(prefix)])
            assert mask == 1 | self._component_mask(parts), f"a page has the components {mask:b}, not what it was given"
