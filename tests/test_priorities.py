"""Which block goes by its own priority and time, wherever in its prefix it is (PAGE-13 to PAGE-15).

Blocks have four tokens. Times are told: `kv.begin_step(now=...)` is the clock.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, hit, prefilled, store
from model.shelf import MADE, PROMPT, A, B, C, cache, cached, evict, kept, priorities, whole


@pytest.fixture(autouse=True)
def the_books_are_in_order_after_each_test() -> Iterator[None]:
    MADE.clear()
    yield
    for kv in MADE:
        kv.verify()


def there(kv: pk.PagedKVCacheManager, tokens: list[int]) -> list[bool]:
    """Which full blocks of the prompt are stored, also those that no look-up gets to."""
    return [priority is not None for priority in priorities(kv, tokens)]


# Of several requests


def test_blocks_of_low_priorities_make_room_and_those_of_high_ones_stay() -> None:
    kv = cache(pages=16)
    prompts = {priority: list(range(100 * priority, 100 * priority + 12)) for priority in (90, 5, 80, 20)}
    for priority, prompt in prompts.items():
        store(kv, prompt, retention=whole(priority))
    evict(kv, pages=10)  # four pages are left of nobody
    assert {priority: hit(kv, [*prompt, 0]) for priority, prompt in prompts.items()} == {
        5: 0,
        20: 0,
        80: 12,
        90: 12,
    }


# Times


@pytest.mark.parametrize(
    ("now", "order"),
    [
        (0.002, [[0, 1, 1], [0, 0, 1]]),  # 35, 50, 80
        (0.004, [[0, 1, 1], [0, 1, 0]]),  # the one of 80 is 35 now, released after the plain one
        (0.009, [[0, 1, 1], [0, 0, 1]]),  # all are 35, and go in the order of their release
    ],
)
def test_of_two_that_are_kept_for_a_time_the_one_whose_time_is_over_goes_first(
    now: float, order: Any
) -> None:
    kv = cache(pages=3)
    store(kv, A)
    store(kv, B, retention=whole(50, duration_ms=8))
    store(kv, C, retention=whole(80, duration_ms=3))
    kv.begin_step(now=now)
    seen = []
    for taken in (1, 2):
        kv.alloc(claimed(kv, range(1000, 1004), no_read=True, no_store=True))
        seen.append([int(block) for block in cached(kv, A, B, C)])
        assert kv.block_count().used == taken
    assert seen == order


def test_a_prompt_whose_time_is_over_goes_before_one_of_a_lower_priority_without_an_end() -> None:
    for now, left in ((0.009, [True, False]), (0.01, [False, True])):
        kv = cache(pages=2)
        store(kv, A, retention=whole(80, duration_ms=10))
        store(kv, B, retention=whole(50))
        kv.begin_step(now=now)
        evict(kv)
        assert cached(kv, A, B) == left


def test_generated_blocks_whose_time_is_over_go_before_others_of_a_lower_priority() -> None:
    for now, left in ((0.009, [True, True]), (0.01, [True, False])):
        kv = cache(pages=4)
        retention = kept(pk.TokenRangeRetention(0, priority=90), decode_priority=80, decode_duration_ms=10)
        ctx = claimed(kv, A, retention=retention)
        for token in [*B, 0]:
            compute(kv, ctx, new_tokens=[token])
        kv.release(ctx)  # two blocks, and a page for what follows
        store(kv, C, retention=whole(50))
        kv.begin_step(now=now)
        evict(kv, pages=2)
        assert there(kv, [*A, *B]) == left
        assert cached(kv, C) == [not left[1]]


# Within one request


def test_a_decode_priority_above_that_of_the_prompt_keeps_what_was_generated() -> None:
    kv = cache(pages=3)
    ctx = claimed(kv, A, retention=kept(pk.TokenRangeRetention(0, priority=20), decode_priority=80))
    for token in [*B, 0]:
        compute(kv, ctx, new_tokens=[token])
    kv.release(ctx)
    evict(kv, pages=2)  # the page of the last token, and one block
    assert there(kv, [*A, *B]) == [False, True]


def test_a_block_in_the_middle_goes_alone_by_its_own_priority() -> None:
    kv = cache(pages=5)
    retention = kept(
        pk.TokenRangeRetention(4, 8, 5),
        pk.TokenRangeRetention(8, 12, 75),
        pk.TokenRangeRetention(12, None, 80),
    )
    store(kv, PROMPT[:16], retention=retention)
    evict(kv, pages=2)  # the fifth page was never used
    assert there(kv, PROMPT[:16]) == [True, False, True, True]
    assert hit(kv, PROMPT) == 4
    evict(kv, pages=3)
    assert there(kv, PROMPT[:16]) == [False, False, True, True]


def test_blocks_below_one_that_went_are_found_again_when_it_is_computed_again() -> None:
    kv = cache(pages=5)
    store(kv, PROMPT[:16], retention=kept(pk.TokenRangeRetention(4, 8, 5)))
    evict(kv, pages=2)
    assert hit(kv, PROMPT) == 4
    again = claimed(kv, PROMPT[:9])
    compute(kv, again)
    assert again.cached_prefix_length == 4
    assert hit(kv, PROMPT) == 16
    kv.release(again)


def test_a_branch_may_be_stored_below_a_block_that_went() -> None:
    kv = cache(pages=6)
    store(kv, PROMPT[:16], retention=kept(pk.TokenRangeRetention(4, 8, 5)))
    evict(kv, pages=3)
    assert there(kv, PROMPT[:16]) == [True, False, True, True]
    branch = [*PROMPT[:8], *A]
    ctx = prefilled(kv, branch)
    assert ctx.cached_prefix_length == 4
    assert there(kv, branch) == [True, True, True]
    kv.release(ctx)
    assert hit(kv, [*branch, 0]) == 12
