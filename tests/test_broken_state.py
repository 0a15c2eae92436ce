"""A panic inside a call leaves a manager in order, which goes on, or a broken one, which hits nothing.

Needs a build of the native module with panics on purpose: `make test-faults`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, hit, manager, prefilled, request, store
from model.faults import needs_faults
from model.memory import PageMemory
from model.tier import Tier

pytestmark = needs_faults

STORED = list(range(100, 113))
RUNNING = list(range(9))

DISORDERS = ["half reset", "half release"]


@dataclass
class Bench:
    """A manager with cached blocks, a running request that is pinned, an idle one and a stranger."""

    kv: Any
    running: pk.TextContext
    idle: pk.TextContext
    stranger: pk.TextContext
    pin: int


def bench(**options: Any) -> Bench:
    kv = manager(pages=16, event_buffer_max_size=8, **options)
    store(kv, STORED)
    assert hit(kv, STORED) == 12
    running = prefilled(kv, RUNNING)
    return Bench(kv, running, claimed(kv, [1, 2, 3]), request([1]), kv.pin(running))


def break_it(kv: Any, disorder: str) -> None:
    with pytest.raises(pk.LedgerCorruptError, match=r"forced: \w+\. The ledger's books are in disorder"):
        kv._core.force_panic(disorder)


@pytest.fixture(params=DISORDERS)
def broken(request: pytest.FixtureRequest) -> Bench:
    b = bench()
    break_it(b.kv, request.param)
    return b


REFUSED: dict[str, Callable[[Bench], object]] = {
    "claim": lambda b: b.kv.claim(b.stranger),
    "fork": lambda b: b.kv.fork(b.running),
    "alloc": lambda b: b.kv.alloc(b.idle),
    "alloc_dummy": lambda b: b.kv.alloc_dummy(b.idle),
    "runtime_inputs": lambda b: b.kv.runtime_inputs([[b.running]]),
    "get_needed_blocks_one_step": lambda b: b.kv.get_needed_blocks_one_step(b.idle),
    "get_remaining_blocks_to_completion": lambda b: b.kv.get_remaining_blocks_to_completion(b.idle),
    "can_alloc": lambda b: b.kv.can_alloc(b.idle),
    "can_satisfy": lambda b: b.kv.can_satisfy(1),
    "reuse_adjusted_compute": lambda b: b.kv.reuse_adjusted_compute(b.idle),
    "chunk_tokens": lambda b: b.kv.chunk_tokens(b.idle),
    "get_request_kv_block_budget": lambda b: b.kv.get_request_kv_block_budget(b.idle),
    "shorten": lambda b: b.kv.shorten(b.running, 1),
    "start_scheduling": lambda b: b.kv.start_scheduling(),
    "scheduling_reserve": lambda b: b.kv.scheduling_reserve(b.idle, 1),
    "scheduling_remove": lambda b: b.kv.scheduling_remove(b.idle),
    "scheduling_has_free_blocks": lambda b: b.kv.scheduling_has_free_blocks(1),
    "take_page_copies": lambda b: b.kv.take_page_copies(),
    "take_page_fills": lambda b: b.kv.take_page_fills(),
    "step": lambda b: b.kv.step(b.running),
    "truncate": lambda b: b.kv.truncate(b.running, 4),
    "preempt": lambda b: b.kv.preempt(b.running),
    "suspend": lambda b: b.kv.suspend(b.running),
    "resume": lambda b: b.kv.resume(b.running),
    "sleep": lambda b: b.kv.sleep(),
    "wake": lambda b: b.kv.wake(),
    "contains": lambda b: b.kv.contains(b.running),
    "begin_step": lambda b: b.kv.begin_step(),
    "poll_transfers": lambda b: b.kv.poll_transfers([]),
    "prefetch": lambda b: b.kv.prefetch(STORED),
    "block_count": lambda b: b.kv.block_count(),
    "analyze_prefix_reuse": lambda b: b.kv.analyze_prefix_reuse(STORED),
    "probe_prefix_match_length": lambda b: b.kv.probe_prefix_match_length(STORED),
    "commit_and_get_block_hashes": lambda b: b.kv.commit_and_get_block_hashes(b.running),
    "reset_prefix_cache": lambda b: b.kv.reset_prefix_cache(),
    "pin": lambda b: b.kv.pin(b.running),
    "unpin": lambda b: b.kv.unpin(b.pin),
    "session_hint": lambda b: b.kv.session_hint(b.running, "done"),
    "truncate_prefix": lambda b: b.kv.truncate_prefix([]),
    "metrics": lambda b: b.kv.metrics(),
    "histograms": lambda b: b.kv.histograms(),
    "get_latest_events": lambda b: b.kv.get_latest_events(),
    "event_snapshot": lambda b: b.kv.event_snapshot(),
    "get_cache_indices": lambda b: b.kv.get_cache_indices(b.running),
    "get_batch_cache_indices": lambda b: b.kv.get_batch_cache_indices([b.running]),
    "slot_mapping": lambda b: b.kv.slot_mapping(b.running, [0]),
    "copy_block_offsets": lambda b: b.kv.copy_block_offsets(np.zeros((1, 1, 2, 8), np.int32), 0, b.running),
    "fingerprint": lambda b: b.kv.fingerprint(),
    "TextContext.update": lambda b: b.running.update(1),
    "TextContext.truncate": lambda b: b.running.truncate(1),
}

# What P8 lets answer in any state, and what asks for no more than settings and memory.
ANSWERED = {
    "verify",
    "release",
    "shutdown",
    "debug_dump",
    "hash_seed",
    "get_buffers",
    "pages_view",
    "pool_pointers",
    "chunk_alignment_tokens",
} | {
    "host_byte_count",
    "disk_byte_count",
    "flush",
}


def test_every_public_call_of_the_manager_is_refused_or_answers_in_any_state() -> None:
    public = {name for name in dir(pk.PagedKVCacheManager) if not name.startswith("_")}
    assert public == {name for name in REFUSED if "." not in name} | ANSWERED


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_manager_refuses(broken: Bench, name: str) -> None:
    with pytest.raises(pk.LedgerCorruptError):
        REFUSED[name](broken)


def test_a_request_with_the_prompt_of_cached_blocks_hits_nothing_any_more(broken: Bench) -> None:
    twin = request(STORED)
    with pytest.raises(pk.LedgerCorruptError):
        broken.kv.claim(twin)
    assert (twin.slot, twin.cached_prefix_length) == (None, 0)


@pytest.mark.parametrize("disorder", DISORDERS)
def test_a_broken_manager_asks_its_connector_for_nothing(disorder: str) -> None:
    tier = Tier(PageMemory(16, 4), loads="now")
    b = bench(connector=tier)
    break_it(b.kv, disorder)
    asked = [len(tier.hints), len(tier.copies), len(tier.touched), len(tier.kept)]
    assert len(tier.kept) == 5
    for call in (b.kv.alloc, b.kv.prefetch):
        with pytest.raises(pk.LedgerCorruptError):
            call(b.idle)
    for call in (b.kv.prefetch, b.kv.analyze_prefix_reuse):
        with pytest.raises(pk.LedgerCorruptError):
            call(STORED)
    with pytest.raises(pk.LedgerCorruptError):
        b.kv.reset_prefix_cache()
    assert asked == [len(tier.hints), len(tier.copies), len(tier.touched), len(tier.kept)]
    assert b.kv.host_byte_count() == tier.host_byte_count()


def test_verify_of_a_broken_manager_says_each_time_what_is_wrong(broken: Bench) -> None:
    for _ in range(2):
        with pytest.raises(pk.LedgerCorruptError, match="page"):
            broken.kv.verify()


def test_a_broken_manager_can_be_looked_at(broken: Bench) -> None:
    assert "cached blocks" in broken.kv.debug_dump()


def test_release_from_a_broken_manager_gives_the_tokens_back(broken: Bench) -> None:
    broken.kv.release([broken.running, broken.idle])
    assert broken.running.tokens.all.tolist() == RUNNING
    assert broken.idle.tokens.all.tolist() == [1, 2, 3]


def test_requests_of_a_broken_manager_go_on_in_another(broken: Bench) -> None:
    broken.kv.release(broken.running)
    other = manager()
    other.claim(broken.running)
    other.alloc(broken.running)
    assert broken.running.active_length == len(RUNNING)


def test_release_from_a_broken_manager_still_refuses_what_is_not_claimed(broken: Bench) -> None:
    with pytest.raises(ValueError, match="not claimed"):
        broken.kv.release(broken.stranger)


def test_a_broken_manager_that_goes_away_gives_the_tokens_back(broken: Bench) -> None:
    running = broken.running
    broken.kv = None
    assert running.tokens.all.tolist() == RUNNING
    assert running.slot is None


def test_a_broken_manager_shuts_down(broken: Bench) -> None:
    broken.kv.shutdown()
    with pytest.raises(pk.LedgerCorruptError):
        broken.kv.metrics()


def test_disorder_stays_after_the_last_request_is_gone(broken: Bench) -> None:
    broken.kv.release([broken.running, broken.idle])
    with pytest.raises(pk.LedgerCorruptError):
        broken.kv.claim(broken.stranger)


def test_after_a_panic_that_left_order_the_manager_goes_on() -> None:
    b = bench()
    before = b.kv.fingerprint()
    with pytest.raises(RuntimeError, match=r"forced: AtOnce\. The ledger was verified and is in order"):
        b.kv._core.force_panic("at once")
    assert b.kv.fingerprint() == before
    assert hit(b.kv, STORED) == 12
    b.kv.verify()
