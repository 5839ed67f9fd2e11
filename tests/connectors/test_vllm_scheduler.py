"""The scheduler's side of the vLLM connector against a real daemon; requests are plain values with the fields that vLLM's have."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client import BadRequest, Client, Component, Conflict, KVSpec, extra_digest, fingerprint_revision
from kvstore_client.blocking import Namespace
from kvstore_connectors.vllm_keys import AdapterDigests, media_pages, request_extras
from kvstore_connectors.vllm_link import Breaker, StoreLink
from kvstore_connectors.vllm_scheduler import SchedulerSide
from kvstore_connectors.vllm_settings import Settings
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.link import Link

PAGE = 4
SPEC = KVSpec(page_tokens=PAGE, components=(Component("full", layers=2, kv_heads=1, head_dim=8, planes=1),))
MODEL = fingerprint_revision("test", "v1")


@dataclass
class Request:
    """A request, as far as the connector looks at one."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    prompt_embeds: None = None
    pooling_params: None = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def output(scheduled: dict[str, int], blocks: dict[str, list[int]], preempted: tuple[str, ...] = ()) -> Any:
    """A step of vLLM's scheduler."""
    state = SimpleNamespace(get_block_ids=lambda name: (blocks[name],) if name in blocks else None)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()), preempted_req_ids=set(preempted),
        kv_connector_block_state=state,
    )  # fmt: skip


class Side:
    """A scheduler's side, and its namespace seen from outside."""

    def __init__(self, endpoint: str, client: Client, name: str, **settings: Any) -> None:
        model = fingerprint_revision(name, "v1")
        self.link = StoreLink(Settings(endpoint=endpoint, **settings), name=name, fingerprint=model, spec=SPEC, who="test")
        self.side = SchedulerSide(self.link, layerwise=False)
        self.namespace: Namespace = client.namespace(name, model, SPEC)

    def put(self, tokens: list[int], extras: dict[int, bytes] | None = None) -> None:
        array = np.array(tokens, np.uint32)
        self.namespace.put(array, np.zeros(len(tokens) // PAGE * SPEC.page_bytes, np.uint8), extras=extras)

    def matched(self, request: Request, computed: int = 0) -> int:
        """What is matched, once it is known."""
        end = time.monotonic() + 20
        while (found := self.side.matched_tokens(request, computed)) is None:
            assert time.monotonic() < end
        return found

    def settle(self, request: Request) -> None:
        """Ask again until the look-up, for which nobody waits, has its answer."""
        end = time.monotonic() + 20
        while self.side._lookups[request.request_id].poll(0.01) is None:
            assert time.monotonic() < end

    def leased(self, tokens: list[int]) -> bool:
        """Whether somebody holds a lease on the prefix. Deletes it, if not."""
        try:
            self.namespace.delete(np.array(tokens, np.uint32))
        except Conflict:
            return True
        return False

    def released(self, tokens: list[int]) -> bool:
        """Whether the lease on the prefix ends, given a moment."""
        end = time.monotonic() + 20
        while self.leased(tokens):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


@pytest.fixture
def side(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Side]:
    with Client(daemon.endpoint, shared_memory=False) as client:
        made = Side(daemon.endpoint, client, re.sub(r"\W+", "-", request.node.name))
        yield made
        made.link.close()


PROMPT = list(range(100, 122))
"""22 tokens: 5 pages and a bit."""


def test_what_is_there_is_matched_again_and_again(side: Side) -> None:
    side.put(PROMPT[:12])
    asked = Request("a", PROMPT)
    assert [side.matched(asked) for _ in range(3)] == [12, 12, 12]
    assert side.matched(asked, 8) == 4
    assert side.matched(asked, 12) == 0
    assert side.leased(PROMPT[:12])
    side.side.finished(asked)
    assert side.released(PROMPT[:12])


def test_the_last_token_is_always_computed(side: Side) -> None:
    side.put(PROMPT[:20])
    assert side.matched(Request("a", PROMPT[:20])) == 16
    assert side.matched(Request("b", PROMPT[:21])) == 20


def test_a_load_keeps_its_lease_until_it_is_over(side: Side) -> None:
    side.put(PROMPT[:12])
    asked = Request("a", PROMPT)
    assert side.matched(asked, 4) == 8
    side.side.allocated(asked, ([7, 8, 9, 10, 11, 12],), 8)
    step = side.side.step(output({}, {}))
    (load,) = step.loads
    assert (load.first, load.last, load.blocks[0].tolist(), step.idle) == (1, 3, [8, 9], True)
    assert np.frombuffer(load.tokens, np.uint32).tolist() == PROMPT[:12]
    assert side.leased(PROMPT[:12])
    side.side.loaded(["a"])
    assert side.released(PROMPT[:12])
    assert side.matched(asked) == 0, "what was loaded once, and failed, is not loaded again"
    asked.num_preemptions = 1
    side.put(PROMPT[:12])
    assert side.matched(asked) == 12


@pytest.mark.parametrize("ending", ["aborted", "preempted", "not needed"])
def test_leases_end(side: Side, ending: str) -> None:
    side.put(PROMPT[:12])
    asked = Request("a", PROMPT)
    assert side.matched(asked) == 12
    assert side.leased(PROMPT[:12])
    if ending == "not needed":
        side.side.allocated(asked, ([7, 8, 9],), 0)
    else:
        side.side.allocated(asked, ([7, 8, 9],), 12)
        side.side.step(output({}, {}, ("a",) if ending == "preempted" else ()))
        if ending == "aborted":
            side.side.finished(asked)
    assert side.released(PROMPT[:12])


def test_only_whole_pages_of_known_tokens_are_saved_once(side: Side) -> None:
    side.put(PROMPT[:8])
    asked, blocks = Request("a", PROMPT[:14]), {"a": [1, 2, 3, 4, 5]}
    assert side.matched(asked) == 8
    side.side.allocated(asked, ([1, 2, 3, 4],), 8)
    asked.num_computed_tokens = 8
    (save,) = side.side.step(output({"a": 6}, blocks)).saves
    assert (save.first, save.last, save.blocks[0].tolist()) == (2, 3, [3])
    asked.num_computed_tokens = 14
    asked.all_token_ids.append(7)
    assert not side.side.step(output({"a": 1}, blocks)).saves
    asked.num_computed_tokens = 15
    assert not side.side.step(output({"a": 4}, blocks)).saves, "drafts that nobody knows to be right"
    asked.all_token_ids += [8, 9]
    (save,) = side.side.step(output({"a": 1}, blocks)).saves
    assert (save.first, save.last, np.frombuffer(save.tokens, np.uint32)[-2:].tolist()) == (3, 4, [7, 8])
    side.side.not_saved({"a": 2})
    asked.num_computed_tokens = 17
    asked.all_token_ids += [1, 2, 3, 4, 5]
    assert not side.side.step(output({"a": 4}, blocks)).saves, "not at once"


@pytest.mark.parametrize(("there", "first"), [(12, 3), (4, 1), (0, 0)])
def test_what_the_engine_has_itself_is_saved_where_the_store_lacks_it(side: Side, there: int, first: int) -> None:
    if there:
        side.put(PROMPT[:there])
    asked = Request("a", PROMPT[:16])
    assert side.matched(asked, 12) == 0
    side.settle(asked)
    side.side.allocated(asked, ([1, 2, 3, 4],), 0)
    asked.num_computed_tokens = 12
    (save,) = side.side.step(output({"a": 4}, {"a": [1, 2, 3, 4]})).saves
    assert (save.first, save.last) == (first, 4)
    if there:
        assert side.released(PROMPT[:there])


def test_what_the_engine_has_itself_is_taken_for_saved_if_nobody_is_asked(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, shared_memory=False) as client:
        side = Side(daemon.endpoint, client, "write-only", read=False)
        asked = Request("a", PROMPT[:16])
        assert side.matched(asked, 12) == 0
        side.side.allocated(asked, ([1, 2, 3, 4],), 0)
        asked.num_computed_tokens = 12
        (save,) = side.side.step(output({"a": 4}, {"a": [1, 2, 3, 4]})).saves
        assert (save.first, save.last) == (3, 4)
        side.link.close()


def test_a_salt_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    adapters = AdapterDigests()
    adapter = SimpleNamespace(lora_name="x", lora_path=str(tmp_path))
    digest = adapters.digest(str(tmp_path))
    assert digest is not None
    salted = request_extras(Request("a", PROMPT, cache_salt=digest), PAGE, adapters)
    adapted = request_extras(Request("b", PROMPT, lora_request=adapter), PAGE, adapters)
    both = request_extras(Request("c", PROMPT, lora_request=adapter, cache_salt="s"), PAGE, adapters)
    assert salted == {0: extra_digest([("cache_salt", digest.encode())])}
    assert len({str(one) for one in (salted, adapted, both, {})}) == 4
    (tmp_path / "adapter.safetensors").write_bytes(b"others!")
    assert request_extras(Request("b", PROMPT, lora_request=adapter), PAGE, adapters) != adapted, "new weights under an old name"
    gone = SimpleNamespace(lora_name="x", lora_path="no/such/folder")
    assert request_extras(Request("b", PROMPT, lora_request=gone), PAGE, adapters) is None


def test_salts_share_nothing(side: Side) -> None:
    extras = request_extras(Request("a", PROMPT, cache_salt="one"), PAGE, AdapterDigests())
    side.put(PROMPT[:12], extras)
    assert side.matched(Request("a", PROMPT, cache_salt="one")) == 12
    assert side.matched(Request("b", PROMPT, cache_salt="two")) == 0
    assert side.matched(Request("c", PROMPT)) == 0


def test_images_are_in_the_labels_of_their_pages() -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=6, length=5), identifier="hash")
    assert media_pages([image], PAGE) == [(1, 2, "hash"), (2, -2, "hash")]


def test_a_slow_look_up_is_not_waited_for_then_a_miss(daemon: DaemonProcess) -> None:
    link = Link(daemon.endpoint)
    with Client(daemon.endpoint, shared_memory=False) as client:
        slow = Side(link.endpoint, client, "slow", shared_memory=False, lookup_timeout_s=1.5, connections=1)
        slow.put(PROMPT[:12])
        assert slow.matched(Request("a", PROMPT)) == 12
        link.delay_s = 6.0
        asked = Request("b", PROMPT)
        assert slow.side.matched_tokens(asked, 0) is None
        assert slow.matched(asked) == 0
        slow.link.close()
    link.close()


def test_a_store_that_is_down_is_a_miss_and_said_once(caplog: pytest.LogCaptureFixture, data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "16MiB") as daemon:
        endpoint = daemon.endpoint
    link = StoreLink(Settings(endpoint=endpoint), name="down", fingerprint=MODEL, spec=SPEC, who="test")
    side = SchedulerSide(link, layerwise=False)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            asked = Request(f"r{number}", PROMPT)
            end = time.monotonic() + 20
            while (found := side.matched_tokens(asked, 0)) is None:
                assert time.monotonic() < end
            assert found == 0
            side.finished(asked)
    assert sum("serving without kvstore" in record.message for record in caplog.records) == 1
    link.close()


def test_a_breaker_forgives_one_slow_call_and_rests_longer_each_time() -> None:
    from kvstore_client import ConnectionLost, DeadlineExceeded

    now = 0.0
    breaker = Breaker("somewhere", 5, lambda: now)
    breaker.failed(DeadlineExceeded("late"))
    assert not breaker.resting
    breaker.failed(DeadlineExceeded("late"))
    assert breaker.resting
    now = 5.0
    assert not breaker.resting
    breaker.failed(ConnectionLost("gone"))
    now = 14.9
    assert breaker.resting
    now = 15.0
    assert not breaker.resting
    breaker.worked()
    breaker.failed(ConnectionLost("gone"))
    now = 20.0
    assert not breaker.resting


@pytest.mark.parametrize("extra", [{"endpiont": "x"}, {"durable": "yes"}, {"lease_s": 0}, {"connections": 1.5}])
def test_settings_that_make_no_sense_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Settings.from_extra_config(extra)
    assert Settings.from_extra_config({"lease_s": 10}).lease_s == 10.0
