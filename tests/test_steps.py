"""Steps that overlap: step S+1 is planned before the results of S are known, and copies run beside both."""

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, row, store

PROMPT = list(range(10, 30))


def test_a_step_may_be_planned_before_the_token_it_computes_is_known() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)
    assert ctx.active_length == 1
    assert ctx.tokens.all.tolist() == PROMPT[:3]  # the placeholder is no token
    assert kv.runtime_inputs([[ctx]])[0].cache_lengths.tolist() == [3]


def test_pages_of_the_second_step_cover_its_placeholder() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, PROMPT[:4])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    assert row(kv, ctx) == [1]
    kv.alloc(ctx)
    assert row(kv, ctx) == [1, 2]


def test_no_third_step_is_planned_ahead() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    for _ in range(2):
        kv.alloc(ctx)
        kv.runtime_inputs([[ctx]])
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="two steps"):
        kv.alloc(ctx)
    assert kv.fingerprint() == before


def test_a_request_is_planned_once_in_an_open_step() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    with pytest.raises(ValueError, match="planned"):
        kv.alloc(ctx)


def test_begin_step_opens_the_next_step() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.begin_step()
    kv.alloc(ctx)
    assert ctx.active_length == 1


def test_step_delivers_the_oldest_step_that_is_out() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[7])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (3, [*PROMPT[:3], 7])
    kv.step(ctx, new_tokens=[8])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (4, [*PROMPT[:3], 7, 8])


def test_update_fills_the_oldest_placeholder() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)
    ctx.update(7)
    kv.step(ctx)
    ctx.update(8)
    kv.step(ctx)
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (4, [*PROMPT[:3], 7, 8])


def test_a_token_that_came_before_the_next_alloc_leaves_no_placeholder() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    ctx.update(7)
    kv.alloc(ctx)
    assert (ctx.active_length, len(ctx.tokens)) == (1, 4)
    kv.step(ctx)
    kv.step(ctx, new_tokens=[8])
    assert ctx.tokens.all.tolist() == [*PROMPT[:3], 7, 8]


def test_a_block_with_a_placeholder_is_stored_when_the_token_and_its_kv_are_there() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)  # computes the fourth token, which nobody knows yet
    assert hit(kv, PROMPT) == 0
    kv.step(ctx, new_tokens=[PROMPT[3]])
    assert hit(kv, PROMPT) == 0  # known, its KV not yet delivered
    kv.step(ctx, new_tokens=[PROMPT[4]])
    assert hit(kv, PROMPT) == 4


def test_two_chunks_of_a_prompt_may_be_out() -> None:
    kv = manager(max_num_input_tokens=4)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)
    assert (ctx.active_length, row(kv, ctx)) == (4, [1, 2])
    kv.step(ctx)
    assert (ctx.processed_length, hit(kv, PROMPT)) == (4, 4)
    kv.step(ctx)
    assert (ctx.processed_length, hit(kv, PROMPT)) == (8, 8)


def test_overlapped_decoding_stores_what_step_by_step_decoding_stores() -> None:
    sampled = list(range(60, 69))
    one, two = manager(pages=8, kv_hash_seed="11" * 32), manager(pages=8, kv_hash_seed="11" * 32)
    plain, ahead = claimed(one, PROMPT[:3]), claimed(two, PROMPT[:3])
    two.alloc(ahead)
    for token in sampled:
        compute(one, plain, new_tokens=[token])
        two.runtime_inputs([[ahead]])
        two.alloc(ahead)
        two.step(ahead, new_tokens=[token])
    assert ahead.tokens.all.tolist() == plain.tokens.all.tolist()
    assert two.commit_and_get_block_hashes(ahead) == one.commit_and_get_block_hashes(plain)
    whole = [*PROMPT[:3], *sampled]
    assert hit(two, [*whole, 0]) == hit(one, [*whole, 0]) == 8  # eleven of the twelve tokens have KV


# Results that come too late (STEP-1, STEP-3)


def test_release_during_a_forward_frees_the_pages_at_once_and_stores_nothing() -> None:
    kv = manager(pages=4)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.release(ctx)
    assert free(kv) == 4
    assert hit(kv, PROMPT) == 0


def test_results_of_a_released_request_are_dropped_and_its_neighbours_are_delivered() -> None:
    kv = manager()
    gone, stays = claimed(kv, PROMPT[:3]), claimed(kv, PROMPT[3:6])
    slots = np.array([gone.slot, stays.slot], np.int32)
    kv.alloc(slots)
    kv.runtime_inputs([slots])
    kv.release(gone)
    kv.step(slots, new_tokens=[7, 8])
    assert gone.tokens.all.tolist() == PROMPT[:3]
    assert (stays.processed_length, stays.tokens.all.tolist()) == (3, [*PROMPT[3:6], 8])


def test_a_late_result_never_reaches_the_request_that_has_the_slot_now() -> None:
    kv = manager()
    gone = claimed(kv, PROMPT[:3])
    slots = np.array([gone.slot], np.int32)
    kv.alloc(slots)
    kv.runtime_inputs([slots])
    kv.release(gone)
    heir = claimed(kv, PROMPT[5:8])
    kv.alloc(heir)
    kv.step(slots, new_tokens=[7])
    assert (heir.processed_length, heir.tokens.all.tolist()) == (0, PROMPT[5:8])


def test_results_of_a_preempted_request_are_dropped() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.preempt(ctx)
    kv.step(ctx, new_tokens=[7])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (0, PROMPT[:3])


def test_results_from_before_a_preemption_do_not_count_for_the_next_admission() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.preempt(ctx)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[7])  # of the forward before the preemption
    assert (ctx.processed_length, len(ctx.tokens)) == (0, 3)
    kv.step(ctx, new_tokens=[8])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (3, [*PROMPT[:3], 8])


def test_preemption_forgets_placeholders() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    kv.alloc(ctx)
    kv.preempt(ctx)
    kv.alloc(ctx)
    assert (ctx.active_length, len(ctx.tokens)) == (3, 3)


def test_results_of_a_truncated_request_are_dropped() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:6])
    ctx.update(7)
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    ctx.truncate(5)
    kv.step(ctx, new_tokens=[8])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (5, PROMPT[:5])


def test_a_page_freed_during_a_forward_goes_to_the_next_request_of_the_stream() -> None:
    kv = manager(pages=2)
    first = claimed(kv, PROMPT[:8])
    kv.alloc(first)
    kv.runtime_inputs([[first]])
    kv.release(first)
    second = claimed(kv, range(50, 58))
    kv.alloc(second)
    assert sorted(row(kv, second)) == [1, 2]
    kv.verify()


def test_a_hit_may_be_taken_while_the_block_before_it_is_being_computed() -> None:
    kv = manager(pages=8)
    late = claimed(kv, PROMPT[:13])
    kv.alloc(late, num_tokens=2)
    kv.runtime_inputs([[late]])
    stored = store(kv, PROMPT[:12])
    kv.alloc(late)
    assert (late.active_length, row(kv, late)[:3]) == (1, stored)
    kv.step(late)
    kv.step(late, new_tokens=[7])
    assert (late.processed_length, len(late.tokens)) == (13, 14)
    kv.verify()


def test_an_edit_keeps_hits_that_were_taken_while_a_step_was_out() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:13])
    kv.alloc(ctx, num_tokens=2)
    kv.runtime_inputs([[ctx]])
    stored = store(kv, PROMPT[:12])
    kv.alloc(ctx)
    ctx.truncate(10)
    assert ctx.processed_length == 8  # two of the three hit blocks are whole, and not to be written again
    kv.alloc(ctx)
    assert (ctx.active_length, row(kv, ctx)[:2]) == (2, stored[:2])


def test_begin_step_and_poll_have_nothing_to_tell_when_nothing_is_in_flight() -> None:
    kv = manager()
    kv.begin_step(now=1.0)
    assert kv.poll_transfers() == []


# Copies in flight (STEP-2, STEP-3, PAGE-10, PAGE-11): the ledger decides, and a mover, late on purpose, moves


class LateMover:
    """Starts copies of a request's blocks, and ends them when it is told to."""

    def __init__(self, kv: pk.PagedKVCacheManager) -> None:
        self.kv = kv

    def start(self, ctx: pk.TextContext, first: int = 0, count: int = 1) -> tuple[int, list[int], int]:
        """The copy, its pages, and the step whose fence it waits for."""
        return self.kv._core.start_copy(ctx, first, count)

    def end(self, *copies: int) -> None:
        self.kv.poll_transfers(completions=copies)


def test_a_copy_waits_for_the_step_that_used_its_pages_last() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:8])
    step = kv.begin_step()
    ctx.update(7)
    kv.alloc(ctx)
    _, pages, fence = LateMover(kv).start(ctx, 0, 2)
    assert (pages, fence) == ([1, 2], step)


def test_pages_released_during_a_copy_are_free_when_it_ends() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:8])
    copy, _, _ = mover.start(ctx, 0, 2)
    kv.release(ctx)
    assert free(kv) == 2
    kv.verify()
    mover.end(copy)
    assert free(kv) == 4
    kv.verify()


def test_pages_preempted_during_a_copy_are_free_when_it_ends() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:8])
    copy, _, _ = mover.start(ctx, 1)
    kv.preempt(ctx)
    assert free(kv) == 3
    mover.end(copy)
    assert free(kv) == 4


def test_a_page_in_flight_is_given_to_nobody() -> None:
    kv = manager(pages=2)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:8])
    copy, _, _ = mover.start(ctx, 1)
    kv.release(ctx)
    other = claimed(kv, range(50, 58))
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(other)
    assert (refused.value.needed, refused.value.free, refused.value.pinned) == (2, 1, 1)
    mover.end(copy)
    kv.alloc(other)
    assert sorted(row(kv, other)) == [1, 2]


def test_a_cached_block_is_a_hit_while_it_is_copied() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:8])
    copy, _, _ = mover.start(ctx, 0, 2)
    kv.release(ctx)
    reader = claimed(kv, PROMPT[:9])
    kv.alloc(reader)
    assert row(kv, reader)[:2] == [1, 2]
    mover.end(copy)
    assert free(kv) == 1
    kv.verify()


def test_a_preempted_request_finds_its_blocks_while_they_are_copied() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:9])
    copy, pages, _ = mover.start(ctx, 0, 2)
    kv.preempt(ctx)
    kv.alloc(ctx)
    assert (ctx.cached_prefix_length, row(kv, ctx)[:2]) == (8, pages)
    kv.verify()
    mover.end(copy)
    assert (free(kv), row(kv, ctx)[:2]) == (1, pages)
    kv.verify()


def test_a_page_of_two_copies_is_held_until_both_end() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:4])
    one, two = mover.start(ctx)[0], mover.start(ctx)[0]
    kv.release(ctx)
    mover.end(one)
    assert free(kv) == 3
    mover.end(two)
    assert free(kv) == 4


def test_copies_may_end_when_a_step_begins() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:4])
    copy, _, _ = LateMover(kv).start(ctx)
    kv.release(ctx)
    kv.begin_step(completions=[copy])
    assert free(kv) == 4


def test_a_second_end_of_a_copy_is_an_error_that_changes_nothing() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:8])
    one, two = mover.start(ctx, 0)[0], mover.start(ctx, 1)[0]
    kv.release(ctx)
    mover.end(one)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=f"transfer {one}"):
        mover.end(two, one)
    assert kv.fingerprint() == before
    with pytest.raises(ValueError, match=f"transfer {two}"):
        mover.end(two, two)
    assert kv.fingerprint() == before


def test_a_block_that_is_copied_during_a_reset_is_not_found_afterwards() -> None:
    kv = manager(pages=4)
    mover = LateMover(kv)
    ctx = prefilled(kv, PROMPT[:4])
    copy, _, _ = mover.start(ctx)
    kv.release(ctx)
    kv.reset_prefix_cache()
    mover.end(copy)
    assert hit(kv, PROMPT) == 0
    assert free(kv) == 4
    kv.verify()


def test_the_null_page_is_never_pinned() -> None:
    kv = manager(pages=4)
    padding = claimed(kv, PROMPT[:4])
    kv.alloc_dummy(padding)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="blocks"):
        LateMover(kv).start(padding)
    assert kv.fingerprint() == before


def test_time_does_not_go_back() -> None:
    kv = manager()
    kv.begin_step(now=2.0)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="now=1"):
        kv.begin_step(now=1.0)
    assert kv.fingerprint() == before
