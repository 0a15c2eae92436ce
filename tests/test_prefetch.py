"""Blocks that are brought to the device before a request needs them."""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, free, manager, request
from model.memory import PageMemory
from model.tier import Tier
from model.tiered import PROMPT, Cache, in_tier


@pytest.mark.parametrize("limit", [{"pages": 4}, {"max_seq_len": 16}])
def test_a_prefetch_of_the_longest_prompt_brings_what_a_request_may_reuse(limit: dict[str, Any]) -> None:
    cache = Cache(**limit)
    cache.serve(range(16))
    cache.kv.truncate_prefix([])
    cache.kv.prefetch(list(range(16)))
    assert [len(copy.pages) for copy in cache.tier.in_flight()] == [3]


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
