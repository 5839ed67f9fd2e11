"""The scheduler's side of the vLLM connector: what can be loaded, what is to be saved. It moves no KV."""

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_connectors.vllm_keys import AdapterDigests, request_extras, tokens_of
from kvstore_connectors.vllm_link import StoreLink
from kvstore_connectors.vllm_lookup import Lookup
from kvstore_connectors.vllm_metadata import BlockIds, Load, Save, Step

log = logging.getLogger("vllm.kvstore_connectors")

_PUT_ID_BYTES = 16


@dataclass(slots=True)
class Tracked:
    """A request that has blocks: how far its pages are in the store, or on their way. None for extras: it shares nothing."""

    request: Any
    extras: dict[int, bytes] | None
    saved: int
    tokens: bytearray = field(default_factory=bytearray)
    load: Lookup | None = None
    """Whose lease is held while its pages are being loaded."""
    not_before: float = 0.0
    """When pages that could not be saved may be tried again."""

    def prefix(self, count: int) -> bytes:
        """The first `count` token ids; those that were asked for before are kept."""
        have = len(self.tokens) // 4
        if have < count:
            self.tokens += np.array(self.request.all_token_ids[have:count], np.uint32).tobytes()
        return bytes(self.tokens[: 4 * count])


class SchedulerSide:
    """Used from the scheduler's thread only."""

    def __init__(self, link: StoreLink, *, layerwise: bool) -> None:
        self._link = link
        self._page_tokens = link.spec.page_tokens
        self.layerwise = layerwise
        self._adapters = AdapterDigests()
        self._lookups: dict[str, Lookup] = {}
        self._local: dict[str, int] = {}
        """Tokens that the engine itself had of a request when it was last looked up."""
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._waited = 0.0
        """How long this step has waited for look-ups: all of its requests together wait `lookup_wait_s` at most."""
        self._computing: list[str] = []
        """Requests whose forward pass runs while they are loading."""
        self._loaded: dict[str, int] = {}
        """Requests that were loaded once, and how often they had been preempted then: a load that failed is not tried again."""

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded now; None while that is being looked up.

        The last token is always computed, as the engine does with its own cache: its logits are wanted. What the engine has itself is
        looked up, too, so that it is known what is to be saved; but nobody waits for that.
        """
        settings, name = self._link.settings, request.request_id
        pages = (request.num_tokens - 1) // self._page_tokens
        self._local[name] = computed
        if self._loaded.get(name) == request.num_preemptions:
            return 0
        if not settings.read or not pages or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if self._link.resting and name not in self._lookups:
            return 0
        lookup = self._lookups.get(name)
        if lookup is not None and (lookup.pages != pages or lookup.stale):
            self._drop_lookup(name)
            lookup = None
        if lookup is None:
            extras = request_extras(request, self._page_tokens, self._adapters)
            if extras is None:
                return 0
            tokens = tokens_of(request, pages * self._page_tokens).tobytes()
            wanted = {page: extra for page, extra in extras.items() if page < pages}
            lookup = self._lookups[name] = Lookup(self._link, tokens, pages, wanted)
        started = time.monotonic()
        found = lookup.poll(max(settings.lookup_wait_s - self._waited, 0.0))
        self._waited += time.monotonic() - started
        if pages * self._page_tokens <= computed:
            return 0
        return None if found is None else max(found.pages * self._page_tokens - computed, 0)

    def _drop_lookup(self, name: str) -> None:
        lookup = self._lookups.pop(name, None)
        if lookup is not None:
            lookup.release()

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        """The request has its blocks, and `external` tokens are to be loaded into them."""
        name = request.request_id
        lookup = self._lookups.pop(name, None)
        tracked = self._tracked.get(name)
        if external == 0:
            if tracked is None or lookup is not None:
                self._track(request, lookup)
            if lookup is not None:
                lookup.release()
            return
        assert lookup is not None, "tokens are to be loaded that nobody looked up"
        tracked = self._track(request, lookup)
        tracked.load = lookup
        self._loaded[name] = request.num_preemptions
        first = self._local[name] // self._page_tokens
        last = (self._local[name] + external) // self._page_tokens
        self._loads.append(
            Load(
                name, lookup.tokens[: last * self._page_tokens * 4], {p: e for p, e in lookup.extras.items() if p < last}, first, last,
                _blocks(blocks, first, last), self.layerwise,
            )
        )  # fmt: skip

    def _track(self, request: Any, lookup: Lookup | None) -> Tracked:
        """Begin to follow a request; anew after it was preempted.

        If the store has not said what it has, what the engine has itself is taken for saved: if it is not, the first put will tell.
        """
        name = request.request_id
        old = self._tracked.get(name)
        if old is not None:
            self._end_load(old)
        extras = request_extras(request, self._page_tokens, self._adapters)
        found = lookup.poll(0) if lookup is not None else None
        saved = found.pages if found is not None and found.asked else self._local.get(name, 0) // self._page_tokens
        tracked = self._tracked[name] = Tracked(request, extras, saved)
        return tracked

    def step(self, output: Any) -> Step:
        """What the workers are to load and save in a step."""
        step = Step(self._link.name, self._link.fingerprint, self._loads, idle=output.total_num_scheduled_tokens == 0)
        self._loads, self._waited = [], 0.0
        self._computing += [load.request for load in step.loads if load.layerwise]
        for name in output.preempted_req_ids or ():
            if (tracked := self._tracked.get(name)) is not None:
                self._end_load(tracked)
        if self._link.settings.write and not self._link.resting:
            for name, scheduled in output.num_scheduled_tokens.items():
                if (save := self._save(name, scheduled, output.kv_connector_block_state)) is not None:
                    step.saves.append(save)
        return step

    def _save(self, name: str, scheduled: int, block_state: Any) -> Save | None:
        """The pages of a request that this step completes, if their tokens are known: drafts and tokens in flight are not."""
        tracked = self._tracked.get(name)
        if block_state is None or tracked is None or tracked.extras is None or time.monotonic() < tracked.not_before:
            return None
        request = tracked.request
        pages = min(request.num_computed_tokens + scheduled, request.num_tokens) // self._page_tokens
        if pages <= tracked.saved:
            return None
        blocks = block_state.get_block_ids(name)
        if blocks is None:
            return None
        first, tracked.saved = tracked.saved, pages
        extras = {page: extra for page, extra in tracked.extras.items() if page < pages}
        tokens = tracked.prefix(pages * self._page_tokens)
        return Save(name, tokens, extras, first, pages, _blocks(blocks, first, pages), secrets.token_bytes(_PUT_ID_BYTES))

    def loaded(self, names: Iterable[str]) -> None:
        """Loads that are over, well or not: their leases are not needed any more."""
        computed, self._computing = self._computing, []
        for name in (*names, *computed):
            if (tracked := self._tracked.get(name)) is not None:
                self._end_load(tracked)

    def not_saved(self, pages: dict[str, int]) -> None:
        """Requests of which the pages from one on are not in the store after all: they are tried again with later ones, after a while."""
        for name, page in pages.items():
            if (tracked := self._tracked.get(name)) is not None:
                tracked.saved = min(tracked.saved, page)
                tracked.not_before = time.monotonic() + self._link.settings.retry_s

    def finished(self, request: Any) -> None:
        """A request is over: done, failed or aborted."""
        name = request.request_id
        self._drop_lookup(name)
        self._local.pop(name, None)
        self._loaded.pop(name, None)
        if (tracked := self._tracked.pop(name, None)) is not None:
            self._end_load(tracked)

    @staticmethod
    def _end_load(tracked: Tracked) -> None:
        load, tracked.load = tracked.load, None
        if load is not None:
            load.release()


def _blocks(blocks: tuple[list[int], ...], first: int, last: int) -> BlockIds:
    """The blocks of the pages [first, last) in each group."""
    return tuple(np.array(of_group[first:last], np.int64) for of_group in blocks)
