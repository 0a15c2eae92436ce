"""Which cached block goes when a page is wanted, and what a reset forgets."""

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, row, store

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks of four."""


# Eviction order (PAGE-11, PAGE-13, PAGE-16)


def test_the_deepest_block_of_a_sequence_is_evicted_first() -> None:
    kv = manager(pages=3)
    store(kv, PROMPT[:12])
    prefilled(kv, [1])
    assert hit(kv, PROMPT) == 8


def test_the_least_recently_released_sequence_is_evicted_first() -> None:
    kv = manager(pages=2)
    store(kv, PROMPT[:4])
    store(kv, range(50, 54))
    prefilled(kv, [1])
    assert (hit(kv, PROMPT), hit(kv, range(50, 55))) == (0, 4)


def test_use_makes_a_block_recent_again() -> None:
    kv = manager(pages=3)
    store(kv, PROMPT[:4])
    store(kv, range(50, 54))
    store(kv, PROMPT[:5])  # hits the first block, and needs one page more
    prefilled(kv, range(60, 68))
    assert (hit(kv, PROMPT), hit(kv, range(50, 55))) == (4, 0)


def test_looking_does_not_make_a_block_recent() -> None:
    kv = manager(pages=2)
    store(kv, PROMPT[:4])
    store(kv, range(50, 54))
    hit(kv, PROMPT)
    prefilled(kv, [1])
    assert (hit(kv, PROMPT), hit(kv, range(50, 55))) == (0, 4)


def test_a_released_page_that_is_not_cached_goes_before_unused_and_cached_ones() -> None:
    kv = manager(pages=4)
    assert store(kv, PROMPT[:4]) == [1]
    assert store(kv, [1, 2, 3]) == [2]  # no full block
    ctx = claimed(kv, range(50, 66))
    kv.alloc(ctx, num_tokens=9)
    assert row(kv, ctx) == [2, 3, 4]
    assert hit(kv, PROMPT) == 4


def test_blocks_that_a_request_uses_are_never_evicted() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:8])
    user = claimed(kv, PROMPT[:9])
    kv.alloc(user)
    greedy = claimed(kv, range(50, 58))
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(greedy)
    assert hit(kv, PROMPT) == 8
    assert row(kv, user) == [1, 2, 3]


def test_of_a_branch_only_what_no_request_uses_is_evicted() -> None:
    kv = manager(pages=9, page_size=2)
    user = prefilled(kv, PROMPT[:12])
    branch = [*PROMPT[:6], *range(50, 56)]
    store(kv, branch)  # three blocks of the user's, and three of its own
    greedy = claimed(kv, range(60, 68))
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(greedy)  # four pages
    kv.alloc(greedy, num_tokens=6)
    assert (hit(kv, branch), hit(kv, PROMPT)) == (6, 12)
    kv.release([user, greedy])
    assert free(kv) == 9


def test_a_prompt_of_the_size_of_the_pool_evicts_all_others_and_nothing_of_its_own() -> None:
    kv = manager(pages=8)
    cached = range(100, 132)
    store(kv, cached)
    prompt = range(50, 82)
    ctx = claimed(kv, prompt)
    for chunk in range(1, 9):
        compute(kv, ctx, num_tokens=4)
        assert hit(kv, [*cached, 0]) == 32 - 4 * chunk
        assert hit(kv, [*prompt, 0]) == 4 * chunk


def test_a_hit_that_was_seen_and_evicted_meanwhile_is_not_served() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:12])
    waiting = claimed(kv, PROMPT[:13])
    assert hit(kv, PROMPT) == 12
    store(kv, range(50, 66))
    kv.alloc(waiting)
    assert (waiting.cached_prefix_length, waiting.active_length) == (0, 13)


def test_a_thousand_of_ten_thousand_cached_blocks_are_evicted_in_the_order_of_their_release() -> None:
    kv = manager(pages=10_000)
    for start in range(0, 40_000, 400):
        store(kv, range(start, start + 400))
    kv.alloc(claimed(kv, range(100_000, 104_000)))
    kept = [hit(kv, range(start, start + 401)) for start in range(0, 40_000, 400)]
    assert kept == [0] * 10 + [400] * 90


# Policies (PAGE-19)

HOT_BLOCKS_LEFT = {"priority_lru": 0, "priority_slru": 64}


@pytest.mark.parametrize("policy", pk.EvictionPolicy)
def test_what_a_scan_leaves_of_blocks_that_were_used_a_thousand_times(policy: pk.EvictionPolicy) -> None:
    kv = manager(pages=2_048, eviction_policy=policy)
    hot = range(64 * 4)
    for _ in range(1_000):
        store(kv, [*hot, -1])
    assert kv.metrics()["reused_blocks"] == 999 * 64
    for scan in range(1, 65):  # once, and never again
        ctx = claimed(kv, range(1_000 * scan, 1_000 * scan + 64 * 4))
        compute(kv, ctx, num_tokens=32 * 4)
        compute(kv, ctx)
        kv.release(ctx)
    left = HOT_BLOCKS_LEFT[policy]
    store(kv, [*hot, -1])
    counted = kv.metrics()
    assert counted["reused_blocks"] == 999 * 64 + left
    assert counted["published_blocks"] == 64 + 64 * 64 + 64 - left
    # In the end every page but that of the last token holds a block; the other blocks were evicted.
    assert counted["evictions"] == counted["published_blocks"] - 2_047


# Reset (PAGE-21)


def test_reset_forgets_what_is_cached_and_loses_no_page() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:16])
    kv.reset_prefix_cache()
    assert hit(kv, PROMPT) == 0
    assert free(kv) == 4


def test_what_a_running_request_computed_before_a_reset_is_never_found() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    kv.reset_prefix_cache()
    assert hit(kv, PROMPT) == 0
    kv.release(ctx)
    assert hit(kv, PROMPT) == 0


def test_a_running_request_stores_nothing_after_a_reset() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, PROMPT[:8])
    compute(kv, ctx, num_tokens=4)
    kv.reset_prefix_cache()
    compute(kv, ctx)
    assert ctx.processed_length == 8
    kv.release(ctx)
    assert hit(kv, PROMPT) == 0


def test_a_request_that_is_truncated_to_nothing_after_a_reset_shares_again() -> None:
    kv = manager(pages=4, page_size=4)
    ctx = prefilled(kv, range(9))
    kv.reset_prefix_cache()
    ctx.truncate(0)
    for token in range(9):
        ctx.update(token)
    compute(kv, ctx)
    kv.release(ctx)
    assert hit(kv, range(9)) == 8


def test_a_forward_that_a_reset_overtakes_stores_nothing() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    kv.reset_prefix_cache()
    kv.step(ctx)
    assert hit(kv, PROMPT) == 0


def test_a_request_that_began_before_a_reset_does_not_mix_in_new_blocks() -> None:
    kv = manager(pages=8)
    old = claimed(kv, PROMPT[:13])
    compute(kv, old, num_tokens=4)
    kv.reset_prefix_cache()
    store(kv, PROMPT[:12])
    kv.alloc(old)
    assert (old.processed_length, old.cached_prefix_length) == (4, 0)


def test_a_request_that_starts_over_after_a_reset_stores_again() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    kv.reset_prefix_cache()
    kv.preempt(ctx)
    compute(kv, ctx)
    assert hit(kv, PROMPT) == 8
