"""Blocks that go to a connector's tier and come back: when a request waits, what it holds, what is left."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, request, row
from model.memory import PageMemory, prefix_values
from model.tier import Tier
from pagekeeper.connectors import NullConnector

PROMPT = list(range(1, 14))  # three full blocks of four, and a token


class Cache:
    """A manager whose pages have contents, with a tier."""

    def __init__(self, pages: int = 8, loads: str = "late", offloads: str = "now", **options: Any) -> None:
        self.memory = PageMemory(pages, 4)
        self.tier = Tier(self.memory, loads, offloads)
        self.kv = manager(pages, connector=self.tier, **options)

    def run(self, ctx: pk.TextContext, num_tokens: int | None = None) -> None:
        """`alloc` and a forward that checks what it reads and writes f(prefix)."""
        self.kv.alloc(ctx, num_tokens=num_tokens)
        self.forward(ctx)

    def forward(self, ctx: pk.TextContext) -> None:
        start, end = ctx.processed_length, ctx.processed_length + ctx.active_length
        values = prefix_values(0, list(map(int, ctx.tokens.all[:end])))
        assert (self.memory.read(row(self.kv, ctx), start) == values[:start]).all()
        self.memory.write(row(self.kv, ctx), start, values[start:])
        self.kv.step(ctx)
        self.kv.verify()

    def serve(self, tokens: Sequence[int]) -> int:
        """One request from claim to release; gives the tokens that were there."""
        ctx = claimed(self.kv, tokens)
        self.run(ctx)
        cached = ctx.cached_prefix_length
        self.kv.release(ctx)
        return cached

    def forget_device(self) -> None:
        """Other prompts take all pages: what was stored is in the tier alone."""
        loads, self.tier.loads = self.tier.loads, "refuse"
        pages = self.kv.block_count().total
        ctx = claimed(self.kv, range(1000, 1000 + pages * 4))
        self.run(ctx)
        self.kv.release(ctx)
        self.tier.loads = loads

    def stored_only_in_the_tier(self) -> None:
        self.serve(PROMPT)
        self.forget_device()


def in_tier(**options: Any) -> Cache:
    cache = Cache(**options)
    cache.stored_only_in_the_tier()
    return cache


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


@pytest.mark.parametrize("limit", [{"pages": 4}, {"max_seq_len": 16}])
def test_a_prefetch_of_the_longest_prompt_brings_what_a_request_may_reuse(limit: dict[str, Any]) -> None:
    cache = Cache(**limit)
    cache.serve(range(16))
    cache.kv.truncate_prefix([])
    cache.kv.prefetch(list(range(16)))
    assert [len(copy.pages) for copy in cache.tier.in_flight()] == [3]


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


def test_the_tier_hears_which_prefix_was_used_on_the_device() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    cache.serve(PROMPT)
    assert [[key.hash for key in keys] for keys in cache.tier.touched] == [pk.hash_blocks(PROMPT, 4)]


def test_the_tier_gets_the_requests_hint() -> None:
    cache = Cache()
    ctx = claimed(cache.kv, PROMPT, dkv_cache_hint="peer 7")
    cache.kv.alloc(ctx)
    assert ctx.dkv_cache_hint == cache.tier.hints[-1] == "peer 7"


def test_transfers_posted_are_ordered_around_the_forward() -> None:
    cache = Cache()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.kv.runtime_inputs([[ctx]])
    assert cache.tier.calls == ["wait_for_loads"]
    cache.forward(ctx)
    assert cache.tier.calls == ["wait_for_loads", "wait_for_offloads"]


def test_analysis_counts_each_tier_and_probes_count_them_together() -> None:
    cache = in_tier(loads="refuse")
    cache.serve(PROMPT[:5])
    summary = cache.kv.analyze_prefix_reuse([*PROMPT, 14, 15, 16])
    assert (summary.device_blocks, summary.host_blocks, summary.disk_blocks) == (1, 2, 0)
    assert summary.reusable_blocks_all == 3
    assert summary.first_new_block == pk.hash_blocks([*PROMPT, 14, 15, 16], 4)[3]
    assert hit(cache.kv, PROMPT) == 12
    assert hit(cache.kv, PROMPT[:12]) == 8, "the last token is computed"


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


def test_prefetched_tokens_are_cached_when_the_transfer_has_been_settled() -> None:
    cache = in_tier()
    transfer = cache.kv.prefetch(PROMPT[:12])
    assert not transfer.is_complete()
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers() == [], "it is no request of the caller's"
    assert cache.kv.analyze_prefix_reuse(PROMPT).device_blocks == 3
    assert free(cache.kv) == 8
    assert cache.kv.metrics()["requests"] == 0
    assert cache.serve(PROMPT) == 12


def test_a_prefetch_of_tokens_takes_pages_for_what_the_tier_has_alone() -> None:
    cache = Cache()
    cache.serve(PROMPT[:9])
    cache.kv.truncate_prefix([])
    cache.tier.offloads = "refuse"
    cache.serve(range(100, 121))  # five full blocks
    before = cache.kv.metrics()
    cache.kv.prefetch([*PROMPT, *range(50, 66)])  # seven full blocks, of which the tier has two
    assert [len(copy.pages) for copy in cache.tier.in_flight()] == [2]
    after = cache.kv.metrics()
    assert after["evictions"] == before["evictions"]
    assert free(cache.kv) == 8 - 2 - 1
    assert after["cached_blocks"] == 5


def test_a_prefetch_without_room_speaks_of_itself_and_changes_nothing() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, range(100, 121))
    cache.kv.alloc(ctx)
    before = cache.kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError, match=r"^prefetch: needs 4 pages for 3 blocks") as caught:
        cache.kv.prefetch(PROMPT)
    assert (caught.value.request_id, caught.value.needed, caught.value.free) == (None, 4, 2)
    assert cache.kv.fingerprint() == before


def test_a_prefetched_prompt_may_be_longer_than_any_request() -> None:
    cache = in_tier()
    cache.kv.prefetch([*PROMPT[:12], *range(200, 300)])
    assert [len(copy.pages) for copy in cache.tier.in_flight()] == [3]


@pytest.mark.parametrize("last", [13, 20])
def test_a_prefetch_names_blocks_by_all_that_reaches_into_them(last: int) -> None:
    prompt = list(range(1, 25))
    options: dict[str, Any] = {
        "mm_items": [(b"a" * 32, 2, last - 2), (b"b" * 32, 21, 2)],
        "extra_ids": [7] * 24,
    }
    cache = Cache()
    ctx = claimed(cache.kv, prompt, token_overrides=[(1, 99), (23, 98)], **options)
    cache.run(ctx, num_tokens=12)
    cache.kv.release(ctx)
    cache.kv.truncate_prefix([])
    cache.kv.prefetch(prompt, overrides=[(1, 99), (23, 98)], **options)
    assert [len(copy.pages) for copy in cache.tier.in_flight()] == [3]


def test_a_request_can_be_prefetched_before_it_is_planned() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    assert not cache.kv.prefetch(ctx).is_complete()
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers() == [ctx.request_id]
    cache.run(ctx)


def test_there_is_nothing_to_prefetch_without_stored_blocks() -> None:
    cache = Cache()
    assert cache.kv.prefetch(PROMPT).is_complete()
    assert manager().prefetch(PROMPT).is_complete()
    ctx = claimed(cache.kv, PROMPT)
    assert cache.kv.prefetch(ctx).is_complete()
    assert (ctx.active_length, free(cache.kv)) == (0, 8)


@pytest.mark.parametrize("connector", [None, Tier(PageMemory(8, 4))], ids=["no connector", "a connector"])
def test_a_request_that_is_not_claimed_is_not_prefetched(connector: Tier | None) -> None:
    with pytest.raises(ValueError, match="not claimed"):
        manager(connector=connector).prefetch(request(PROMPT))


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


def test_a_connector_that_raises_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    cache = in_tier(loads="raise")
    with caplog.at_level(logging.ERROR, "pagekeeper"):
        cache.serve(PROMPT)
    assert "load raised" in caplog.text
    assert cache.kv.metrics()["connector_errors"] == 1


def test_a_connector_is_checked_when_the_manager_is_made() -> None:
    bad: Any = object()
    with pytest.raises(TypeError, match="connector"):
        manager(connector=bad)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        manager(connector=Tier(PageMemory(8, 4)), enable_prefix_caching=False)


def test_bytes_metrics_and_shutdown_are_the_connectors() -> None:
    cache = Cache()
    assert cache.kv.host_byte_count() == pk.ByteCount(7, 10)
    assert cache.kv.disk_byte_count() == pk.ByteCount(0, 0)
    assert cache.kv.metrics()["connector_kept"] == 0
    cache.kv.shutdown()
    assert cache.tier.calls == ["shutdown"]
    assert manager().host_byte_count() == pk.ByteCount(0, 0)


def test_the_pool_is_there_while_the_connector_ends_its_copies() -> None:
    pytest.importorskip("torch")
    seen: list[bool] = []

    class Raw(NullConnector):
        def shutdown(self) -> None:
            seen.append(kv.pages_view().shape[0] == 9)
            raise OSError("the disk is gone")

    kv = manager(connector=Raw(), allocate_pools=True)
    with pytest.raises(OSError, match="gone"):
        kv.shutdown()
    assert seen == [True]
    with pytest.raises(ValueError, match="no pool"):
        kv.pages_view()


def test_after_a_shutdown_the_connector_is_asked_nothing() -> None:
    cache = in_tier()
    waiting = claimed(cache.kv, PROMPT)
    cache.kv.alloc(waiting)
    cache.kv.shutdown()
    asked = len(cache.tier.hints), len(cache.tier.copies), list(cache.tier.calls)
    ctx = claimed(cache.kv, PROMPT)
    assert cache.kv.alloc(ctx).is_complete()
    cache.kv.runtime_inputs([[ctx]])
    cache.forward(ctx)
    assert hit(cache.kv, PROMPT) == 12
    assert (len(cache.tier.hints), len(cache.tier.copies), cache.tier.calls) == asked
    cache.tier.in_flight()[0].fail()
    assert cache.kv.poll_transfers() == [waiting.request_id], "copies in flight still end"


def test_loads_are_counted_apart_from_hits_on_the_device() -> None:
    cache = in_tier(loads="now")
    before = cache.kv.metrics()
    cache.serve(PROMPT)
    after = cache.kv.metrics()
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert (moved["loaded_blocks"], moved["loaded_tokens"]) == (3, 12)
    assert "reused_blocks" not in moved
    assert moved["context_blocks"] == 4


def test_the_null_connector_finds_and_keeps_nothing() -> None:
    kv = manager(connector=NullConnector())
    ctx = claimed(kv, PROMPT)
    compute(kv, ctx)
    kv.release(ctx)
    assert free(kv) == 8
    assert hit(kv, PROMPT) == 12


def test_the_example_connector_serves_what_the_device_lost(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    import host_memory

    host_memory.main()
    assert capsys.readouterr().out.splitlines()[-1] == "512 tokens came from host memory"


def test_the_example_connector_refuses_another_block_under_the_same_hash() -> None:
    pytest.importorskip("torch")
    import torch

    from host_memory import HostMemory

    pool = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    tier = HostMemory(lambda: pool, blocks=2)
    tier.offload([1], [pk.BlockKey(b"h" * 8, b"g" * 16)])
    assert tier.lookup([pk.BlockKey(b"h" * 8, b"x" * 16)]) == [False]
    assert tier.metrics()["guard_mismatches"] == 1
    with pytest.raises(pk.KVLoadRefused):
        tier.load([2], [pk.BlockKey(b"h" * 8, b"x" * 16)])
    assert pool[2].tolist() == [8, 9, 10, 11]


def test_pages_are_loaded_where_slots_are_given_instead_of_contexts() -> None:
    cache = in_tier()
    ctx = claimed(cache.kv, PROMPT)
    transfers = cache.kv.alloc(np.array([ctx.slot], np.int32), num_tokens=np.array([3]))
    assert not transfers[0].is_complete()
    cache.tier.in_flight()[0].finish()
    assert cache.kv.poll_transfers() == [ctx.request_id]
