"""What schedulers are told, worked out by hand: needs, budgets, passes, chunks that get shorter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, manager, prefilled, store
from model.grouped import grouped
from pagekeeper.params import FullAttention, Recurrent

PROMPT = list(range(100, 200))


def hybrid(pages: int = 100, page_size: int = 4, **options: Any) -> Any:
    """A group that keeps all tokens, and one with a window of eight."""
    shape: dict[str, Any] = {
        "dtype": "float32",
        "n_kv_heads": 1,
        "head_dim": 8,
        "num_layers": 1,
        "page_size": page_size,
    }
    params = pk.MultiKVCacheParams(
        {
            "full": pk.MHAKVCacheParams(**shape),
            "window": pk.MHAKVCacheParams(**shape, kind=pk.SlidingWindow(window_size=8)),
        }
    )
    counts = {"full": pages, "window": pages}
    return pk.PagedKVCacheManager(
        params, total_num_pages=counts, max_batch_size=16, allocate_pools=False, **options
    )


def decode(kv: pk.PagedKVCacheManager, ctx: pk.TextContext, tokens: int) -> None:
    """So many forwards, of a token each."""
    for token in range(tokens):
        ctx.update(token)
        compute(kv, ctx)


@pytest.mark.parametrize(("prompt", "pages"), [(136, 9), (512, 32), (1024, 64)])
def test_a_prompt_needs_a_page_for_each_sixteen_tokens(prompt: int, pages: int) -> None:
    kv = manager(pages=100, page_size=16)
    assert kv.get_needed_blocks_one_step(claimed(kv, range(prompt))) == pages


@pytest.mark.parametrize(
    ("tokens", "drafts", "two_steps", "pages"),
    [
        (512, 0, False, 1),  # token 513 is the first of a page
        (520, 0, False, 0),
        (143, 0, False, 0),  # token 144 is the last of a page
        (143, 0, True, 1),  # and token 145 the first of the next
        (142, 0, True, 0),
        (
            302,
            1,
            False,
            1,
        ),  # tokens up to 303 and two more need 20 pages; those up to 302 and two more have 19
        (300, 1, False, 0),
        (302, 1, True, 1),  # the second starts one later, and one more if the first one's draft is right
        (302, 3, False, 0),  # 303 and six, 302 and six: 20 pages
        (310, 3, True, 1),  # 312, three that may be right, and six: 21 pages; 310 and six have 20
    ],
)
def test_a_decode_step_needs_a_page_where_one_begins(
    tokens: int, drafts: int, two_steps: bool, pages: int
) -> None:
    kv = manager(pages=100, page_size=16)
    ctx = prefilled(kv, range(tokens), num_draft_tokens=drafts)
    ctx.update(1)
    assert kv.get_needed_blocks_one_step(ctx, two_steps) == pages
    before = free(kv)
    kv.alloc(ctx)
    if two_steps:
        kv.runtime_inputs([[ctx]])
        kv.alloc(ctx)
    assert before - free(kv) == pages


def test_what_is_stored_and_held_by_nobody_is_needed() -> None:
    kv = manager(pages=20)
    store(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:13])
    assert kv.get_needed_blocks_one_step(ctx) == 4
    assert ctx.estimated_reusable_tokens == 12


def test_what_is_stored_and_held_is_not_needed() -> None:
    kv = manager(pages=20)
    prefilled(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:13])
    assert kv.get_needed_blocks_one_step(ctx) == 1
    assert ctx.estimated_reusable_tokens == 12
    assert kv.get_remaining_blocks_to_completion(claimed(kv, PROMPT[:13], max_new_tokens=7)) == 2


def test_the_credit_ends_before_the_block_of_the_last_token() -> None:
    kv = manager(pages=20)
    prefilled(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:12])
    assert kv.get_needed_blocks_one_step(ctx) == 1
    assert ctx.estimated_reusable_tokens == 8


@pytest.mark.parametrize("options", [{"no_read": True}, {"cache_salt": "other"}])
def test_there_is_no_credit_for_who_does_not_reuse(options: dict[str, Any]) -> None:
    kv = manager(pages=20)
    prefilled(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:13], **options)
    assert kv.get_needed_blocks_one_step(ctx) == 4
    assert ctx.estimated_reusable_tokens == 0


def test_after_admission_nothing_is_reusable_and_the_rest_remains() -> None:
    kv = manager(pages=20)
    ctx = claimed(kv, PROMPT[:12], max_new_tokens=9)
    assert kv.get_remaining_blocks_to_completion(ctx) == 6  # 21 tokens
    compute(kv, ctx)
    assert ctx.estimated_reusable_tokens == 0
    assert kv.get_remaining_blocks_to_completion(ctx) == 3
    decode(kv, ctx, 9)
    assert kv.get_remaining_blocks_to_completion(ctx) == 0


def test_two_of_a_batch_need_a_stored_block_once() -> None:
    kv = manager(pages=20)
    store(kv, PROMPT[:8])
    first, second = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[:10])
    assert kv.get_needed_blocks_one_step([first, second]).tolist() == [3, 1]
    before = free(kv)
    kv.alloc([first, second])
    assert before - free(kv) == 4


def test_nobody_takes_over_what_another_of_the_batch_goes_on_from() -> None:
    kv = manager(100, page_size=2, copy_on_partial_reuse=False)
    store(kv, [1, 1, 2, 2, 3])
    part, whole = claimed(kv, [1, 1, 2, 9]), claimed(kv, [1, 1, 2, 2, 5])
    # Alone the first goes on in the page of 2, 2, beside that of 1, 1.
    assert kv.get_needed_blocks_one_step(part) == 2
    # With the second it takes a page: the two stored ones, one for 2, 9, one for 5.
    assert list(kv.get_needed_blocks_one_step([part, whole])) == [2, 2]
    before = free(kv)
    kv.alloc([part, whole])
    assert before - free(kv) == 4


def test_with_the_whole_prompt_reserved_the_first_chunk_needs_all_of_it() -> None:
    kv = manager(pages=20, reserve="prompt")
    ctx = claimed(kv, PROMPT[:13])
    assert kv.get_needed_blocks_one_step(ctx, num_tokens=5) == 4
    chunked = manager(pages=20)
    assert chunked.get_needed_blocks_one_step(claimed(chunked, PROMPT[:13]), num_tokens=5) == 2


def test_beams_count_what_they_do_not_share() -> None:
    kv = manager(pages=40)
    ctx = claimed(kv, PROMPT[:14], beam_width=3, max_new_tokens=8)
    # 3 full blocks of the prompt are shared; each beam has the 4th, and 22 tokens need 6.
    assert kv.get_needed_blocks_one_step(ctx) == 3 + 3
    assert kv.get_remaining_blocks_to_completion(ctx) == 3 + 3 * 3
    compute(kv, ctx)
    assert kv.get_remaining_blocks_to_completion(ctx) == 3 * 3 - 1
    beams = [ctx, kv.fork(ctx), kv.fork(ctx)]
    assert ctx.beam_width == 3
    # Two of them copy the 4th, and each will take two more.
    assert kv.get_remaining_blocks_to_completion(beams).tolist() == [3, 3, 2]
    for beam, token in zip(beams, (1, 2, 3), strict=True):
        beam.update(token)
    before = free(kv)
    assert kv.get_needed_blocks_one_step(beams).tolist() == [1, 1, 0]
    kv.alloc(beams)
    assert before - free(kv) == 2


def test_a_window_needs_no_more_than_it_holds_at_one_time() -> None:
    kv = hybrid()
    ctx = claimed(kv, PROMPT[:30], max_new_tokens=50)
    # 80 tokens are 20 blocks. A forward of 4 tokens whose window begins at the last token of a page reads it
    # and 6 more of two blocks, and writes 4: from there on 11 tokens, in 4 blocks.
    assert kv.get_remaining_blocks_to_completion(ctx, num_tokens=4).tolist() == [20, 4]
    assert kv.get_remaining_blocks_to_completion(ctx, "window", num_tokens=4) == 4
    assert kv.get_needed_blocks_one_step([ctx], num_tokens=4).tolist() == [[1, 1]]
    # All of the prompt at once: 8 blocks.
    assert kv.get_remaining_blocks_to_completion(ctx, "window") == 8


def test_a_window_does_not_count_what_it_will_leave_behind_as_shared() -> None:
    kv = hybrid()
    first = prefilled(kv, PROMPT[:20])
    second = claimed(kv, PROMPT[:21], max_new_tokens=40)
    # The hit takes 5 blocks of the one group, and of the other the last two, which the first request holds.
    assert kv.get_needed_blocks_one_step(second).tolist() == [1, 1]
    assert kv.get_remaining_blocks_to_completion(second).tolist() == [16 - 5, 3]
    kv.release(first)
    assert kv.get_needed_blocks_one_step(second).tolist() == [6, 3]


def test_groups_are_told_apart_and_asked_jointly() -> None:
    kv = hybrid(pages=8)
    prefilled(kv, PROMPT[50:58])
    ctx = claimed(kv, PROMPT[:30])
    assert kv.get_needed_blocks_one_step(ctx).tolist() == [8, 8]
    assert not kv.can_alloc(ctx, num_tokens=25)
    assert kv.can_alloc(ctx, num_tokens=24)
    assert kv.can_satisfy({"full": 6, "window": 6})
    assert not kv.can_satisfy([6, 7])
    assert not kv.can_satisfy({"full": 7})
    assert kv.can_satisfy({"full": 7}, at_capacity=True)


def test_the_only_group_need_not_be_named() -> None:
    kv: Any = grouped({"full": FullAttention()}, 16)
    ctx = claimed(kv, PROMPT[:9], max_new_tokens=8)
    assert kv.get_needed_blocks_one_step(ctx) == kv.get_needed_blocks_one_step(ctx, group="full") == 3
    assert kv.get_remaining_blocks_to_completion([ctx]).tolist() == [5]


def test_a_chunk_that_is_not_the_last_costs_its_size_and_the_last_what_is_not_stored() -> None:
    kv = manager(pages=40)
    prefilled(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:30])
    assert kv.reuse_adjusted_compute(ctx, num_tokens=20) == 20
    assert kv.reuse_adjusted_compute(ctx) == 18
    assert kv.reuse_adjusted_compute([ctx], num_tokens=29).tolist() == [29]
    done = prefilled(kv, PROMPT[50:60], num_draft_tokens=2)
    done.update(1)
    assert kv.reuse_adjusted_compute(done) == 3


def test_the_budget_tells_of_what_can_never_be_served() -> None:
    kv = manager(pages=10)
    assert kv.get_request_kv_block_budget(claimed(kv, PROMPT[:14], max_new_tokens=8)) == (6, 10)
    assert kv.get_request_kv_block_budget(claimed(kv, PROMPT[:14], max_new_tokens=80)) == (24, 10)
    assert kv.get_request_kv_block_budget(claimed(kv, PROMPT[:14], max_new_tokens=8, beam_width=2)) == (9, 10)
    endless = pk.TextContext("endless", PROMPT)
    kv.claim(endless)
    assert kv.get_request_kv_block_budget(endless) is None


def test_windows_shorter_than_a_sequence_have_no_budget() -> None:
    short, long = hybrid(max_seq_len=9), hybrid(max_seq_len=8)
    assert short.get_request_kv_block_budget(claimed(short, PROMPT[:5])) is None
    assert long.get_request_kv_block_budget(claimed(long, PROMPT[:5])) == (2, 100)


def test_a_cache_with_states_has_no_budget() -> None:
    kv = grouped({"full": FullAttention(), "states": Recurrent(8)}, max_seq_len=64)
    assert kv.get_request_kv_block_budget(claimed(kv, PROMPT[:5], max_new_tokens=4)) is None


# Passes.


def test_a_pass_starts_with_what_is_free_and_changes_nothing() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:8])
    running = prefilled(kv, PROMPT[20:29])
    before = kv.fingerprint()
    kv.start_scheduling()
    assert kv.scheduling_has_free_blocks(5)
    assert not kv.scheduling_has_free_blocks(6)
    assert kv.scheduling_reserve(running, 3)
    assert not kv.scheduling_reserve(running, 3)
    assert kv.scheduling_has_free_blocks(2)
    assert not kv.scheduling_has_free_blocks(3)
    kv.scheduling_remove(running)  # its 3 pages, and the 3 reserved
    assert kv.scheduling_has_free_blocks(8)
    kv.scheduling_remove(running)
    assert not kv.scheduling_has_free_blocks(9)
    assert kv.fingerprint() == before
    kv.start_scheduling()
    assert not kv.scheduling_has_free_blocks(6)


def test_shared_pages_are_free_when_the_last_holder_is_removed() -> None:
    kv = manager(pages=8)
    first = prefilled(kv, PROMPT[:9])
    second = prefilled(kv, PROMPT[:10])  # shares 2 of its 3 pages
    kv.start_scheduling()
    assert not kv.scheduling_has_free_blocks(5)
    kv.scheduling_remove(first)
    assert kv.scheduling_has_free_blocks(5)
    assert not kv.scheduling_has_free_blocks(6)
    kv.scheduling_remove(second)
    assert kv.scheduling_has_free_blocks(8)


def test_placeholders_are_no_pages_to_give_back() -> None:
    kv = hybrid(pages=10)
    ctx = prefilled(kv, PROMPT[:30])  # 8 blocks, and in the window the last 3
    kv.start_scheduling()
    assert kv.scheduling_has_free_blocks({"full": 2, "window": 7})
    assert not kv.scheduling_has_free_blocks(3, "full")
    assert not kv.scheduling_has_free_blocks(8, "window")
    kv.scheduling_remove(ctx)
    assert kv.scheduling_has_free_blocks([10, 10])


def test_pages_that_a_pin_or_a_copy_holds_do_not_become_free() -> None:
    kv = manager(pages=8)
    ctx = prefilled(kv, PROMPT[:12])
    kv.pin(ctx)
    other = prefilled(kv, PROMPT[20:28])
    kv._core.start_copy(other, 0, 1)
    kv.start_scheduling()
    kv.scheduling_remove(ctx)
    kv.scheduling_remove(other)
    assert kv.scheduling_has_free_blocks(4)
    assert not kv.scheduling_has_free_blocks(5)


def test_a_pass_must_be_open_and_its_time_does_not_go_back() -> None:
    kv = manager(pages=8)
    with pytest.raises(ValueError, match=r"no scheduling pass is open"):
        kv.scheduling_has_free_blocks(1)
    kv.begin_step(now=5.0)
    with pytest.raises(ValueError, match=r"now=4: must be finite"):
        kv.start_scheduling(now=4.0)
    kv.start_scheduling(now=6.0)
    assert kv.scheduling_has_free_blocks(8)


def test_priorities_end_when_a_pass_opens() -> None:
    kv = manager(pages=3, page_size=4)
    kv.begin_step(now=0.0)
    timed = pk.RetentionConfig([pk.TokenRangeRetention(0, priority=80, duration_ms=1000)])
    store(kv, PROMPT[:4], retention=timed)
    store(kv, PROMPT[20:24])
    kv.start_scheduling(now=2.0)  # both have the same priority now, and the first is older
    prefilled(kv, PROMPT[40:48])
    assert kv.analyze_prefix_reuse(PROMPT[:4]).first_new_block is not None
    assert kv.analyze_prefix_reuse(PROMPT[20:24]).first_new_block is None


# Shorter chunks.


def test_a_planned_chunk_gets_shorter_and_the_rest_comes_with_the_next() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:14])
    kv.alloc(ctx)
    kv.shorten(ctx, 8)
    assert (ctx.active_length, kv.block_count().free) == (8, 4)
    assert kv.runtime_inputs([[ctx]], form="vllm")[0].query_start_loc.tolist() == [0, 8]
    kv.step(ctx)
    assert ctx.processed_length == 8
    assert kv.get_needed_blocks_one_step(ctx) == 0
    compute(kv, ctx)
    assert ctx.processed_length == 14
    kv.verify()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0], "num_tokens=0: must be 1 to 14"),
        ([15], "num_tokens=15: must be 1 to 14"),
        ([1, 1], "num_tokens has 2 entries"),
    ],
)
def test_a_chunk_keeps_a_token_and_gets_no_longer(tokens: Sequence[int], message: str) -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:14])
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=message):
        kv.shorten(ctx, np.array(tokens))
    assert kv.fingerprint() == before


def test_only_a_prompt_that_was_planned_just_now_gets_shorter() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:6])
    with pytest.raises(ValueError, match="has no forward in the open step"):
        kv.shorten(ctx, 1)
    kv.alloc(ctx)
    kv.runtime_inputs([[ctx]])
    with pytest.raises(ValueError, match="has no forward in the open step"):
        kv.shorten(ctx, 1)
    kv.step(ctx, new_tokens=[1])
    kv.alloc(ctx)
    with pytest.raises(ValueError, match="its prompt is computed"):
        kv.shorten(ctx, 1)


def test_the_free_count_sees_what_can_be_evicted_and_a_gauge_what_is_cached() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:12])
    assert kv.block_count().free == 8
    assert kv.metrics()["cached_blocks"] == 3
    assert kv.can_satisfy(8)
    assert kv.can_alloc(claimed(kv, PROMPT[20:52]))
