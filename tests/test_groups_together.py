"""Calls that concern every group of a cache at once: all or nothing, and what tables say of missing pages.

Pages have 4 tokens.
"""

from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, hit, prefilled, request
from model.grouped import grouped, rows, store, used
from pagekeeper.params import ChunkedLocal, FullAttention, SlidingWindow


def shared(huge_pages: int, *kinds: Any) -> pk.PagedKVCacheManager:
    """Groups of equal pages, 256 bytes, and of half of them in turn, in one slab of so many huge pages."""
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "num_layers": 1, "page_size": 4}
    groups = {
        f"{number}": pk.MHAKVCacheParams(**shape, head_dim=(8, 4)[number % 2], kind=kind)
        for number, kind in enumerate(kinds)
    }
    params = pk.MultiKVCacheParams(groups)
    return pk.PagedKVCacheManager(
        params, None, None, 4, available_bytes=(1 + huge_pages) * 256, allocate_pools=False
    )


# Counts


def test_a_new_cache_has_every_page_of_every_group_free() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(4)}, {"full": 7, "window": 5})
    counts = {name: kv.block_count(group=name) for name in ("full", "window")}
    assert counts == {"full": pk.BlockCount(7, 7), "window": pk.BlockCount(5, 5)}


def test_what_one_group_gives_back_is_free_in_that_group_alone() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(4)}, 8)
    ctx = claimed(kv, range(12))
    kv.alloc(ctx)
    assert used(kv) == {"full": 3, "window": 3}
    kv.step(ctx)
    assert used(kv) == {"full": 3, "window": 1}  # token 12 reads from 9 on


# All groups or none


@pytest.mark.parametrize("short", ["full", "window"])
def test_case_48_a_request_for_which_one_group_has_no_room_takes_nothing_of_the_other(short: str) -> None:
    kv = grouped(
        {"full": FullAttention(), "window": SlidingWindow(100)}, {"full": 8, "window": 8} | {short: 5}
    )
    prefilled(kv, range(100, 116))
    ctx = claimed(kv, range(8))
    before, held = kv.fingerprint(), used(kv)
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(ctx)
    assert (refused.value.needed, refused.value.free) == (2, 1)
    assert (kv.fingerprint(), used(kv)) == (before, held)


def test_case_48_a_batch_that_fits_in_all_groups_but_for_its_last_request_takes_nothing() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(4)}, {"full": 8, "window": 4})
    store(kv, range(8))
    batch = [claimed(kv, range(9)), claimed(kv, range(50, 58)), claimed(kv, range(60, 64))]
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(batch)  # of the window: one hit and one page, two pages, one page
    assert refused.value.request_id == batch[2].request_id
    assert kv.fingerprint() == before
    assert hit(kv, range(9)) == 8
    kv.alloc(batch[:2])
    assert [ctx.cached_prefix_length for ctx in batch[:2]] == [8, 0]


def test_a_request_that_no_groups_pages_will_ever_hold_is_told_so() -> None:
    kv = grouped({"full": FullAttention(), "wide": SlidingWindow(100)}, {"full": 8, "wide": 5})
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(claimed(kv, range(21)))
    kv.alloc(claimed(kv, range(20)))


# Drafts, and continuations


def test_four_groups_have_pages_for_drafts() -> None:
    kinds = {
        "full": FullAttention(),
        "draft": FullAttention(),
        "window": SlidingWindow(8),
        "chunk": ChunkedLocal(8),
    }
    kv = grouped(kinds, 16, dtype="float8_e4m3fn")
    ctx = claimed(kv, range(8), num_draft_tokens=2)
    compute(kv, ctx, new_tokens=[8])
    assert {name: len(row) for name, row in rows(kv, ctx).items()} == dict.fromkeys(kinds, 3)  # 8 + 2 * 2
    assert used(kv) == {"full": 3, "draft": 3, "window": 3, "chunk": 1}  # token 8 begins a chunk
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[9, 10, 11], counts=3)  # both drafts are right
    kv.alloc(ctx)
    # 11 tokens have KV: 11 + 1 + 2 * 2 is 16. Token 11 reads from 4 on in the window.
    assert used(kv) == {"full": 4, "draft": 4, "window": 3, "chunk": 2}
    kv.release(ctx)
    assert used(kv) == dict.fromkeys(kinds, 0)


def test_a_continuation_shares_what_is_left_of_every_group() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, 16)
    parent = prefilled(kv, range(18))
    child = kv.fork(parent)
    assert rows(kv, child) == rows(kv, parent) == {"full": [1, 2, 3, 4, 5], "window": [0, 0, 0, 4, 5]}
    for token, ctx in enumerate((parent, child)):
        ctx.update(token)
    kv.alloc([parent, child])
    assert [kv.take_page_copies(name).tolist() for name in ("full", "window")] == [[[5, 6]], [[5, 6]]]
    assert used(kv) == {"full": 6, "window": 3}


# One slab


def test_requests_of_one_group_may_share_a_huge_page_and_never_a_page() -> None:
    kv = shared(4, FullAttention(), FullAttention())
    first, second = claimed(kv, range(4)), claimed(kv, range(50, 54))
    kv.alloc([first, second])
    (large,), (other,) = (rows(kv, ctx)["0"] for ctx in (first, second))
    small = [rows(kv, ctx)["1"] for ctx in (first, second)]
    # Little pages are numbered through all huge pages, two in each: both are in one that `0` has not.
    assert small == [[4], [5]]
    assert 2 not in (large, other)
    assert large != other
    assert kv.block_count() == pk.BlockCount(free=1, total=4)  # one for both, and one each of the other group


def test_a_slab_may_lack_huge_pages_though_it_has_little_ones() -> None:
    kv = shared(3, FullAttention(), FullAttention())
    kv.alloc(claimed(kv, range(4)))
    assert kv.block_count(group="1").free == 1 + 2
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(claimed(kv, range(50, 58)))  # two huge pages of the first group, of which one is left
    kv.alloc(claimed(kv, range(50, 54)))


# What tables say of blocks without a page


def test_case_64_a_block_without_a_page_is_null_in_tables_and_has_no_slot() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, 16)
    ctx = prefilled(kv, range(16))
    assert rows(kv, ctx)["window"] == [0, 0, 3, 4]
    out = np.zeros((1, 1, 2, 5), np.int32)
    assert kv.copy_block_offsets(out, 0, ctx, "window") == 4
    assert out[0, 0].tolist() == [[-1, -1, 6, 8, -1], [-1, -1, 7, 9, -1]]
    assert kv.slot_mapping(ctx, np.array([8, 15]), "window").tolist() == [12, 19]
    with pytest.raises(ValueError, match="7"):
        kv.slot_mapping(ctx, np.array([7]), "window")
    assert kv.slot_mapping(ctx, np.array([7]), "full").tolist() == [11]


@pytest.mark.parametrize("form", ["max", "vllm"])
def test_a_table_has_the_null_page_where_the_window_has_passed(form: Any) -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, 16)
    ctx = prefilled(kv, range(16))
    ctx.update(16)
    kv.alloc(ctx)
    inputs = kv.runtime_inputs([[ctx]], form=form)
    name = {"max": "lookup_table", "vllm": "block_table"}[form]
    cells = {group: getattr(inputs[group][0], name)[0, :6].tolist() for group in ("full", "window")}
    assert cells == {"full": [1, 2, 3, 4, 5, 0], "window": [0, 0, 3, 4, 5, 0]}


def test_padding_takes_no_page_of_any_group() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, 16)
    padding = request([1])
    kv.alloc_dummy(padding)
    tables = kv.runtime_inputs([[padding]])
    assert used(kv) == {"full": 0, "window": 0}
    assert [tables[name][0].lookup_table.any() for name in ("full", "window")] == [False, False]
