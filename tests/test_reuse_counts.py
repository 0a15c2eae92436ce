"""What is counted of reuse, against hand counts, and what a tier that gives nothing changes: nothing.

Pages have 4 tokens.
"""

import random

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, request, row
from model.memory import PageMemory
from model.tier import Tier
from model.tiered import Cache
from pagekeeper.connectors import NullConnector

PROMPT = list(range(10, 30))
COUNTED = (
    "context_blocks",
    "reused_blocks",
    "reused_tokens",
    "missed_never_stored",
    "missed_evicted",
    "pages_allocated",
    "pages_allocated_new",
)


def counts(kv: pk.PagedKVCacheManager) -> dict[str, int]:
    counted = kv.metrics()
    return {name: counted[name] for name in COUNTED}


def test_requests_reuse_and_miss_what_a_hand_count_says() -> None:
    kv = manager(pages=4)
    kv.release(prefilled(kv, PROMPT[:8]))
    # Two blocks, of which none is there. That of the last token is always computed, and so not missed.
    assert counts(kv) == {
        "context_blocks": 2,
        "reused_blocks": 0,
        "reused_tokens": 0,
        "missed_never_stored": 1,
        "missed_evicted": 0,
        "pages_allocated": 2,
        "pages_allocated_new": 2,
    }
    ctx = claimed(kv, [*PROMPT[:8], 1, 2, 3, 4, 5])
    compute(kv, ctx, new_tokens=[6])
    compute(kv, ctx)  # generated tokens are no context
    # Four blocks, of which two are there.
    assert counts(kv) == {
        "context_blocks": 6,
        "reused_blocks": 2,
        "reused_tokens": 8,
        "missed_never_stored": 2,
        "missed_evicted": 0,
        "pages_allocated": 4,
        "pages_allocated_new": 4,
    }
    kv.release(ctx)
    kv.release(prefilled(kv, range(50, 66)))  # takes every page
    kv.release(prefilled(kv, [*PROMPT[:8], 1]))
    # Four blocks, of which three may be missed; then three, of which two were there before.
    assert counts(kv) == {
        "context_blocks": 13,
        "reused_blocks": 2,
        "reused_tokens": 8,
        "missed_never_stored": 5,
        "missed_evicted": 2,
        "pages_allocated": 11,
        "pages_allocated_new": 4,
    }


def between(kv: pk.PagedKVCacheManager, before: dict[str, int]) -> dict[str, int]:
    """All that moved since a reading, counters and gauges."""
    return {name: now - before[name] for name, now in kv.metrics().items() if now != before[name]}


def test_the_difference_of_two_readings_is_what_happened_in_between() -> None:
    kv = manager(pages=8)
    kv.release(prefilled(kv, PROMPT[:8]))
    before, histograms = kv.metrics(), kv.histograms()
    ctx = claimed(kv, PROMPT[:9])
    kv.alloc(ctx)
    # Three blocks, of which two were there, on idle pages; the third one takes a new page.
    assert between(kv, before) == {
        "claims": 1,
        "admissions": 1,
        "prompt_tokens": 9,
        "context_blocks": 3,
        "reused_blocks": 2,
        "reused_tokens": 8,
        "pages_allocated": 1,
        "pages_allocated_new": 1,
        "pages_free": -3,
        "pages_pristine": -1,
        "pages_evictable": -2,
        "requests": 1,
    }
    gaps = kv.histograms()["reuse_gap_steps"]
    assert sum(gaps) - sum(histograms["reuse_gap_steps"]) == 2


def test_nothing_moves_when_nothing_happens_however_often_it_is_read() -> None:
    kv = manager(pages=8)
    kv.release(prefilled(kv, PROMPT[:8]))
    waiting = claimed(kv, PROMPT[:9])
    before, histograms = kv.metrics(), kv.histograms()
    for _ in range(3):
        assert kv.probe_prefix_match_length(PROMPT[:9]) == 8
        assert kv.analyze_prefix_reuse(PROMPT[:9]).reusable_blocks_all == 2
        assert kv.can_alloc(waiting)
        kv.get_needed_blocks_one_step(waiting)
        kv.begin_step()
        assert (between(kv, before), kv.histograms()) == ({}, histograms)


def test_an_alloc_without_room_moves_its_own_counter_alone_and_the_prompt_counts_when_it_comes_in() -> None:
    kv = manager(pages=4, max_seq_len=100)
    kv.release(prefilled(kv, PROMPT[:4]))
    other = prefilled(kv, range(50, 62))
    ctx = claimed(kv, PROMPT[:9])  # reads one page, and needs two
    before = kv.metrics()
    for failed in (1, 2):
        with pytest.raises(pk.InsufficientBlocksError):
            kv.alloc(ctx)
        assert between(kv, before) == {"failed_allocs": failed}
    too_large = claimed(kv, range(100, 117))
    before = kv.metrics()
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(too_large)
    assert between(kv, before) == {"failed_allocs": 1}
    kv.release([too_large, other])
    before = kv.metrics()
    for wrong in (other, 7):
        with pytest.raises(ValueError, match=r"not claimed|slot"):
            kv.alloc(wrong)
    assert between(kv, before) == {}
    compute(kv, ctx)
    counted = kv.metrics()
    # Eight tokens, three blocks: those of `other`, and of the two prompts of `ctx` and before.
    assert (counted["admissions"], counted["prompt_tokens"], counted["context_blocks"]) == (3, 25, 7)
    assert (counted["reused_blocks"], counted["failed_allocs"]) == (1, 3)


def test_padding_and_the_manager_that_is_none_count_nothing_that_a_hit_rate_is_made_of() -> None:
    kv = manager(pages=8, enable_partial_reuse=True)
    kv.release(prefilled(kv, PROMPT[:9]))
    before, histograms = kv.metrics(), kv.histograms()
    for prompt in (PROMPT[:4], PROMPT[:3], [0]):  # the first block is cached, and so are three tokens of it
        padding = request(prompt)
        kv.alloc_dummy(padding)  # claims it
        kv.runtime_inputs([[padding]])
        kv.step(padding, new_tokens=[1])
        kv.release(padding)
    assert (between(kv, before), kv.histograms()) == ({"claims": 3, "releases": 3}, histograms)
    decode, padding = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[:4])
    before = kv.metrics()
    kv.alloc(decode)
    alone = between(kv, before)
    kv.alloc_dummy(padding)  # beside it
    kv.runtime_inputs([[decode, padding]])
    kv.step([decode, padding], new_tokens=[1, 1])
    assert {name: between(kv, before)[name] for name in alone} == alone
    none = pk.DummyKVCache()
    ctx = request(PROMPT)
    none.claim(ctx)
    none.alloc(ctx)
    none.runtime_inputs([[ctx]])
    none.step(ctx, new_tokens=[1])
    none.release(ctx)
    assert (none.metrics(), none.histograms()) == ({}, {})


def test_reused_tokens_are_those_of_whole_blocks_and_of_parts_and_what_comes_late_is_apart() -> None:
    kv = manager(pages=8, enable_partial_reuse=True)
    kv.release(prefilled(kv, PROMPT[:12]))
    before = kv.metrics()
    ctx = claimed(kv, [*PROMPT[:10], 1, 2, 3])  # 2 blocks, 2 tokens of the third, and 3 others
    compute(kv, ctx, new_tokens=[4])

    def reuse() -> dict[str, int]:
        names = ("reused_blocks", "reused_tokens", "partial_hits", "partial_tokens", "late_reused_tokens")
        return {name: kv.metrics()[name] - before[name] for name in names}

    assert reuse() == {
        "reused_blocks": 2,
        "reused_tokens": 2 * 4 + 2,
        "partial_hits": 1,
        "partial_tokens": 2,
        "late_reused_tokens": 0,
    }
    kv.preempt(ctx)
    compute(kv, ctx)
    # Of 14 tokens the last is computed: 3 blocks and 1 token of a tail are found again.
    assert reuse() == {
        "reused_blocks": 2,
        "reused_tokens": 2 * 4 + 2,
        "partial_hits": 2,
        "partial_tokens": 2 + 1,
        "late_reused_tokens": 3 * 4 + 1,
    }
    assert kv.metrics()["prompt_tokens"] - before["prompt_tokens"] == 13


# A connector that has nothing, or little


@pytest.mark.parametrize("connector", ["none", "null", "one that declines"])
def test_a_request_takes_the_same_pages_whether_a_connector_that_gives_nothing_is_there_or_not(
    connector: str,
) -> None:
    def rows(given: pk.KVConnector | None) -> list[list[int]]:
        kv, draw, seen = manager(12, connector=given), random.Random(5), []
        for _ in range(60):
            ctx = claimed(kv, [*range(draw.randrange(0, 20, 4)), *(draw.randrange(90, 93) for _ in range(9))])
            for token in range(draw.randint(1, 6)):
                kv.alloc(ctx)
                kv.take_page_copies()
                kv.step(ctx, new_tokens=[token])
                kv.poll_transfers()
                seen.append(row(kv, ctx))
            kv.release(ctx)
        assert kv.metrics()["reused_blocks"] > 0
        return seen

    memory = PageMemory(12, 4)
    chosen: dict[str, pk.KVConnector | None] = {
        "none": None,
        "null": NullConnector(),
        "one that declines": Tier(memory, loads="refuse", offloads="refuse"),
    }
    assert rows(chosen[connector]) == rows(None)


def test_a_decode_takes_its_next_page_at_the_border_with_a_connector_that_has_nothing() -> None:
    cache = Cache(offloads="refuse")
    ctx = claimed(cache.kv, PROMPT[:4])
    held = []
    for token in range(3):
        cache.run(ctx)
        held.append(len(row(cache.kv, ctx)))
        ctx.update(token)
    assert held == [1, 2, 2]


def test_a_prompt_of_which_the_tier_has_four_tokens_takes_all_its_pages_and_begins_behind_them() -> None:
    cache = Cache()
    cache.serve(PROMPT[:5])
    cache.forget_device()
    ctx = claimed(cache.kv, PROMPT[:15])
    cache.kv.alloc(ctx)
    assert cache.kv.block_count().used == 4  # 15 tokens: one page to load to, and three for the rest
    (load,) = cache.tier.in_flight()
    assert len(load.pages) == 1
    load.finish()
    cache.kv.poll_transfers()
    assert (ctx.cached_prefix_length, ctx.processed_length) == (4, 4)
    cache.run(ctx)
    assert (ctx.processed_length, len(row(cache.kv, ctx))) == (15, 4)
