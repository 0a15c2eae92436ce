"""Requests set aside in host memory: what comes back, what is refused meanwhile, what is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import manager
from model.host import PAGE_SIZE, HostCache, prompt_of


@pytest.mark.parametrize("tokens", [4, 6, 8, 25])
def test_a_request_comes_back_to_where_it_stood_on_other_pages(tokens: int) -> None:
    cache = HostCache(pages=16)
    ctx = cache.computed(prompt_of(1, 6), chunk=tokens, no_store=True)
    (before,) = cache.kv.get_cache_indices(ctx)
    cache.suspend(ctx)
    assert (cache.kv.block_count().free, cache.counted("private_units")) == (16, -(-tokens // PAGE_SIZE))
    assert (ctx.processed_length, cache.kv.get_cache_indices(ctx)) == (0, [[]])
    cache.memory[:] = 0
    blocker = cache.computed(prompt_of(2, 6))
    cache.resume(ctx)
    (after,) = cache.kv.get_cache_indices(ctx)
    assert (ctx.processed_length, len(after), cache.counted("private_units")) == (tokens, len(before), 0)
    assert cache.holds(ctx)
    cache.kv.release([ctx, blocker])
    counted = cache.kv.metrics()
    assert (counted["suspensions"], counted["resumptions"], counted["suspensions_lost"]) == (1, 1, 0)


def test_a_request_goes_on_computing_after_it_came_back() -> None:
    cache = HostCache(pages=16)
    ctx = cache.computed(prompt_of(1, 6), chunk=10)
    cache.suspend(ctx)
    cache.resume(ctx)
    cache.forward(ctx)
    ctx.update(5)
    cache.forward(ctx)
    assert ctx.processed_length == 26
    assert cache.holds(ctx)


def test_a_token_may_come_while_its_request_is_suspended() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 2))
    cache.suspend(ctx)
    ctx.update(5)
    cache.resume(ctx)
    cache.forward(ctx)
    assert (ctx.processed_length, ctx.tokens.all.tolist()[-1]) == (10, 5)
    assert cache.holds(ctx)


def test_shared_blocks_stay_cached_and_are_shared_again() -> None:
    cache = HostCache(pages=16)
    ctx = cache.computed(prompt_of(1, 3))
    cache.suspend(ctx)
    assert cache.kv.probe_prefix_match_length(prompt_of(1, 3)) == 12
    cache.kv.truncate_prefix([])
    cache.resume(ctx)
    other = cache.computed(prompt_of(1, 3))
    assert other.cached_prefix_length == 12
    assert cache.kv.get_cache_indices(other)[0][:3] == cache.kv.get_cache_indices(ctx)[0][:3]


@pytest.mark.parametrize(("on_duplicate", "shared"), [("adopt", 3), ("private", 0)])
def test_blocks_that_are_cached_when_a_request_comes_back_are_its_twins(
    on_duplicate: str, shared: int
) -> None:
    cache = HostCache(pages=16, on_duplicate=on_duplicate)
    ctx = cache.computed(prompt_of(1, 3))
    cache.suspend(ctx)
    other = cache.computed(prompt_of(1, 3))
    cache.resume(ctx)
    rows = zip(*(cache.kv.get_cache_indices(one)[0][:3] for one in (ctx, other)), strict=True)
    assert sum(own == theirs for own, theirs in rows) == shared
    assert cache.holds(ctx)
    cache.kv.release([ctx, other])
    cache.kv.verify()


def test_what_is_suspended_is_not_found_or_announced() -> None:
    cache = HostCache(event_buffer_max_size=100)
    ctx = cache.computed(prompt_of(1, 3), no_store=True)
    created = cache.kv.get_latest_events()
    cache.suspend(ctx)
    assert (len(created), cache.kv.get_latest_events()) == (1, [])
    assert cache.kv.probe_prefix_match_length(prompt_of(1, 3)) == 0
    assert cache.counted("blocks") == 0
    cache.resume(ctx)
    assert cache.kv.get_latest_events() == []


def test_traffic_that_fills_the_tier_does_not_evict_what_is_suspended() -> None:
    cache = HostCache(pages=8, units=8)
    ctx = cache.computed(prompt_of(1, 5), no_store=True)
    cache.suspend(ctx)
    for number in range(2, 12):
        cache.kv.release(cache.computed(prompt_of(number, 6)))
        cache.settled()
    assert (cache.counted("private_units"), cache.counted("blocks")) == (6, 2)
    cache.resume(ctx)
    assert cache.holds(ctx)


def test_blocks_of_the_tier_make_room_for_what_is_suspended_whatever_their_priority() -> None:
    cache = HostCache(pages=16, units=6, default_retention_priority=100)
    ctx, other = cache.computed(prompt_of(1, 3)), cache.computed(prompt_of(2, 3))
    cache.settled()
    assert cache.counted("blocks") == 6
    cache.suspend(ctx)
    assert (cache.counted("blocks"), cache.counted("private_units")) == (2, 4)
    cache.kv.release(other)


def test_without_room_in_the_tier_nothing_is_suspended() -> None:
    cache = HostCache(pages=16, units=5)
    first, second = cache.computed(prompt_of(1, 2)), cache.computed(prompt_of(2, 2))
    third = cache.computed(prompt_of(3, 2))
    cache.settled()
    cache.suspend(first)
    before = cache.kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError, match="3 units of host memory; 2 of 5") as refused:
        cache.kv.suspend(second)
    assert (refused.value.request_id, refused.value.needed) == (second.request_id, 3)
    assert (refused.value.free, refused.value.pinned) == (2, 3)
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.suspend([second, third])
    assert cache.kv.fingerprint() == before
    assert (cache.counted("private_units"), cache.kv.metrics()["suspensions"]) == (3, 1)
    cache.kv.verify()


def test_the_first_request_that_does_not_fit_is_named() -> None:
    cache = HostCache(pages=16, units=5)
    first, second = cache.computed(prompt_of(1, 2)), cache.computed(prompt_of(2, 2))
    cache.settled()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        cache.kv.suspend([first, second])
    assert (refused.value.request_id, refused.value.free) == (second.request_id, 2)


def test_without_room_on_the_device_nothing_is_resumed() -> None:
    cache = HostCache(pages=8)
    ctx = cache.computed(prompt_of(1, 4))
    cache.suspend(ctx)
    other = cache.computed(prompt_of(2, 4))
    before = cache.kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError, match="needs 5 more pages; 3 of 8 are free") as refused:
        cache.kv.resume(ctx)
    assert refused.value.request_id == ctx.request_id
    assert cache.kv.fingerprint() == before
    cache.kv.release(other)
    cache.settled()
    cache.resume(ctx)
    assert cache.holds(ctx)


def test_a_batch_goes_and_comes_together() -> None:
    cache = HostCache(pages=16)
    batch = [cache.computed(prompt_of(number, 2)) for number in (1, 2, 3)]
    transfers = cache.kv.suspend(batch)
    assert [len(transfer.block_ids) for transfer in transfers] == [3, 3, 3]
    cache.settled()
    slots = np.array([ctx.slot for ctx in batch], np.int32)
    assert len(cache.kv.resume(slots)) == 3
    assert cache.settled() == [ctx.request_id for ctx in batch]
    assert all(cache.holds(ctx) for ctx in batch)


@pytest.mark.parametrize("stage", ["leaving", "away", "returning"])
@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_a_suspended_request_may_be_given_up_at_any_moment(stage: str, verb: str) -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    transfer = cache.kv.suspend(ctx)
    if stage != "leaving":
        transfer.synchronize(10)
        cache.settled()
    if stage == "returning":
        cache.kv.resume(ctx)
    getattr(cache.kv, verb)(ctx)
    cache.kv.verify()
    assert cache.settled() == []
    assert (cache.counted("private_units"), cache.kv.metrics()["suspended"]) == (0, 0)
    if verb == "preempt":
        cache.forward(ctx)
        assert cache.holds(ctx)
        cache.kv.release(ctx)
    assert cache.kv.block_count().free == 8


CALLS: dict[str, Any] = {
    "alloc": lambda kv, ctx: kv.alloc(ctx),
    "step": lambda kv, ctx: kv.step(ctx),
    "runtime_inputs": lambda kv, ctx: kv.runtime_inputs([[ctx]]),
    "truncate": lambda kv, ctx: ctx.truncate(2),
    "fork": lambda kv, ctx: kv.fork(ctx),
    "pin": lambda kv, ctx: kv.pin(ctx),
    "prefetch": lambda kv, ctx: kv.prefetch(ctx),
    "suspend": lambda kv, ctx: kv.suspend(ctx),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_calls_say_that_the_request_is_suspended_and_change_nothing(call: str) -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    transfer = cache.kv.suspend(ctx)
    messages = []
    for stage in ("leaving", "away", "returning"):
        if stage == "returning":
            cache.kv.resume(ctx)
        before = cache.kv.fingerprint()
        with pytest.raises(ValueError, match=repr(ctx.request_id)) as refused:
            CALLS[call](cache.kv, ctx)
        messages.append(str(refused.value).partition("slot ")[2].partition(": ")[2].split(";")[0])
        assert cache.kv.fingerprint() == before
        if stage == "leaving":
            transfer.synchronize(10)
            cache.settled()
    assert messages == ["is being suspended", "is suspended", "waits for a load"]


def test_a_request_is_resumed_only_after_its_suspension_is_settled() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    with pytest.raises(ValueError, match="is not suspended"):
        cache.kv.resume(ctx)
    cache.kv.suspend(ctx).synchronize(10)
    with pytest.raises(ValueError, match=r"once poll_transfers\(\) has settled that copy"):
        cache.kv.resume(ctx)
    assert cache.kv.poll_transfers() == []
    cache.resume(ctx)


def test_what_cannot_be_suspended_is_refused() -> None:
    cache = HostCache()
    idle = pk.TextContext(request_id="idle", tokens=[1, 2])
    cache.kv.claim(idle)
    with pytest.raises(ValueError, match="no token has KV"):
        cache.kv.suspend(idle)
    cache.kv.alloc(idle)
    with pytest.raises(ValueError, match="has a step out"):
        cache.kv.suspend(idle)
    padding = pk.TextContext(request_id="padding", tokens=[1])
    cache.kv.alloc_dummy(padding)
    with pytest.raises(ValueError, match="padding request has no pages"):
        cache.kv.suspend(padding)
    with pytest.raises(ValueError, match="in this batch twice"):
        cache.kv.suspend([idle, idle])
    cache.kv.verify()


def test_a_request_whose_page_is_still_to_be_copied_is_not_suspended() -> None:
    cache = HostCache()
    parent = cache.computed(prompt_of(1, 1))
    child = cache.kv.fork(parent)
    for token in (5, 6, 7, 8):
        child.update(token)
    cache.kv.alloc(child)  # plans a copy of the last page, which both have
    child.truncate(8)
    with pytest.raises(ValueError, match=r"take_page_copies\(\) first"):
        cache.kv.suspend(child)
    cache.kv.verify()
    assert cache.kv.take_page_copies().tolist() == [[2, 3]]
    cache.memory[3] = cache.memory[2]
    cache.suspend(child)
    cache.resume(child)
    assert cache.holds(parent)


def test_without_a_host_tier_there_is_no_suspension() -> None:
    kv = manager()
    for call in (kv.suspend, kv.resume):
        with pytest.raises(ValueError, match="rust_tiered"):
            call([])


def test_a_suspension_that_fails_is_a_loss_that_is_told() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    cache.settled()
    cache.fail_copies()
    transfer = cache.kv.suspend(ctx)
    with pytest.raises(pk.KVLoadFailed, match="given up"):
        transfer.synchronize(10)
    assert cache.settled() == [ctx.request_id]
    assert cache.counted("private_units") == 0
    assert (ctx.processed_length, cache.kv.metrics()["suspensions_lost"]) == (0, 1)
    with pytest.raises(ValueError, match="lost: then it computes again"):
        cache.kv.resume(ctx)
    cache.forward(ctx)
    assert (ctx.processed_length, ctx.cached_prefix_length) == (13, 12)
    assert cache.holds(ctx)


def test_a_resumption_that_fails_is_a_loss_that_is_told() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3), no_store=True)
    cache.suspend(ctx)
    cache.fail_copies()
    transfer = cache.kv.resume(ctx)
    with pytest.raises(pk.KVLoadFailed, match="given up"):
        transfer.result()
    assert cache.settled() == [ctx.request_id]
    assert (cache.counted("private_units"), cache.kv.block_count().free) == (0, 8)
    assert (ctx.processed_length, cache.kv.metrics()["suspensions_lost"]) == (0, 1)
    cache.forward(ctx)
    assert cache.holds(ctx)


def test_a_reset_leaves_what_is_suspended_alone() -> None:
    cache = HostCache(pages=16)
    ctx = cache.computed(prompt_of(1, 3))
    cache.suspend(ctx)
    cache.kv.reset_prefix_cache(weights_revision="2")
    assert cache.kv.weights_revision == "2"
    cache.resume(ctx)
    assert cache.holds(ctx)
    assert cache.kv.probe_prefix_match_length(prompt_of(1, 3)) == 0, "of other weights: it is not shared"
    cache.kv.preempt(ctx)
    cache.forward(ctx)
    assert cache.kv.probe_prefix_match_length(prompt_of(1, 3)) == 12


def test_a_revision_that_is_no_text_resets_nothing() -> None:
    cache = HostCache()
    cache.kv.release(cache.computed(prompt_of(1, 3)))
    with pytest.raises(TypeError, match="weights_revision"):
        cache.kv.reset_prefix_cache(weights_revision=2)  # type: ignore[arg-type]
    assert cache.kv.probe_prefix_match_length(prompt_of(1, 3)) == 12


def test_after_a_shutdown_a_suspended_request_can_only_be_computed_again() -> None:
    cache = HostCache()
    away, leaving = cache.computed(prompt_of(1, 2)), cache.computed(prompt_of(2, 2))
    cache.suspend(away)
    cache.kv.suspend(leaving)
    cache.kv.shutdown()
    with pytest.raises(ValueError, match="shut down"):
        cache.kv.resume(away)
    cache.settled()
    cache.kv.preempt([away, leaving])
    cache.kv.alloc([away, leaving])
    with pytest.raises(ValueError, match="has a step out"):
        cache.kv.suspend(away)
    cache.kv.release([away, leaving])
    cache.kv.verify()
