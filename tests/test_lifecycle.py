"""A request's life: claim, alloc, step, release; chunks, late hits, room, preemption."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import SEED, claimed, compute, free, hit, manager, prefilled, request, row, store

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks of four."""


# What is computed (MGR-1b)


def test_alloc_takes_pages_for_the_tokens_of_the_next_forward() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:10])
    kv.alloc(ctx)
    assert row(kv, ctx) == [1, 2, 3]  # ceil(10 / 4)
    assert free(kv) == 5
    assert (ctx.processed_length, ctx.active_length) == (0, 10)


def test_claim_takes_no_pages() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT)
    assert free(kv) == 8
    assert kv.contains(ctx)
    assert row(kv, ctx) == []


def test_only_step_moves_the_processed_length() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    ctx.update(7)
    assert (ctx.processed_length, len(ctx.tokens)) == (0, 4)
    kv.step(ctx)
    assert (ctx.processed_length, len(ctx.tokens)) == (3, 4)


def test_max_num_input_tokens_cuts_a_prompt_into_chunks() -> None:
    kv = manager(pages=8, max_num_input_tokens=4)
    ctx = claimed(kv, PROMPT[:10])
    seen = []
    for _ in range(3):
        kv.alloc(ctx)
        seen.append((ctx.processed_length, ctx.active_length, len(row(kv, ctx))))
        kv.step(ctx)
    assert seen == [(0, 4, 1), (4, 4, 2), (8, 2, 3)]


def test_num_tokens_bounds_each_request_of_a_batch() -> None:
    kv = manager(pages=8)
    a, b = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[9:18])
    kv.alloc([a, b], num_tokens=[3, 5])
    assert (a.active_length, b.active_length) == (3, 5)
    assert (len(row(kv, a)), len(row(kv, b))) == (1, 2)


def test_one_num_tokens_bounds_every_request_of_a_batch() -> None:
    kv = manager(pages=8)
    a, b = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[9:11])
    kv.alloc([a, b], num_tokens=5)
    assert (a.active_length, b.active_length) == (5, 2)


def test_reserving_the_prompt_takes_all_its_pages_with_the_first_chunk() -> None:
    kv = manager(pages=8, reserve="prompt", max_num_input_tokens=4)
    ctx = claimed(kv, PROMPT[:10])
    kv.alloc(ctx)
    assert ctx.active_length == 4
    assert row(kv, ctx) == [1, 2, 3]


def test_a_block_is_stored_when_its_last_token_has_kv_and_not_before() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    compute(kv, ctx, new_tokens=[PROMPT[3]])
    assert hit(kv, PROMPT) == 0  # block 0 is full, its last token is not computed
    compute(kv, ctx, new_tokens=[PROMPT[4]])
    assert hit(kv, PROMPT) == 4


def test_a_prompt_that_was_allocated_and_not_computed_is_never_a_hit() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:16])
    kv.alloc(ctx)
    kv.release(ctx)
    assert hit(kv, PROMPT) == 0
    assert free(kv) == 8


@pytest.mark.parametrize(("computed", "found"), [(5, 4), (8, 8), (15, 12), (16, 16)])
def test_what_is_stored_of_a_prompt_in_mid_prefill_is_what_was_computed(computed: int, found: int) -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:16])
    compute(kv, ctx, num_tokens=computed)
    kv.release(ctx)
    assert hit(kv, PROMPT) == found


def test_a_finished_prompt_is_stored_whole_and_its_sampled_token_is_not() -> None:
    kv = manager(page_size=3, pages=8, max_num_input_tokens=8)
    ctx = claimed(kv, PROMPT)  # 20 tokens and a sampled one would be 7 blocks of 3
    compute(kv, ctx)
    compute(kv, ctx)
    compute(kv, ctx, new_tokens=[99])
    kv.release(ctx)
    assert hit(kv, [*PROMPT, 99, 0]) == 18


def test_release_without_step_stores_nothing_more() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    compute(kv, ctx, new_tokens=[PROMPT[3]])
    kv.alloc(ctx)  # the forward that computes the fourth token runs, and its result never comes
    kv.release(ctx)
    assert hit(kv, PROMPT) == 0


def test_several_new_tokens_of_one_step_are_computed_by_the_next() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[5, 6, 7], counts=[3])
    kv.alloc(ctx)
    assert (ctx.processed_length, ctx.active_length, len(row(kv, ctx))) == (3, 3, 2)


def test_an_unfinished_prompt_takes_no_token_while_its_neighbour_takes_one() -> None:
    kv = manager()
    a, b = claimed(kv, PROMPT[:8]), claimed(kv, PROMPT[8:11])
    kv.alloc([a, b], num_tokens=4)
    kv.step([a, b], new_tokens=[99], counts=[0, 1])
    assert a.tokens.all.tolist() == PROMPT[:8]
    assert b.tokens.all.tolist() == [*PROMPT[8:11], 99]


# Arrays are the real form (API-1, MGR-2)


def test_slots_in_an_array_do_what_a_list_of_contexts_does() -> None:
    kv = manager(pages=8)
    a, b = request(PROMPT[:5]), request(PROMPT[5:9])
    slots = np.array([kv.claim(a), kv.claim(b)], np.int32)
    kv.alloc(slots)
    kv.step(slots, new_tokens=np.array([1, 2], np.int32))
    assert (a.processed_length, b.processed_length) == (5, 4)
    assert (a.tokens.all.tolist()[-1], b.tokens.all.tolist()[-1]) == (1, 2)
    kv.release(slots)
    assert not kv.contains(a)
    assert free(kv) == 8


def test_one_request_gives_one_transfer_and_a_list_gives_a_list() -> None:
    kv = manager()
    a, b = claimed(kv, PROMPT[:2]), claimed(kv, PROMPT[2:4])
    assert isinstance(kv.alloc(a), pk.CompletedTransfer)
    transfers = kv.alloc([b])
    assert isinstance(transfers, list)
    assert [transfer.is_complete() for transfer in transfers] == [True]


def test_a_batch_that_does_not_fit_takes_nothing_and_names_the_first_that_did_not() -> None:
    kv = manager(pages=4)
    a, b, c = claimed(kv, PROMPT[:8]), claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[:1])
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc([a, b, c])  # 2 + 3 pages of 4
    assert refused.value.request_id == b.request_id
    assert kv.fingerprint() == before
    assert free(kv) == 4


@dataclass
class EngineRequest:
    """A request class of somebody else's engine."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = None


def test_an_engines_own_request_is_read_at_claim_and_fed_by_its_slot() -> None:
    kv = manager(pages=4)
    slots = np.array([kv.claim(EngineRequest("theirs", PROMPT[:8], cache_salt="a"))], np.int32)
    kv.alloc(slots)
    kv.step(slots, new_tokens=[7])
    kv.release(slots)
    assert hit(kv, PROMPT, salt="a") == 8
    assert hit(kv, PROMPT) == 0


# Reuse at every alloc before the prompt is finished (MGR-6)


def test_a_request_in_mid_prefill_profits_from_what_a_sibling_stored_meanwhile() -> None:
    kv = manager(pages=12)
    late = claimed(kv, PROMPT[:13])
    compute(kv, late, num_tokens=4)
    sibling = prefilled(kv, [*PROMPT[:12], 99])
    kv.alloc(late)
    assert (late.processed_length, late.active_length, late.cached_prefix_length) == (12, 1, 8)
    assert row(kv, late)[:3] == row(kv, sibling)[:3]


def test_a_late_hit_takes_the_place_of_a_block_in_progress() -> None:
    kv = manager(pages=6)
    late = claimed(kv, PROMPT[:9])
    compute(kv, late, num_tokens=2)
    sibling = prefilled(kv, PROMPT[:8])
    assert free(kv) == 3
    kv.alloc(late)
    assert row(kv, late)[:2] == row(kv, sibling)
    assert free(kv) == 3  # one page given back, one taken for the ninth token


def test_a_hit_never_moves_the_position_back() -> None:
    kv = manager(pages=8)
    ahead = claimed(kv, PROMPT[:16])
    compute(kv, ahead, num_tokens=10)
    assert hit(kv, PROMPT) == 8
    kv.alloc(ahead)
    assert (ahead.processed_length, ahead.active_length, ahead.cached_prefix_length) == (10, 6, 0)


def test_a_hit_at_the_first_alloc_is_processed_before_any_forward() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:8])
    ctx = claimed(kv, PROMPT[:9])
    kv.alloc(ctx)
    assert (ctx.processed_length, ctx.active_length, ctx.cached_prefix_length) == (8, 1, 8)


def test_no_read_computes_what_is_cached() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:8])
    ctx = claimed(kv, PROMPT[:9], no_read=True)
    kv.alloc(ctx)
    assert (ctx.processed_length, ctx.active_length, ctx.cached_prefix_length) == (0, 9, 0)


def test_no_store_leaves_nothing_behind() -> None:
    kv = manager()
    store(kv, PROMPT[:8], no_store=True)
    assert hit(kv, PROMPT) == 0


def test_no_store_still_reads() -> None:
    kv = manager()
    store(kv, PROMPT[:8])
    ctx = claimed(kv, PROMPT[:9], no_store=True)
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = manager(enable_prefix_caching=False)
    store(kv, PROMPT[:8])
    assert hit(kv, PROMPT) == 0
    ctx = claimed(kv, PROMPT[:9])
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 0
    kv.step(ctx)
    assert kv.commit_and_get_block_hashes(ctx) == []


# Room (PAGE-20, MGR-5)


def test_a_request_is_given_its_predecessors_tail_and_keeps_the_hits_before_it() -> None:
    kv = manager(pages=4)
    assert store(kv, PROMPT[:16]) == [1, 2, 3, 4]
    ctx = claimed(kv, [*PROMPT[:12], 99])
    kv.alloc(ctx)
    assert row(kv, ctx) == [1, 2, 3, 4]
    assert ctx.cached_prefix_length == 12
    assert hit(kv, PROMPT) == 12


def test_cached_pages_that_a_request_hits_are_no_room_for_it() -> None:
    kv = manager(pages=5)
    store(kv, PROMPT[:16])
    prefilled(kv, [1])
    ctx = claimed(kv, [*PROMPT[:12], *range(90, 98)])  # five pages: three are hits, one of the rest is free
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(ctx)
    assert type(refused.value) is pk.InsufficientBlocksError
    assert refused.value.needed == 2
    assert kv.fingerprint() == before
    assert free(kv) == 4
    assert hit(kv, PROMPT) == 16


def test_a_request_that_the_whole_pool_cannot_hold_is_told_so() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:16])
    ctx = claimed(kv, [*PROMPT[:12], *range(90, 98)])  # 20 tokens, the pool holds 16
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(ctx)
    assert free(kv) == 4
    assert hit(kv, PROMPT) == 16


def test_a_chunk_that_would_fit_does_not_hide_a_prompt_that_never_will() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, range(17))
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(ctx, num_tokens=4)


def test_a_batch_takes_all_its_hits_before_any_of_its_requests_gets_a_page() -> None:
    kv = manager(pages=4)
    assert store(kv, PROMPT[:8]) == [1, 2]
    assert store(kv, range(60, 68)) == [3, 4]
    other, reader = claimed(kv, [1, 2, 3, 4]), claimed(kv, PROMPT[:9])
    kv.alloc([other, reader])  # page 2 is the oldest, and a hit of the second request
    assert row(kv, other) == [4]
    assert row(kv, reader) == [1, 2, 3]


def test_hits_of_one_request_are_no_room_for_another_of_its_batch() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:8])
    other, reader = claimed(kv, range(50, 59)), claimed(kv, PROMPT[:9])
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc([other, reader])  # 3 pages leave one of the reader's two hits
    assert refused.value.request_id == reader.request_id
    assert hit(kv, PROMPT) == 8


def test_of_two_half_computed_prompts_the_one_that_fits_goes_on() -> None:
    kv = manager(pages=2_048, page_size=1)
    large, small = claimed(kv, range(1_600)), claimed(kv, range(5_000, 6_200))
    compute(kv, large, num_tokens=512)
    compute(kv, small, num_tokens=736)
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(large)  # 1,088 pages, and 800 are free
    compute(kv, small)  # 464
    assert small.processed_length == 1_200
    kv.release(small)
    compute(kv, large)
    assert large.processed_length == 1_600


def test_prompts_that_are_reserved_whole_never_lack_room_half_computed() -> None:
    kv = manager(pages=2_048, page_size=1, reserve="prompt", max_num_input_tokens=512)
    first, second = claimed(kv, range(1_600)), claimed(kv, range(5_000, 6_200))
    compute(kv, first)
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(second)
    for _ in range(3):
        compute(kv, first)
    assert (first.processed_length, row(kv, second)) == (1_600, [])


def test_usage_returns_to_zero_after_each_of_a_hundred_requests() -> None:
    kv = manager(pages=10)
    for start in range(100):
        store(kv, range(start, start + 30))
        assert kv.block_count().used_pct == 0.0


def test_cached_pages_count_as_free() -> None:
    kv = manager(pages=5)
    store(kv, PROMPT)
    count = kv.block_count()
    assert (count.free, count.total, count.used) == (5, 5, 0)
    newcomer = claimed(kv, range(50, 70))
    kv.alloc(newcomer)
    assert free(kv) == 0


# Preemption


def test_a_preempted_request_gives_up_its_pages_and_stays_claimed() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:9])
    kv.preempt(ctx)
    assert free(kv) == 4
    assert kv.contains(ctx)
    assert (ctx.processed_length, row(kv, ctx)) == (0, [])


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, PROMPT[:9])
    compute(kv, ctx, new_tokens=[99])
    kv.preempt(ctx)
    kv.alloc(ctx)
    assert ctx.tokens.all.tolist() == [*PROMPT[:9], 99]
    assert (ctx.processed_length, ctx.active_length, ctx.cached_prefix_length) == (8, 2, 8)


def test_a_preempted_request_starts_over_when_its_blocks_were_evicted() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:9])
    kv.preempt(ctx)
    store(kv, range(50, 66))
    kv.alloc(ctx)
    assert (ctx.processed_length, ctx.active_length, ctx.cached_prefix_length) == (0, 9, 0)


def test_a_released_context_may_be_claimed_again_and_starts_over() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:9])
    kv.release(ctx)
    kv.claim(ctx)
    assert ctx.processed_length == 0
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 8


# Hashes of a running request (MGR-17)


@pytest.mark.parametrize("algo", ["ahash64", "sha256", "sha256_64"])
def test_a_request_tells_the_canonical_hashes_of_its_full_blocks(algo: Any) -> None:
    kv = manager(kv_hash_algo=algo, kv_hash_seed=SEED)
    ctx = prefilled(kv, PROMPT[:10], cache_salt="tenant")
    hashes = kv.commit_and_get_block_hashes(ctx)
    assert hashes == pk.hash_blocks(PROMPT[:10], 4, algo=algo, seed=SEED, salt="tenant")
    assert len(hashes) == 2


def test_asking_for_hashes_again_changes_nothing() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:10])
    first = kv.commit_and_get_block_hashes(ctx)
    before = kv.fingerprint()
    assert kv.commit_and_get_block_hashes(ctx) == first
    assert kv.fingerprint() == before


def test_all_groups_of_a_cache_have_the_same_hashes() -> None:
    shape: dict[str, Any] = dict(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1, page_size=4)
    full = pk.MHAKVCacheParams(**shape)
    sliding = pk.MHAKVCacheParams(**shape, kind=pk.SlidingWindow(4))
    kv = pk.PagedKVCacheManager(
        pk.MultiKVCacheParams({"full": full, "sliding": sliding}),
        total_num_pages={"full": 8, "sliding": 8},
        max_batch_size=1,
        allocate_pools=False,
    )
    ctx = prefilled(kv, PROMPT[:10])
    hashes = [kv.commit_and_get_block_hashes(ctx, group) for group in (None, "full", "sliding")]
    assert hashes == [pk.hash_blocks(PROMPT[:10], 4)] * 3
    with pytest.raises(ValueError, match=r"^group='none': must be one of 'full', 'sliding'"):
        kv.commit_and_get_block_hashes(ctx, "none")
