"""Blocks that go to a connector's tier and come back: when a request waits, what it holds, what is left."""

from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, free, hit, row
from model.tiered import PROMPT, Cache, in_tier


def test_full_blocks_reach_the_tier_when_they_are_published() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    assert len(cache.tier.kept) == 3
    assert {key.hash for key in cache.tier.kept} == set(pk.hash_blocks(PROMPT, 4))


def test_a_block_that_is_cached_already_is_not_offloaded_again() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    cache.serve([*PROMPT[:8], 99, 98, 97, 96, 95])
    assert [len(copy.keys) for copy in cache.tier.copies] == [3, 1]


def test_blocks_that_are_going_to_be_evicted_are_offered_by_the_call_that_takes_pages() -> None:
    cache = Cache(pages=17, write_policy="on_evict")
    cache.serve(range(65))
    assert cache.tier.copies == []
    cache.kv.alloc(claimed(cache.kv, [99]))
    assert [copy.pages for copy in cache.tier.copies] == [[15, 16]], "an eighth of the 16 idle pages"


def test_a_block_that_was_hit_often_enough_is_offered_by_the_call_that_finds_it() -> None:
    cache = Cache(write_policy="selective", selective_min_hits=1)
    cache.serve(PROMPT)
    assert cache.tier.copies == []
    cache.kv.alloc(claimed(cache.kv, PROMPT))
    assert [len(copy.keys) for copy in cache.tier.copies] == [3]


@pytest.mark.parametrize("algorithm", ["ahash64", "sha256", "sha256_64"])
def test_a_block_is_found_under_the_key_that_it_was_offered_with_before_its_eviction(algorithm: str) -> None:
    cache = Cache(pages=17, write_policy="on_evict", kv_hash_algo=algorithm)
    cache.serve(range(65))
    cache.serve([99])  # on the page that has no block: the tail is offered before it has to go
    for number in range(40):
        cache.serve([100 + number] * 5)
    assert cache.kv.probe_prefix_match_length(list(range(65))) == 64
    assert len(cache.tier.kept) >= 16


def test_a_request_waits_for_its_load_and_reads_what_was_stored() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    transfer = cache.kv.alloc(ctx)
    assert not transfer.is_complete()
    assert (ctx.cached_prefix_length, ctx.processed_length, ctx.active_length) == (12, 0, 0)
    cache.tier.in_flight()[0].finish()
    assert transfer.is_complete()
    assert ctx.processed_length == 0, "landed when the ledger is told"
    assert cache.kv.poll_transfers() == [ctx.request_id]
    assert (ctx.cached_prefix_length, ctx.processed_length) == (12, 12)
    cache.run(ctx)
    assert ctx.processed_length == 13
    assert cache.kv.poll_transfers() == []


def test_a_load_is_visible_to_others_when_it_has_landed_and_not_before() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 0
    cache.tier.in_flight()[0].finish()
    assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 0
    cache.kv.poll_transfers()
    assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 3


def test_what_came_from_the_tier_is_not_offloaded_again() -> None:
    cache = in_tier()
    before = len(cache.tier.copies)
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.tier.in_flight()[0].finish()
    cache.kv.poll_transfers()
    cache.run(ctx)
    assert len(cache.tier.copies) == before + 1, "the load alone"


def test_a_request_whose_load_fails_after_a_reset_shares_what_it_computes() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.kv.reset_prefix_cache()
    cache.tier.in_flight()[0].fail()
    cache.kv.poll_transfers()
    cache.run(ctx)
    assert hit(cache.kv, PROMPT) == 12


def test_a_load_that_lands_after_a_reset_is_the_requests_alone() -> None:
    cache = in_tier()
    cache.tier.loads = "refuse"
    cache.serve(PROMPT[:5])  # the first block is on the device again
    cache.tier.loads = "late"
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    [load] = cache.tier.in_flight()
    assert len(load.pages) == 2
    load.finish()
    cache.kv.reset_prefix_cache()
    assert cache.kv.poll_transfers() == [ctx.request_id]
    cache.kv.verify()
    cache.run(ctx)
    assert ctx.cached_prefix_length == 12
    assert hit(cache.kv, PROMPT) == 0


@pytest.mark.parametrize("call", ["runtime_inputs", "alloc", "step"])
def test_a_request_that_waits_is_in_no_batch(call: str) -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    before = cache.kv.fingerprint()
    calls: dict[str, Any] = {
        "runtime_inputs": lambda: cache.kv.runtime_inputs([[ctx]]),
        "alloc": lambda: cache.kv.alloc(ctx),
        "step": lambda: cache.kv.step(ctx),
    }
    with pytest.raises(ValueError, match="waits for a load"):
        calls[call]()
    assert cache.kv.fingerprint() == before


def test_a_batch_goes_on_without_the_request_that_waits() -> None:
    cache = in_tier()
    waiting, other = claimed(cache.kv, PROMPT), claimed(cache.kv, range(50, 55))
    transfers = cache.kv.alloc([waiting, other])
    assert [transfer.is_complete() for transfer in transfers] == [False, True]
    assert other.active_length == 5
    cache.forward(other)


def test_a_load_that_is_complete_at_once_keeps_the_request_in_the_batch() -> None:
    cache = in_tier(loads="now")
    ctx = claimed(cache.kv, PROMPT)
    assert cache.kv.alloc(ctx).is_complete()
    assert (ctx.processed_length, ctx.active_length) == (12, 1)
    cache.forward(ctx)


@pytest.mark.parametrize("loads", ["refuse", "fail", "raise", "blind"])
def test_a_load_that_does_not_come_is_computed_in_the_same_call(loads: str) -> None:
    cache = in_tier(loads=loads)
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    assert (ctx.cached_prefix_length, ctx.processed_length, ctx.active_length) == (0, 0, 13)
    cache.forward(ctx)


def test_a_refused_load_leaves_the_books_as_a_plain_miss_does() -> None:
    refused, missed = in_tier(loads="refuse"), in_tier(loads="refuse")
    missed.tier.kept.clear()
    for cache in (refused, missed):
        ctx = claimed(cache.kv, PROMPT)
        cache.kv.alloc(ctx, num_tokens=5)
        cache.forward(ctx)
        assert len(row(cache.kv, ctx)) == 2
        assert free(cache.kv) == 6


def test_a_failed_load_leaves_nothing_and_is_not_tried_again() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.tier.in_flight()[0].fail()
    assert cache.kv.poll_transfers() == [ctx.request_id]
    assert (ctx.cached_prefix_length, ctx.processed_length) == (0, 0)
    assert free(cache.kv) == 8
    cache.run(ctx)
    assert cache.tier.in_flight() == []
    assert cache.kv.metrics()["copies_failed"] == 1


def test_another_request_may_load_what_failed_for_one() -> None:
    cache = in_tier()
    first = claimed(cache.kv, PROMPT)
    cache.kv.alloc(first)
    cache.tier.in_flight()[0].fail()
    cache.kv.poll_transfers()
    second = claimed(cache.kv, PROMPT)
    assert not cache.kv.alloc(second).is_complete()


def test_device_hits_come_first_and_the_tier_serves_what_follows() -> None:
    cache = in_tier()
    cache.tier.loads = "refuse"
    cache.serve(PROMPT[:5])  # the first block again
    cache.tier.loads = "late"
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    assert (ctx.processed_length, ctx.cached_prefix_length) == (4, 12)
    (load,) = cache.tier.in_flight()
    assert [key.hash for key in load.keys] == pk.hash_blocks(PROMPT, 4)[1:]
    load.finish()
    cache.kv.poll_transfers()
    cache.run(ctx)


def test_what_the_device_has_further_than_the_tier_is_not_loaded() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    first = pk.hash_blocks(PROMPT, 4)[0]
    cache.tier.kept = {key: value for key, value in cache.tier.kept.items() if key.hash == first}
    cache.tier.copies.clear()
    ctx = claimed(cache.kv, PROMPT)
    assert cache.kv.alloc(ctx).is_complete()
    assert (ctx.cached_prefix_length, ctx.processed_length, cache.tier.copies) == (12, 12, [])
    cache.forward(ctx)


def test_a_hole_in_the_tier_ends_the_load() -> None:
    cache = in_tier()
    second = pk.hash_blocks(PROMPT, 4)[1]
    cache.tier.kept = {key: value for key, value in cache.tier.kept.items() if key.hash != second}
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    assert ctx.cached_prefix_length == 4


def test_the_block_with_the_last_token_is_never_loaded() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT[:12])
    cache.kv.alloc(ctx)
    assert ctx.cached_prefix_length == 8


@pytest.mark.parametrize("option", ["no_read", "no_store"])
def test_no_read_never_loads_and_no_store_never_offloads(option: str) -> None:
    cache = in_tier()
    before = len(cache.tier.copies)
    ctx = claimed(cache.kv, PROMPT, **{option: True})
    transfer = cache.kv.alloc(ctx)
    if option == "no_read":
        assert transfer.is_complete()
        cache.forward(ctx)
        assert [copy.kind for copy in cache.tier.copies[before:]] == ["offload"], "they are new on the device"
    else:
        cache.tier.in_flight()[0].finish()
        cache.kv.poll_transfers()
        cache.run(ctx)
        assert ctx.processed_length == 13
        assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 0
        assert len(cache.tier.copies) == before + 1


def test_a_tenant_never_loads_what_another_salt_stored() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT, cache_salt="other")
    assert cache.kv.alloc(ctx).is_complete()
    assert ctx.cached_prefix_length == 0


def test_a_waiting_request_holds_what_the_rest_of_its_prompt_needs() -> None:
    # Ten pages; each request needs six and has three in the tier. Were only loads reserved, both would wait.
    cache = Cache(pages=10)
    cache.stored_only_in_the_tier()
    prompts = [[*PROMPT[:12], *range(100 * i, 100 * i + 12)] for i in (1, 2)]
    first, second = (claimed(cache.kv, prompt) for prompt in prompts)
    cache.kv.alloc(first)
    assert free(cache.kv) == 4
    before = cache.kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.alloc(second)
    assert cache.kv.fingerprint() == before
    cache.tier.in_flight()[0].finish()
    cache.kv.poll_transfers()
    cache.run(first, num_tokens=5)
    cache.run(first)
    assert first.processed_length == 24, "it never waits for a page again"
    cache.kv.release(first)
    cache.kv.alloc(second)
    cache.forward(second)


@pytest.mark.parametrize("end", ["finish", "fail"])
@pytest.mark.parametrize("how", ["release", "preempt", "truncate"])
def test_a_request_may_go_while_its_load_is_under_way(how: str, end: str) -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    if how == "truncate":
        ctx.truncate(9)
    else:
        getattr(cache.kv, how)(ctx)
    cache.kv.verify()
    metrics = cache.kv.metrics()
    assert metrics["pages_in_flight"] == 3, "nobody gets these pages while they are written to"
    assert metrics["copies_in_flight"] == 1
    assert free(cache.kv) == 5
    getattr(cache.tier.in_flight()[0], end)()
    assert cache.kv.poll_transfers() == [], "nobody waits for it any more"
    cache.kv.verify()
    assert free(cache.kv) == 8
    assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 0
    if how != "release":
        cache.tier.loads = "refuse"
        cache.run(ctx)
        assert ctx.processed_length == len(ctx)


def test_a_load_that_lands_after_a_reset_is_not_shared() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    load = cache.tier.in_flight()[0]
    kept = dict(cache.tier.kept)
    cache.kv.reset_prefix_cache()
    assert cache.tier.kept == {}, "every tier forgets"
    cache.tier.kept = kept
    load.finish()
    cache.tier.kept = {}
    assert cache.kv.poll_transfers() == [ctx.request_id]
    cache.run(ctx)
    cache.kv.release(ctx)
    assert hit(cache.kv, PROMPT) == 0


def test_a_twin_that_a_sibling_computed_meanwhile_is_adopted() -> None:
    cache = in_tier()
    waiting = claimed(cache.kv, PROMPT)
    cache.kv.alloc(waiting)
    cache.tier.loads = "refuse"
    sibling = claimed(cache.kv, PROMPT)
    cache.run(sibling)
    cache.tier.in_flight()[0].finish()
    cache.kv.poll_transfers()
    assert row(cache.kv, waiting)[:3] == row(cache.kv, sibling)[:3]
    cache.run(waiting)


def test_a_prompt_in_chunks_profits_from_a_sibling_between_its_chunks_and_after_a_load() -> None:
    cache = Cache(pages=12)
    cache.stored_only_in_the_tier()
    long = [*PROMPT[:12], *range(40, 49)]
    waiting = claimed(cache.kv, long)
    cache.kv.alloc(waiting)
    cache.tier.in_flight()[0].finish()
    cache.kv.poll_transfers()
    cache.tier.loads = "refuse"
    cache.serve(long)  # the same, faster
    cache.kv.alloc(waiting)
    assert (waiting.processed_length, waiting.active_length) == (20, 1)
    cache.forward(waiting)


def test_pages_of_an_offload_are_nobody_elses_until_it_has_ended() -> None:
    cache = Cache(pages=4, offloads="late")
    cache.serve(PROMPT)
    assert cache.kv.metrics()["pages_in_flight"] == 3
    ctx = claimed(cache.kv, range(50, 63))
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.alloc(ctx)
    cache.tier.in_flight()[0].finish()
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.alloc(ctx)
    assert cache.kv.poll_transfers() == []
    cache.run(ctx)


def test_a_prompt_shorter_than_a_block_has_nothing_to_offload_and_its_page_is_free_at_once() -> None:
    cache = Cache(offloads="late")
    cache.serve(PROMPT[:3])
    assert (cache.tier.copies, cache.kv.metrics()["copies_in_flight"], free(cache.kv)) == ([], 0, 8)


@pytest.mark.parametrize(
    ("offloads", "counter"),
    [("fail", "copies_failed"), ("raise", "copies_failed"), ("refuse", "copies_refused")],
)
def test_an_offload_that_fails_keeps_nobody_from_anything(offloads: str, counter: str) -> None:
    cache = Cache(offloads=offloads)
    cache.serve(PROMPT)
    assert free(cache.kv) == 8
    assert cache.tier.kept == {}
    assert cache.kv.metrics()[counter] == 1
    assert hit(cache.kv, PROMPT) == 12, "the device has it"


def test_ranks_may_say_themselves_which_copies_have_ended() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    transfer: Any = cache.kv.alloc(ctx)
    before = cache.kv.fingerprint()
    with pytest.raises(ValueError, match="in flight"):
        cache.kv.poll_transfers(completions=[transfer.id])
    with pytest.raises(ValueError, match="99"):
        cache.kv.poll_transfers(completions=[99])
    assert cache.kv.fingerprint() == before
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers(completions=[]) == []
    assert cache.kv.poll_transfers(completions=[transfer.id]) == [ctx.request_id]


def test_a_load_that_ends_with_begin_step_is_named_by_the_next_poll() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.tier.in_flight()[0].finish()
    cache.kv.begin_step()
    assert ctx.processed_length == 12
    assert cache.kv.poll_transfers() == [ctx.request_id]


def test_a_preempted_request_may_load_its_own_blocks_again() -> None:
    cache = Cache()
    ctx = claimed(cache.kv, PROMPT)
    cache.run(ctx)
    cache.kv.preempt(ctx)
    cache.forget_device()
    cache.kv.alloc(ctx)
    assert ctx.cached_prefix_length == 12
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers() == [ctx.request_id]
    cache.run(ctx)


def test_loads_are_counted_apart_from_hits_on_the_device() -> None:
    cache = in_tier(loads="now")
    before = cache.kv.metrics()
    cache.serve(PROMPT)
    after = cache.kv.metrics()
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert (moved["loaded_blocks"], moved["loaded_tokens"]) == (3, 12)
    assert "reused_blocks" not in moved
    assert moved["context_blocks"] == 4


def test_pages_are_loaded_where_slots_are_given_instead_of_contexts() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    transfers = cache.kv.alloc(np.array([ctx.slot], np.int32), num_tokens=np.array([3]))
    assert not transfers[0].is_complete()
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers() == [ctx.request_id]
