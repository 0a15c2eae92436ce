"""How long blocks are kept, and what is forgotten on purpose (PAGE-13, PAGE-14, MGR-15).

Blocks have four tokens. Times are told: `kv.begin_step(now=...)` is the clock.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, request, store
from model.memory import PageMemory
from model.tier import Tier
from pagekeeper.events import Event, Removed, Stored, Updated, block_key

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks."""
A, B, C = list(range(100, 104)), list(range(200, 204)), list(range(300, 304))
"""A block each."""

MADE: list[pk.PagedKVCacheManager] = []


@pytest.fixture(autouse=True)
def the_books_are_in_order_after_each_test() -> Iterator[None]:
    MADE.clear()
    yield
    for kv in MADE:
        kv.verify()


def cache(pages: int = 16, **options: Any) -> pk.PagedKVCacheManager:
    kv = manager(pages, event_buffer_max_size=100, **options)
    kv.begin_step(now=0.0)
    MADE.append(kv)
    return kv


def kept(*ranges: pk.TokenRangeRetention, **decode: Any) -> pk.RetentionConfig:
    return pk.RetentionConfig(ranges, **decode)


def whole(priority: Any, **limit: Any) -> pk.RetentionConfig:
    """This priority for all of a prompt."""
    return kept(pk.TokenRangeRetention(0, priority=priority, **limit))


def hashes(tokens: list[int], **options: Any) -> tuple[int, ...]:
    return tuple(map(block_key, pk.hash_blocks(tokens, 4, **options)))


def priorities(kv: pk.PagedKVCacheManager, tokens: list[int]) -> list[int | None]:
    """The priority of each full block of the prompt; None for one that is not cached."""
    stored = [event for event in kv.event_snapshot().events if isinstance(event, Stored)]
    of = {key: event.priority for event in stored for key in event.hashes}
    return [of.get(key) for key in hashes(tokens)]


def news(kv: pk.PagedKVCacheManager) -> list[Event]:
    """Events since the last call."""
    return kv.get_latest_events()


def cached(kv: pk.PagedKVCacheManager, *prompts: list[int]) -> list[bool]:
    """Which of these prompts of one block are cached."""
    return [hit(kv, [*prompt, 0]) == 4 for prompt in prompts]


def evict(kv: pk.PagedKVCacheManager, pages: int = 1) -> None:
    """Takes pages, which stand for nothing afterwards."""
    store(kv, range(1000, 1000 + 4 * pages), no_store=True)


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


# Pins


def test_pinned_blocks_are_kept_after_the_release_whatever_room_others_want() -> None:
    kv = cache(pages=4)
    ctx = prefilled(kv, PROMPT[:9])
    kv.pin(ctx)
    kv.release(ctx)
    assert free(kv) == 2  # the page of the last token is not pinned
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(claimed(kv, range(1000, 1012)))
    assert (refused.value.needed, refused.value.free, refused.value.pinned) == (3, 2, 2)
    evict(kv, pages=2)
    assert hit(kv, PROMPT) == 8


def test_blocks_are_evicted_like_others_after_the_pin() -> None:
    kv = cache(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    pin = kv.pin(ctx)
    kv.release(ctx)
    kv.unpin(pin)
    assert (free(kv), hit(kv, PROMPT)) == (4, 8)
    evict(kv, pages=4)
    assert hit(kv, PROMPT) == 0


def test_the_end_of_a_pin_counts_as_a_release() -> None:
    kv = cache(pages=2)
    ctx = prefilled(kv, A)
    pin = kv.pin(ctx)
    kv.release(ctx)
    store(kv, B)
    kv.unpin(pin)
    evict(kv)
    assert cached(kv, A, B) == [True, False]


def test_a_pin_ends_once() -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    first = kv.pin(ctx)
    kv.unpin(first)
    second = kv.pin(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=f"pin {first}: unknown"):
        kv.unpin(first)
    assert kv.fingerprint() == before
    kv.unpin(second)


def test_each_pin_of_a_block_holds_it() -> None:
    kv = cache(pages=4)
    ctx = prefilled(kv, A)
    pins = [kv.pin(ctx), kv.pin(ctx)]
    kv.release(ctx)
    kv.unpin(pins[0])
    assert free(kv) == 3
    kv.unpin(pins[1])
    assert free(kv) == 4


def test_a_pin_holds_stored_blocks_alone() -> None:
    kv = cache(pages=4)
    ctx = claimed(kv, PROMPT[:12])
    kv.pin(ctx)  # nothing is computed
    compute(kv, ctx, num_tokens=6)
    kv.pin(ctx)  # the first block
    compute(kv, ctx)
    kv.release(ctx)
    assert free(kv) == 3


def test_a_pin_after_a_reset_holds_nothing() -> None:
    kv = cache(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    kv.reset_prefix_cache()
    kv.unpin(kv.pin(ctx))
    kv.pin(ctx)
    kv.release(ctx)
    assert free(kv) == 4


def test_blocks_that_were_pinned_before_a_reset_are_forgotten_and_their_pages_held() -> None:
    kv = cache(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    pin = kv.pin(ctx)
    kv.release(ctx)
    kv.reset_prefix_cache()
    assert (free(kv), hit(kv, PROMPT)) == (2, 0)
    kv.unpin(pin)
    assert free(kv) == 4


def test_a_request_with_a_copy_of_its_own_pins_the_stored_block() -> None:
    kv = cache(pages=2, on_duplicate="private")
    store(kv, A)
    ctx = prefilled(kv, A)
    kv.pin(ctx)
    kv.release(ctx)
    evict(kv)
    assert (free(kv), cached(kv, A)) == (1, [True])


def test_a_padding_request_is_not_pinned() -> None:
    kv = cache()
    ctx = request([1])
    kv.alloc_dummy(ctx)
    with pytest.raises(ValueError, match="padding"):
        kv.pin(ctx)


# Session hints


def test_blocks_of_a_session_that_comes_back_soon_outlive_others() -> None:
    kv = cache(pages=2)
    ctx = prefilled(kv, A)
    kv.session_hint(ctx, "resume_soon")
    kv.release(ctx)
    store(kv, B)
    evict(kv)
    assert cached(kv, A, B) == [True, False]


@pytest.mark.parametrize(
    ("options", "priority", "ends"),
    [({}, 80, 600.0), ({"priority": 60, "duration_ms": 100}, 60, 0.1)],
    ids=["the defaults", "as given"],
)
def test_a_session_is_waited_for_from_its_release_on(options: Any, priority: int, ends: float) -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    kv.session_hint([ctx], "resume_soon", **options)
    kv.begin_step(now=1000.0)
    kv.release(ctx)
    kv.begin_step(now=1000.0 + ends - 0.01)
    assert priorities(kv, A) == [priority]
    kv.begin_step(now=1000.0 + ends + 0.01)
    assert priorities(kv, A) == [35]


def test_a_session_may_be_waited_for_without_end() -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    kv.session_hint(ctx, "resume_soon", priority=60, duration_ms=None)
    kv.release(ctx)
    kv.begin_step(now=1e12)
    assert priorities(kv, A) == [60]


@pytest.mark.parametrize(
    ("retention", "at", "priority"),
    [
        (whole(90, duration_ms=1), 0.0, 90),  # higher
        (whole(80), 1e6, 80),  # for ever
        (whole(80, duration_ms=2000), 1.5, 80),  # longer
        (whole(80, duration_ms=10), 0.5, 80),  # shorter: the hint's
        (whole(80, expires_at=9.0), 5.0, 80),
        (whole(80, expires_at=0.1), 0.5, 80),
        (whole(20), 0.5, 80),
    ],
)
def test_a_hint_takes_no_priority_and_no_time_away(
    retention: pk.RetentionConfig, at: float, priority: int
) -> None:
    kv = cache()
    ctx = prefilled(kv, A, retention=retention)
    kv.session_hint(ctx, "resume_soon", priority=80, duration_ms=1000)
    kv.release(ctx)
    kv.begin_step(now=at)
    assert priorities(kv, A) == [priority]


def test_blocks_of_a_session_that_is_over_go_first() -> None:
    kv = cache(pages=2)
    store(kv, A, retention=whole(1))
    ctx = prefilled(kv, B)
    kv.session_hint(ctx, "done")
    kv.release(ctx)
    evict(kv)
    assert cached(kv, A, B) == [True, False]


def test_of_a_session_that_is_over_a_system_prompt_that_others_have_stays() -> None:
    kv = cache()
    system = PROMPT[:8]
    over = prefilled(kv, [*system, *A])
    store(kv, [*system, *B])
    news(kv)
    kv.session_hint(over, "done")
    assert priorities(kv, [*system, *A]) == [35, 35, 0]
    assert priorities(kv, [*system, *B]) == [35, 35, 35]
    assert news(kv) == [Updated(3, 0, 0, None, hashes([*system, *A])[2], (35, 0), None)]


def test_of_a_session_that_shares_nothing_every_block_goes() -> None:
    kv = cache()
    ctx = prefilled(kv, PROMPT[:12])
    kv.session_hint(ctx, "done")
    assert priorities(kv, PROMPT[:12]) == [0, 0, 0]


def test_what_another_request_reads_stays_until_that_is_over_too() -> None:
    kv = cache()
    one, other = prefilled(kv, [*PROMPT[:4], *A]), prefilled(kv, [*PROMPT[:4], 1])
    kv.session_hint(one, "done")
    kv.release(one)
    assert priorities(kv, [*PROMPT[:4], *A]) == [35, 0]
    evict(kv, pages=16 - 2)  # every page that nobody reads: the branch is gone
    kv.session_hint(other, "done")
    assert priorities(kv, [*PROMPT[:4], *A]) == [0, None]


def test_what_a_fork_reads_stays() -> None:
    kv = cache()
    ctx = prefilled(kv, PROMPT[:9])
    kv.fork(ctx)
    kv.session_hint(ctx, "done")
    assert priorities(kv, PROMPT[:8]) == [35, 35]


def test_what_is_pinned_stays() -> None:
    kv = cache()
    ctx = claimed(kv, [*A, *B])
    compute(kv, ctx, num_tokens=4)
    kv.pin(ctx)
    compute(kv, ctx)
    kv.session_hint(ctx, "done")
    assert priorities(kv, [*A, *B]) == [35, 0]


def test_a_block_that_another_request_stored_and_holds_stays_where_this_one_has_a_copy() -> None:
    kv = cache(on_duplicate="private")
    prefilled(kv, A)
    copy = prefilled(kv, A)
    kv.session_hint(copy, "done")
    assert priorities(kv, A) == [35]


def test_a_session_that_goes_on_all_the_same_ends_the_hint_by_a_retention_of_its_own() -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    kv.session_hint(ctx, "done")
    kv.release(ctx)
    store(kv, [*A, 0])
    assert priorities(kv, A) == [0]
    store(kv, [*A, 0], retention=whole("medium"))
    assert priorities(kv, A) == [35]


@pytest.mark.parametrize("hint", ["resume_soon", "done"])
def test_a_hint_for_blocks_that_a_reset_forgot_changes_nothing(hint: Any) -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    kv.reset_prefix_cache()
    news(kv)
    kv.session_hint(ctx, hint)
    assert news(kv) == []


def test_a_batch_of_hints_is_refused_as_a_whole() -> None:
    kv = cache()
    ctx = prefilled(kv, A)
    with pytest.raises(ValueError, match="not claimed"):
        kv.session_hint([ctx, request([1])], "done")
    assert priorities(kv, A) == [35]


# Truncation of prefixes


def test_blocks_behind_a_prefix_are_forgotten_and_counted() -> None:
    kv = cache(pages=8)
    store(kv, PROMPT)
    assert kv.truncate_prefix(PROMPT[:8]) == 3
    assert (hit(kv, [*PROMPT, 0]), free(kv)) == (8, 8)
    assert kv.metrics()["truncated_blocks"] == 3
    assert kv.truncate_prefix(PROMPT[:8]) == 0


def test_only_full_blocks_of_the_tokens_count_as_the_prefix() -> None:
    kv = cache()
    store(kv, PROMPT)
    assert kv.truncate_prefix(PROMPT[:7]) == 4
    assert hit(kv, PROMPT) == 4


def test_every_branch_behind_the_prefix_goes_and_those_beside_it_stay() -> None:
    kv = cache()
    for branch in ([*PROMPT[:8], *A], [*PROMPT[:8], *B, *C], [*PROMPT[:4], *C]):
        store(kv, branch)
    assert kv.truncate_prefix(PROMPT[:8]) == 3
    assert hit(kv, [*PROMPT[:4], *C, 0]) == 8
    assert hit(kv, PROMPT) == 8


def test_blocks_that_requests_use_or_that_are_pinned_are_kept() -> None:
    kv = cache()
    ctx = prefilled(kv, [*PROMPT[:4], *A])
    kv.pin(ctx)
    kv.release(ctx)
    prefilled(kv, [*PROMPT[:4], *B])
    store(kv, [*PROMPT[:4], *A, *C])
    store(kv, [*PROMPT[:4], *C])
    assert kv.truncate_prefix(PROMPT[:4]) == 2
    assert hit(kv, [*PROMPT[:4], *A, *C, 0]) == 8
    assert hit(kv, [*PROMPT[:4], *B, 0]) == 8
    assert hit(kv, [*PROMPT[:4], *C, 0]) == 4


def test_without_tokens_a_namespace_is_forgotten_and_no_other() -> None:
    kv = cache()
    for options in ({}, {"cache_salt": "a"}, {"cache_salt": "a", "lora_id": 1}):
        store(kv, PROMPT[:8], **options)
    store(kv, A, cache_salt="a")
    assert kv.truncate_prefix([], salt="a") == 3
    assert hit(kv, PROMPT) == 8
    assert hit(kv, PROMPT, salt="a") == 0
    assert hit(kv, PROMPT, salt="a", lora_id=1) == 8


def test_a_prefix_that_was_never_stored_has_nothing_behind_it() -> None:
    kv = cache()
    store(kv, PROMPT)
    assert kv.truncate_prefix(A) == 0
    assert kv.truncate_prefix([*PROMPT, *A]) == 0
    assert kv.truncate_prefix(PROMPT[:4], salt="nobody") == 0


def test_what_follows_an_evicted_prefix_is_forgotten_too() -> None:
    kv = cache(pages=3)
    store(kv, PROMPT[:12], retention=kept(pk.TokenRangeRetention(0, 4, 0)))
    evict(kv)
    assert priorities(kv, PROMPT[:12]) == [None, 35, 35]
    assert kv.truncate_prefix(PROMPT[:4]) == 2
    assert priorities(kv, PROMPT[:12]) == [None, None, None]


def test_forgotten_blocks_are_told_as_removed() -> None:
    kv = cache()
    store(kv, PROMPT[:12])
    news(kv)
    kv.truncate_prefix(PROMPT[:4])
    (event,) = news(kv)
    assert isinstance(event, Removed)
    assert sorted(event.hashes) == sorted(hashes(PROMPT[:12])[1:])


def test_forgotten_pages_are_handed_out_before_cached_ones() -> None:
    kv = cache(pages=2)
    store(kv, A)
    store(kv, B, cache_salt="a")  # released later
    kv.truncate_prefix([], salt="a")
    evict(kv)
    assert cached(kv, A) == [True]


def test_a_forgotten_block_can_be_stored_again() -> None:
    kv = cache()
    store(kv, PROMPT[:12])
    kv.truncate_prefix(PROMPT[:4])
    store(kv, PROMPT[:12])
    assert hit(kv, PROMPT) == 12
