"""What is kept and forgotten on purpose: pins, hints about sessions, truncated prefixes (MGR-15).

Blocks have four tokens. Times are told: `kv.begin_step(now=...)` is the clock.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, prefilled, request, store
from model.shelf import MADE, PROMPT, A, B, C, cache, cached, evict, hashes, kept, news, priorities, whole
from pagekeeper.events import Removed, Updated


@pytest.fixture(autouse=True)
def the_books_are_in_order_after_each_test() -> Iterator[None]:
    MADE.clear()
    yield
    for kv in MADE:
        kv.verify()


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


def test_a_pin_holds_blocks_that_were_there_and_new_ones() -> None:
    kv = cache(pages=6)
    store(kv, PROMPT[:8])
    ctx = prefilled(kv, PROMPT[:13])
    assert ctx.cached_prefix_length == 8
    pin = kv.pin(ctx)
    kv.release(ctx)
    assert free(kv) == 6 - 3
    kv.unpin(pin)
    assert free(kv) == 6


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
