"""A request goes on within a block: in a tail that others left, or in a copy (TREE-8, TREE-9, TREE-10).

Pages have 4 tokens. `PROMPT` lies on pages 1, 2, … when it comes first.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pagekeeper as pk
from model import engine
from model.engine import claimed, compute, free, hit, prefilled, row, store
from model.grouped import grouped, rows
from model.grouped import store as store_in_groups
from model.memory import PageMemory
from model.tier import Tier
from pagekeeper.events import Removed, Stored
from pagekeeper.params import FullAttention, SlidingWindow

PROMPT = list(range(10, 30))
MADE: list[pk.PagedKVCacheManager] = []


@pytest.fixture(autouse=True)
def the_books_are_in_order_after_each_test() -> Iterator[None]:
    MADE.clear()
    yield
    for kv in MADE:
        kv.verify()


def manager(pages: int = 16, **options: Any) -> pk.PagedKVCacheManager:
    kv = engine.manager(pages, **({"enable_partial_reuse": True} | options))
    MADE.append(kv)
    return kv


def begun(kv: pk.PagedKVCacheManager, *prompts: list[int]) -> list[pk.TextContext]:
    """Requests with these prompts, planned as one batch."""
    batch = [claimed(kv, prompt) for prompt in prompts]
    kv.alloc(batch)
    return batch


def reused(kv: pk.PagedKVCacheManager, prompt: list[int]) -> int:
    """Tokens that a request with this prompt goes on behind; it is over without a forward."""
    (ctx,) = begun(kv, prompt)
    kv.release(ctx)
    return ctx.cached_prefix_length


# How far


@pytest.mark.parametrize(("length", "found"), [(16, 15), (17, 16), (4, 3), (13, 12), (1, 0)])
def test_all_but_the_last_token_of_a_prompt_may_be_there(length: int, found: int) -> None:
    kv = manager()
    store(kv, PROMPT[:16])
    assert reused(kv, PROMPT[:length]) == found


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_block_serves_as_far_as_its_tokens_agree(run: int) -> None:
    kv = manager()
    store(kv, PROMPT[:12])
    assert reused(kv, [*PROMPT[: 8 + run], 90, 91, 92, 93]) == 8 + run


def test_of_several_blocks_the_one_that_agrees_longest_serves() -> None:
    kv = manager(pages=200)
    stored = [store(kv, [*PROMPT[:5], *[sibling] * 3], no_read=True) for sibling in range(40)]
    (ctx,) = begun(kv, [*PROMPT[:5], 17, 17, 90])
    assert ctx.cached_prefix_length == 7
    assert kv.take_page_copies().tolist() == [[stored[17][1], row(kv, ctx)[1]]]


def test_with_partial_reuse_off_whole_blocks_alone_serve() -> None:
    kv = manager(enable_partial_reuse=False)
    store(kv, PROMPT[:11])
    assert reused(kv, PROMPT[:11]) == 8
    assert reused(kv, PROMPT[:12]) == 8
    assert reused(kv, [*PROMPT[:7], 90, 91]) == 4


def test_a_block_that_an_image_reaches_into_does_not_serve_in_part() -> None:
    kv = manager()
    image = [(bytes(32), 7, 3)]  # in blocks 1 and 2
    store(kv, PROMPT[:12], mm_items=image)
    ctx = claimed(kv, [*PROMPT[:11], 90, 91], mm_items=image)
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 8
    other = claimed(kv, [*PROMPT[:3], 90, 91])
    kv.alloc(other)
    assert other.cached_prefix_length == 3


@pytest.mark.parametrize("options", [{"cache_salt": "b"}, {"lora_id": "b"}, {"extra_ids": [0] * 9 + [1, 0]}])
def test_a_block_of_another_identity_does_not_serve_in_part(options: Any) -> None:
    kv = manager()
    store(kv, PROMPT[:12])
    ctx = claimed(kv, PROMPT[:11], **options)
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == (8 if "extra_ids" in options else 0)


# A longer block is copied


def test_a_copy_holds_what_the_block_holds_and_leaves_it_alone() -> None:
    kv = manager(allocate_pools=True)
    store(kv, PROMPT[:12])
    kv.get_buffers(1)[3] = torch.arange(2 * 4 * 2 * 4).reshape(2, 4, 2, 4)
    before = kv.pages_view()[3].clone()
    (ctx,) = begun(kv, [*PROMPT[:11], 90, 91])
    kv.runtime_inputs([[ctx]])
    copy = row(kv, ctx)[2]
    assert copy != 3
    assert (kv.get_buffers(1)[copy, :, :3] == kv.get_buffers(1)[3, :, :3]).all()
    assert (kv.pages_view()[3] == before).all()
    kv.step(ctx)
    assert hit(kv, PROMPT) == 12


@pytest.mark.parametrize("dtype", list(pk.DType))
def test_a_copy_has_every_byte_of_the_page_whatever_their_type(dtype: pk.DType) -> None:
    kv = manager(allocate_pools=True, dtype=dtype)
    store(kv, PROMPT[:12])
    pages = kv.pages_view()
    bytes_of_page = (torch.arange(pages.shape[1]) % 251 + 1).to(torch.uint8)
    pages[3] = bytes_of_page
    (ctx,) = begun(kv, [*PROMPT[:11], 90])
    kv.runtime_inputs([[ctx]])
    copy = row(kv, ctx)[2]
    assert copy not in (0, 3)
    assert torch.equal(pages[copy], bytes_of_page)
    assert torch.equal(pages[3], bytes_of_page)


def test_a_block_in_use_is_copied_and_both_go_on_by_themselves() -> None:
    kv = manager()
    holder = prefilled(kv, PROMPT[:12])
    (ctx,) = begun(kv, [*PROMPT[:10], 90])
    assert ctx.cached_prefix_length == 10
    assert kv.take_page_copies().tolist() == [[3, 4]]
    assert (row(kv, holder), row(kv, ctx)) == ([1, 2, 3], [1, 2, 4])
    kv.step(ctx)
    assert hit(kv, PROMPT) == 12


def test_without_copies_an_idle_leaf_is_taken_over_and_forgotten() -> None:
    kv = manager(copy_on_partial_reuse=False)
    store(kv, PROMPT[:12])
    (ctx,) = begun(kv, [*PROMPT[:10], 90])
    assert (ctx.cached_prefix_length, row(kv, ctx)) == (10, [1, 2, 3])
    assert kv.take_page_copies().tolist() == []
    assert hit(kv, PROMPT) == 8


@pytest.mark.parametrize("why", ["in use", "pinned", "a block follows"])
def test_without_copies_no_other_block_serves_in_part(why: str) -> None:
    kv = manager(copy_on_partial_reuse=False)
    holder = prefilled(kv, PROMPT[: 16 if why == "a block follows" else 12])
    if why == "pinned":
        kv.pin(holder)
    if why != "in use":
        kv.release(holder)
    assert reused(kv, [*PROMPT[:10], 90]) == 8


# Tails


def test_an_idle_tail_is_taken_over_by_a_prompt_that_goes_on_behind_it() -> None:
    kv = manager()
    store(kv, PROMPT[:9])
    first, second = claimed(kv, [*PROMPT[:9], 90]), claimed(kv, [*PROMPT[:9], 91])
    kv.alloc(first)
    assert (first.cached_prefix_length, row(kv, first)) == (9, [1, 2, 3])
    kv.alloc(second)  # the tail is the first one's now, and partly filled
    assert (second.cached_prefix_length, row(kv, second)) == (8, [1, 2, 4])
    assert kv.take_page_copies().tolist() == []


def test_a_tail_grows_with_what_is_generated_behind_it() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:9])
    for token in PROMPT[9:11]:
        ctx.update(token)
        compute(kv, ctx)
    ctx.update(99)  # has no KV
    kv.release(ctx)
    assert reused(kv, [*PROMPT[:11], 99, 0]) == 11


def test_a_tail_of_a_truncated_request_has_what_was_left() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:11])
    ctx.truncate(9)
    kv.release(ctx)
    assert reused(kv, PROMPT[:12]) == 9


def test_a_turn_goes_on_behind_the_tail_of_the_one_before() -> None:
    kv = manager()
    said = PROMPT[:6]
    for turn in range(5):
        ctx = claimed(kv, said)
        kv.alloc(ctx)
        assert ctx.cached_prefix_length == (len(said) - 3 if turn else 0)
        kv.step(ctx, new_tokens=[50 + turn])
        kv.release(ctx)  # the token that was given has no KV
        said = [*said, 50 + turn, 60 + turn, 70 + turn]


def test_with_tails_off_a_turn_computes_the_last_block_again() -> None:
    kv = manager(store_partial_tails=False)
    store(kv, PROMPT[:10])
    assert reused(kv, PROMPT[:11]) == 8


def test_a_longer_tail_takes_the_place_of_a_shorter_one_and_never_the_other_way() -> None:
    kv = manager()
    store(kv, PROMPT[:9])
    store(kv, PROMPT[:11], no_read=True)
    assert reused(kv, PROMPT[:12]) == 11
    store(kv, PROMPT[:11], no_read=True)
    store(kv, PROMPT[:9], no_read=True)
    assert reused(kv, PROMPT[:12]) == 11


def test_a_full_block_takes_the_place_of_the_tail_that_it_begins_with() -> None:
    kv = manager()
    store(kv, PROMPT[:10])
    store(kv, PROMPT[:12], no_read=True)
    (ctx,) = begun(kv, [*PROMPT[:10], 90])
    assert ctx.cached_prefix_length == 10
    ((source, _),) = kv.take_page_copies().tolist()  # not taken over: it is the full block
    kv.release(ctx)
    assert hit(kv, PROMPT) == 12
    (whole,) = begun(kv, PROMPT[:13])
    assert row(kv, whole)[2] == source


def test_no_event_tells_of_a_tail() -> None:
    kv = manager(event_buffer_max_size=100)
    store(kv, PROMPT[:10])
    _, first = kv.get_latest_events()
    assert isinstance(first, Stored)
    assert len(first.hashes) == 2
    ctx = prefilled(kv, PROMPT[:12])  # the tail becomes a block
    assert ctx.cached_prefix_length == 10
    (full,) = kv.get_latest_events()
    assert isinstance(full, Stored)
    assert (full.first_block, len(full.hashes)) == (2, 1)
    kv.release(ctx)
    store(kv, range(100, 164), no_store=True)
    told = kv.get_latest_events()
    assert sum(len(event.hashes) for event in told if isinstance(event, Removed)) == 3


def test_a_tail_goes_like_any_block_and_is_counted_as_free() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:10])
    assert free(kv) == 4
    store(kv, range(100, 108), no_store=True)  # page 4, and the tail, which is the deepest
    assert reused(kv, PROMPT[:10]) == 8


# Batches


def test_of_two_that_go_on_behind_one_tail_the_last_keeps_its_page() -> None:
    kv = manager()
    store(kv, PROMPT[:10])
    first, last = begun(kv, [*PROMPT[:10], 90], [*PROMPT[:10], 91])
    assert (first.cached_prefix_length, last.cached_prefix_length) == (10, 10)
    assert row(kv, last) == [1, 2, 3]
    assert kv.take_page_copies().tolist() == [[3, row(kv, first)[2]]]


def test_without_copies_one_of_two_has_an_idle_leaf_and_the_other_computes() -> None:
    kv = manager(copy_on_partial_reuse=False)
    store(kv, PROMPT[:12])
    pair = begun(kv, [*PROMPT[:10], 90], [*PROMPT[:10], 91])
    assert sorted(ctx.cached_prefix_length for ctx in pair) == [8, 10]
    assert [row(kv, ctx)[2] == 3 for ctx in pair] == [ctx.cached_prefix_length == 10 for ctx in pair]
    assert kv.take_page_copies().tolist() == []


@pytest.mark.parametrize(
    "ends",
    [[[90], PROMPT[10:13]], [PROMPT[10:13], [90]], [[90], PROMPT[10:13], [91]]],
    ids=["part, whole", "whole, part", "part, whole, part"],
)
def test_who_has_the_whole_block_keeps_it_and_those_who_have_a_part_copy(ends: list[list[int]]) -> None:
    kv = manager()
    store(kv, PROMPT[:12])
    batch = begun(kv, *([*PROMPT[:10], *end] for end in ends))
    assert [ctx.cached_prefix_length for ctx in batch] == [12 if len(end) > 1 else 10 for end in ends]
    third = [row(kv, ctx)[2] for ctx in batch]
    assert [page == 3 for page in third] == [len(end) > 1 for end in ends]
    assert len(set(third)) == len(ends)
    copies = kv.take_page_copies().tolist()
    assert sorted(copies) == sorted([3, page] for page in third if page != 3)


def test_a_block_that_others_follow_is_free_again_after_two_copied_it() -> None:
    kv = manager(pages=16)
    store(kv, PROMPT[:16])
    batch = begun(kv, [*PROMPT[:10], 90], [*PROMPT[:10], 91])
    assert 3 not in {row(kv, ctx)[2] for ctx in batch}
    kv.take_page_copies()
    assert kv.block_count().used == 4  # two blocks of both, and a block of each
    assert hit(kv, PROMPT) == 16


def test_a_block_that_others_follow_stays_with_who_has_it_whole() -> None:
    kv = manager(pages=16)
    store(kv, PROMPT[:16])
    whole, part = begun(kv, PROMPT[:17], [*PROMPT[:10], 91])
    assert row(kv, whole)[:4] == [1, 2, 3, 4]
    assert kv.take_page_copies().tolist() == [[3, row(kv, part)[2]]]
    assert kv.block_count().used == 6


def test_two_that_share_a_tail_fit_where_there_is_a_page_for_each() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:10])
    begun(kv, [*PROMPT[:10], 90], [*PROMPT[:10], 91])
    assert free(kv) == 0


@pytest.mark.parametrize(("pages", "found"), [(5, 10), (4, 8)])
def test_two_copy_a_block_that_others_follow_where_there_is_room_for_it_beside_the_copies(
    pages: int, found: int
) -> None:
    kv = manager(pages=pages)
    store(kv, PROMPT[:16])
    batch = begun(kv, [*PROMPT[:10], 90], [*PROMPT[:10], 91])
    assert [ctx.cached_prefix_length for ctx in batch] == [found] * 2
    kv.take_page_copies()
    assert free(kv) == pages - 4  # two blocks of both, and a block of each


@pytest.mark.parametrize("pages", [4, 5])
def test_a_batch_that_does_not_fit_leaves_tails_where_they_are(pages: int) -> None:
    kv = manager(pages=pages)
    store(kv, PROMPT[:10])
    batch = [claimed(kv, [*PROMPT[:10], token]) for token in range(90, 90 + pages - 1)]
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(batch)
    assert refused.value.request_id == batch[-1].request_id
    assert kv.fingerprint() == before
    kv.alloc(batch[:-1])
    assert [ctx.cached_prefix_length for ctx in batch[:-1]] == [10] * (pages - 2)


# Windows


def test_three_of_four_tokens_of_a_block_behind_the_window_are_found() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)})
    far = prefilled(kv, range(16))
    assert rows(kv, far)["window"] == [0, 0, 3, 4]
    (near,) = begun(kv, [0, 1, 2, 90])
    assert near.cached_prefix_length == 3
    copies = [kv.take_page_copies(name).tolist() for name in ("full", "window")]
    assert copies == [[[1, rows(kv, near)[name][0]]] for name in ("full", "window")]


def test_a_tail_behind_a_missing_block_is_stored_and_found() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(12)}, {"full": 40, "window": 8})
    store_in_groups(kv, range(29))
    store_in_groups(kv, range(1000, 1008), no_store=True)  # takes block 0 of the window
    (ctx,) = begun(kv, [*range(26), 90])
    assert ctx.cached_prefix_length == 26  # two tokens of block 6
    assert [len(kv.take_page_copies(name)) for name in ("full", "window")] == [1, 1]
    kv.step(ctx)
    kv.release(ctx)
    assert reused(kv, [*range(26), 90, 91]) == 27
    kv.verify()


@pytest.mark.parametrize("policy", ["write_through", "selective"])
def test_a_hit_that_goes_to_the_tier_is_not_free_though_the_part_behind_it_leaves_it(policy: str) -> None:
    # A forward of 13 tokens from token 11 on takes four of five pages, and a part is copied from the fifth:
    # there is room if the second block, needed at token 8 and not at 11, gives its page at once. While that
    # goes to the tier it cannot: the request goes on from token 8, with that page and four.
    options: dict[str, Any] = {"write_policy": policy, "selective_min_hits": 1, "selective_min_priority": 100}
    tier = Tier(PageMemory(5, 4))
    options |= {"kind": pk.SlidingWindow(3), "enable_partial_reuse": True, "max_seq_len": 100}
    kv = engine.manager(5, connector=tier, **options)
    first = claimed(kv, range(13))
    compute(kv, first, num_tokens=8)
    compute(kv, first)
    kv.release(first)
    second = claimed(kv, [*range(11), *range(50, 63)])
    kv.alloc(second)
    assert second.cached_prefix_length == (11 if policy == "write_through" else 8)
    kv.verify()
