"""How long blocks are kept (PAGE-13, PAGE-14).

Blocks have four tokens. Times are told: `kv.begin_step(now=...)` is the clock.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, prefilled, request, store
from model.memory import PageMemory
from model.shelf import MADE, PROMPT, A, B, C, cache, cached, evict, hashes, kept, news, priorities, whole
from model.tier import Tier
from pagekeeper.events import Stored, Updated


@pytest.fixture(autouse=True)
def the_books_are_in_order_after_each_test() -> Iterator[None]:
    MADE.clear()
    yield
    for kv in MADE:
        kv.verify()


# Priorities of blocks


def test_a_block_of_a_higher_priority_outlives_one_that_was_released_later() -> None:
    kv = cache(pages=2)
    store(kv, A, retention=whole(36))
    store(kv, B)
    evict(kv)
    assert cached(kv, A, B) == [True, False]


def test_a_block_of_a_lower_priority_goes_before_one_that_was_released_earlier() -> None:
    kv = cache(pages=2)
    store(kv, A)
    store(kv, B, retention=whole(34))
    evict(kv)
    assert cached(kv, A, B) == [True, False]


def test_among_equal_priorities_the_least_recently_released_goes() -> None:
    kv = cache(pages=3)
    for prompt in (A, B, C):
        store(kv, prompt, retention=whole(90))
    evict(kv)
    assert cached(kv, A, B, C) == [False, True, True]


@pytest.mark.parametrize(
    ("name", "priority"), [("low", 20), ("medium", 35), ("high", 80), (0, 0), (100, 100), (np.int8(7), 7)]
)
def test_a_priority_is_a_number_or_a_name(name: Any, priority: int) -> None:
    kv = cache()
    store(kv, A, retention=whole(name))
    assert priorities(kv, A) == [priority]


def test_the_first_token_of_a_block_decides_which_range_it_is_in() -> None:
    kv = cache()
    store(kv, PROMPT, retention=kept(pk.TokenRangeRetention(3, 9, 80), pk.TokenRangeRetention(13, 17, 5)))
    # The blocks begin at tokens 0, 4, 8, 12 and 16.
    assert priorities(kv, PROMPT) == [35, 80, 80, 35, 5]


@pytest.mark.parametrize(
    ("page_size", "ranges", "expected"),
    [
        (64, [(0, 64, 80), (64, 128, 50)], [80, 50, 35, 35]),
        (32, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30, 35, 35, 35, 35]),
        (
            64,
            [(0, 64, 80), (65, 127, 50), (200, None, 10)],
            [80, 35, 35, 35],
        ),  # no block begins in the others
        (128, [(1, 129, 80)], [35, 80]),
    ],
)
def test_ranges_hold_for_blocks_that_begin_in_them(
    page_size: int, ranges: list[tuple[int, int | None, int]], expected: list[int]
) -> None:
    kv = cache(page_size=page_size)
    prompt = list(range(256))
    store(kv, prompt, retention=kept(*(pk.TokenRangeRetention(*given) for given in ranges)))
    stored = [event for event in kv.event_snapshot().events if isinstance(event, Stored)]
    assert [event.priority for event in stored for _ in event.hashes] == expected


def test_a_block_of_the_prompt_in_no_range_is_like_all_others() -> None:
    kv = cache(default_retention_priority=50)
    store(kv, PROMPT[:8], retention=kept(pk.TokenRangeRetention(4, 5, 80), decode_priority=10))
    assert priorities(kv, PROMPT[:8]) == [50, 80]


def generate(kv: pk.PagedKVCacheManager, ctx: pk.TextContext, tokens: list[int]) -> None:
    """Computes the prompt and these tokens after it."""
    for token in [*tokens, 0]:
        compute(kv, ctx, new_tokens=[token])


def test_generated_blocks_have_the_decode_priority() -> None:
    kv = cache()
    ctx = claimed(kv, A, retention=kept(pk.TokenRangeRetention(0, priority=80), decode_priority=10))
    generate(kv, ctx, B)
    assert priorities(kv, [*A, *B]) == [80, 10]


def test_a_block_that_begins_in_the_prompt_and_ends_behind_it_is_the_prompts() -> None:
    kv = cache()
    ctx = claimed(kv, PROMPT[:6], retention=kept(pk.TokenRangeRetention(4, priority=80), decode_priority=10))
    generate(kv, ctx, PROMPT[6:8])
    assert priorities(kv, PROMPT[:8]) == [35, 80]


@pytest.mark.parametrize(("range_of_all", "priority"), [((0, 6), 80), ((0, None), 80), ((1, 6), 35)])
def test_a_block_that_is_longer_than_the_sequence_has_its_priority_once_it_is_full(
    range_of_all: tuple[int, int | None], priority: int
) -> None:
    kv = cache(page_size=128)
    prompt, retention = PROMPT[:6], kept(pk.TokenRangeRetention(*range_of_all, 80), decode_priority=10)
    store(kv, prompt, retention=retention)
    assert not any(isinstance(event, Stored) for event in kv.event_snapshot().events)  # no block is full
    ctx = claimed(kv, prompt, retention=retention)
    generate(kv, ctx, list(range(122)))
    (block,) = (event for event in kv.event_snapshot().events if isinstance(event, Stored))
    assert (len(block.hashes), block.priority) == (1, priority)


def test_what_is_generated_is_medium_unless_a_retention_says_otherwise() -> None:
    kv = cache(default_retention_priority=50)
    ctx = claimed(kv, A, retention=whole(80))
    generate(kv, ctx, B)
    assert priorities(kv, [*A, *B]) == [80, 35]


def test_a_fork_keeps_what_it_generates_like_its_parent() -> None:
    kv = cache()
    parent = prefilled(kv, [*A, 0], retention=kept(decode_priority=10))
    child = kv.fork(parent)
    for token in (1, 2, 3, 4, 5, 6, 7):
        child.update(token)
        compute(kv, child)
    assert priorities(kv, [*A, 0, 1, 2, 3, 4, 5, 6, 7]) == [35, 35, 10]


# Times


def test_case_80_a_priority_with_a_time_limit_holds_until_then_and_afterwards_recency_alone_counts() -> None:
    for now, left in ((0.05, [True, False]), (0.15, [False, True])):
        kv = cache(pages=2)
        kv.begin_step(now=0.0)
        store(kv, A, retention=whole(90, duration_ms=100))
        store(kv, B)
        kv.begin_step(now=now)
        evict(kv)
        assert cached(kv, A, B) == left


def test_a_duration_counts_from_the_last_release() -> None:
    kv = cache()
    ctx = prefilled(kv, A, retention=whole(90, duration_ms=100))
    seen = []
    for now in (5.0, 5.09):  # in use until the second
        kv.begin_step(now=now)
        seen += priorities(kv, A)
    kv.release(ctx)
    for now in (5.18, 5.2):
        kv.begin_step(now=now)
        seen += priorities(kv, A)
    assert seen == [90, 90, 90, 35]


def test_a_use_in_between_begins_the_duration_anew() -> None:
    kv = cache()
    store(kv, A, retention=whole(90, duration_ms=100))
    kv.begin_step(now=0.08)
    store(kv, [*A, 0])
    seen = []
    for now in (0.15, 0.2):
        kv.begin_step(now=now)
        seen += priorities(kv, A)
    assert seen == [90, 35]


def test_a_priority_below_the_default_ends_too() -> None:
    kv = cache(default_retention_priority=50)
    store(kv, A, retention=whole("low", duration_ms=100))
    kv.begin_step(now=1.0)
    assert priorities(kv, A) == [50]


def test_a_time_that_is_not_told_does_not_pass() -> None:
    kv = cache(pages=2)
    store(kv, A, retention=whole(90, duration_ms=1))
    time.sleep(0.01)
    store(kv, B)
    kv.begin_step()
    kv.poll_transfers()
    evict(kv)
    assert cached(kv, A, B) == [True, False]


def test_a_time_of_expiry_is_one_on_the_clock_also_for_blocks_in_use() -> None:
    kv = cache()
    kv.begin_step(now=3.0)
    prefilled(kv, A, retention=whole(90, expires_at=5))
    seen = []
    for now in (4.9, 5.0):
        kv.begin_step(now=now)
        seen += priorities(kv, A)
    assert seen == [90, 35]


def test_generated_blocks_have_a_duration_of_their_own() -> None:
    kv = cache()
    retention = kept(pk.TokenRangeRetention(0, priority=80), decode_priority=90, decode_duration_ms=100)
    ctx = claimed(kv, A, retention=retention)
    generate(kv, ctx, B)
    kv.release(ctx)
    kv.begin_step(now=1.0)
    assert priorities(kv, [*A, *B]) == [80, 35]


# Reuse


def test_a_reuse_without_retention_leaves_priority_and_time_as_they_are() -> None:
    kv = cache()
    store(kv, A, retention=whole(90, duration_ms=100))
    store(kv, [*A, 0])
    assert priorities(kv, A) == [90]
    kv.begin_step(now=0.2)
    assert priorities(kv, A) == [35]


def test_a_reuse_with_retention_sets_priority_and_time() -> None:
    kv = cache()
    store(kv, A, retention=whole(90, duration_ms=100))
    store(kv, [*A, 0], retention=whole(60))
    kv.begin_step(now=1.0)
    assert priorities(kv, A) == [60]


def test_a_reuse_leaves_blocks_in_none_of_its_ranges_as_they_are() -> None:
    kv = cache()
    store(kv, PROMPT[:8], retention=whole(90))
    store(kv, PROMPT[:9], retention=kept(pk.TokenRangeRetention(4, priority=20)))
    assert priorities(kv, PROMPT[:8]) == [90, 20]


@pytest.mark.parametrize("on_duplicate", ["adopt", "private"])
def test_a_retention_of_a_block_that_was_stored_meanwhile_is_the_stored_blocks(on_duplicate: str) -> None:
    kv = cache(on_duplicate=on_duplicate)
    store(kv, A)
    store(kv, A, retention=whole(80))  # computed anew, because it ends with the prompt's last token
    assert priorities(kv, A) == [80]


def test_blocks_that_come_from_another_tier_take_the_retention_of_who_loads_them() -> None:
    tier = Tier(PageMemory(3, 4), loads="now")
    kv = cache(pages=3, connector=tier)
    store(kv, PROMPT[:9])
    evict(kv, pages=3)
    assert priorities(kv, PROMPT[:9]) == [None, None]
    store(kv, PROMPT[:9], retention=kept(pk.TokenRangeRetention(4, priority=80)))
    assert kv.metrics()["loaded_blocks"] == 2
    assert priorities(kv, PROMPT[:9]) == [35, 80]


def test_a_block_that_falls_back_to_the_priority_of_the_one_before_it_still_goes_first() -> None:
    tier = Tier(PageMemory(3, 4), offloads="late")
    kv = cache(pages=3, connector=tier)
    retention = kept(pk.TokenRangeRetention(4, priority=80, duration_ms=100))
    ctx = claimed(kv, PROMPT[:8], retention=retention)
    for _ in range(2):
        compute(kv, ctx, num_tokens=4)  # an offload each
    kv.release(ctx)
    for copy in tier.in_flight():  # so the second block becomes evictable last
        copy.finish()
        kv.poll_transfers()
    kv.begin_step(now=1.0)
    kv.alloc(claimed(kv, range(1000, 1008), no_read=True))
    assert priorities(kv, PROMPT[:8]) == [35, None]


# Events


def test_stored_events_tell_the_priority_of_their_blocks() -> None:
    kv = cache()
    news(kv)
    store(kv, PROMPT[:12], retention=kept(pk.TokenRangeRetention(4, 12, 80)))
    told = [
        (event.first_block, event.hashes, event.priority) for event in news(kv) if isinstance(event, Stored)
    ]
    assert told == [(0, hashes(PROMPT[:4]), 35), (1, hashes(PROMPT[:12])[1:], 80)]


def test_a_change_of_priority_is_told_and_an_equal_priority_is_not() -> None:
    kv = cache()
    store(kv, A)  # events 0 and 1: what was made and stored
    news(kv)
    store(kv, [*A, 0], retention=whole(35))
    assert news(kv) == []
    store(kv, [*A, 0], retention=whole(80))
    assert news(kv) == [Updated(2, 0, 0, None, hashes(A)[0], (35, 80), None)]


def test_the_end_of_a_retention_is_told_when_the_time_is() -> None:
    kv = cache()
    store(kv, A, retention=whole(90, duration_ms=100))
    kv.begin_step(now=0.09)
    news(kv)
    kv.begin_step(now=0.1)
    assert news(kv) == [Updated(2, 0, 0, None, hashes(A)[0], (90, 35), None)]


def test_the_end_of_a_retention_of_a_forgotten_block_is_not_told() -> None:
    kv = cache()
    store(kv, A, retention=whole(90, duration_ms=100))
    kv.reset_prefix_cache()
    news(kv)
    kv.begin_step(now=1.0)
    assert news(kv) == []


# What a retention refuses

RANGES = [
    (dict(start=-1), ValueError, "start=-1: "),
    (dict(start=True), ValueError, "start=True: "),
    (dict(start=0.0), ValueError, r"start=0\.0: "),
    (dict(start=4, end=4), ValueError, "end=4: must be after start=4"),
    (dict(start=4, end=3), ValueError, "end=3: must be after start=4"),
    (dict(start=0, end=2**31), ValueError, "end=2147483648: "),
    (dict(start=0, priority=101), ValueError, "priority=101: "),
    (dict(start=0, priority=-1), ValueError, "priority=-1: "),
    (dict(start=0, priority="urgent"), ValueError, "priority='urgent': "),
    (dict(start=0, duration_ms=-1), ValueError, "duration_ms=-1: "),
    (dict(start=0, duration_ms=float("nan")), ValueError, "duration_ms=nan: "),
    (dict(start=0, duration_ms=10**400), ValueError, "duration_ms=10+"),
    (dict(start=0, duration_ms="1"), TypeError, "duration_ms: got str"),
    (dict(start=0, expires_at=float("inf")), ValueError, "expires_at=inf: "),
    (dict(start=0, expires_at=True), TypeError, "expires_at: got bool"),
    (dict(start=0, duration_ms=1, expires_at=1), ValueError, "duration_ms and expires_at: "),
]


@pytest.mark.parametrize(("given", "error", "message"), RANGES)
def test_a_range_says_what_is_wrong_with_it(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pk.TokenRangeRetention(**given)


FIRST, SECOND = pk.TokenRangeRetention(0, 8), pk.TokenRangeRetention(8, 12)
CONFIGS = [
    (dict(ranges=[SECOND, FIRST]), ValueError, r"ranges\[1\]: starts before ranges\[0\] ends, at 12"),
    (dict(ranges=[FIRST, pk.TokenRangeRetention(7, 12)]), ValueError, r"ranges\[1\]: starts before"),
    (dict(ranges=[pk.TokenRangeRetention(0), SECOND]), ValueError, r"ranges\[0\]: has no end"),
    (dict(ranges=[FIRST, (8, 12)]), TypeError, r"ranges\[1\]: got tuple"),
    (dict(ranges=FIRST), TypeError, "ranges: got TokenRangeRetention"),
    (dict(decode_priority=101), ValueError, "decode_priority=101: "),
    (dict(decode_duration_ms=-1), ValueError, "decode_duration_ms=-1: "),
]


@pytest.mark.parametrize(("given", "error", "message"), CONFIGS)
def test_a_retention_says_what_is_wrong_with_it(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pk.RetentionConfig(**given)


@pytest.mark.parametrize("past", [pk.TokenRangeRetention(8, 13), pk.TokenRangeRetention(12)])
def test_a_range_past_the_prompt_is_refused_with_the_request(past: pk.TokenRangeRetention) -> None:
    with pytest.raises(ValueError, match=r"retention: ranges\[1\]: has token 12.* of a prompt of 12 tokens"):
        request(PROMPT[:12], retention=kept(FIRST, past))


def test_a_range_may_end_with_the_prompt() -> None:
    retention = kept(FIRST, SECOND)
    assert request(PROMPT[:12], retention=retention).retention is retention
