"""What requests keep and find where groups see windows: worked-out values (TREE-6, TREE-7, MGR-12).

Pages have 4 tokens unless a test says otherwise; a first prompt lies on pages 1, 2, … of each group.
"""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, prefilled
from model.grouped import grouped, rows, store, used
from pagekeeper.params import FullAttention, SlidingWindow


def evict(kv: pk.PagedKVCacheManager, pages: int) -> None:
    """Takes so many pages of each group, which stand for nothing afterwards."""
    size = kv.params.page_size
    store(kv, range(100_000, 100_000 + pages * size), no_store=True)


# Hits over missing blocks. Of a window the blocks go head to tail, behind pages that stand for nothing


def test_a_block_that_the_window_has_passed_may_be_missing() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(12)}, {"full": 40, "window": 7})
    store(kv, range(28))
    evict(kv, 1)  # block 0 of the window
    # Token 24 reads 13 to 24, blocks 3 to 6. The block of a prompt's last token is not looked for.
    assert hit(kv, range(28)) == 24
    ctx = claimed(kv, [*range(24), 90])
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 24
    assert rows(kv, ctx)["window"][:6] == [0, 0, 0, 4, 5, 6]


@pytest.mark.parametrize(
    ("length", "found"), [(9, 8), (12, 8), (13, 8), (21, 8), (24, 8), (25, 24), (29, 28)]
)
def test_a_missing_block_ends_the_hit_until_the_window_has_passed_it(length: int, found: int) -> None:
    kinds = {"full": FullAttention(), "narrow": SlidingWindow(4), "wide": SlidingWindow(12)}
    kv = grouped(kinds, {"full": 40, "narrow": 8, "wide": 8})
    store(kv, range(28))
    store(kv, [*range(8), 90], no_store=True)  # blocks 0 and 1 are the newest of `wide`
    evict(kv, 2)  # the page that token 90 had, and in `wide` block 2, in `narrow` block 0
    # Block 2 ends with token 11. Tokens from 23 on do not read it, and the first such block border is 24.
    assert hit(kv, range(length)) == found


@pytest.mark.parametrize(("window", "found"), [(1, 12), (2, 12), (4, 12), (5, 12), (6, 0)])
def test_a_window_of_a_page_or_less_needs_the_last_block_alone(window: int, found: int) -> None:
    kv = grouped({"window": SlidingWindow(window)}, 3, max_seq_len=16)
    store(kv, range(12))
    evict(kv, 2)  # blocks 0 and 1
    # Token 12 reads from 12 - window + 1 on: in block 2 down to token 8, which is a window of 5.
    assert hit(kv, range(13)) == found


@pytest.mark.parametrize(("gone", "found", "reason"), [(64, 0, "window"), (63, 2032, "never_stored")])
def test_case_61_a_prompt_that_parts_in_the_last_block_needs_one_block_more_than_the_window(
    gone: int, found: int, reason: str
) -> None:
    # A window of 1,024 has 64 blocks of 16. With blocks 64 to 127 alone, the 63 before the border of 2,032
    # are one too few; block 63 holds token 1,009, the first that token 2,032 reads.
    kinds = {"full": FullAttention(), "window": SlidingWindow(1024)}
    kv = grouped(kinds, {"full": 300, "window": 128}, page_size=16)
    store(kv, range(2048))
    evict(kv, gone)
    prompt = [*range(2040), *range(9000, 9008), 9]  # what follows 2,032 is a full block
    assert hit(kv, prompt) == found
    assert kv.analyze_prefix_reuse(prompt).miss_reason == reason


def test_case_62_sessions_that_take_turns_find_their_windows_though_room_is_short() -> None:
    shape: dict[str, Any] = {
        "dtype": "float32",
        "n_kv_heads": 1,
        "head_dim": 8,
        "num_layers": 1,
        "page_size": 4,
    }
    window = pk.MHAKVCacheParams(**shape, kind=SlidingWindow(8))
    params = pk.MultiKVCacheParams({"full": pk.MHAKVCacheParams(**shape), "window": window})
    # A hit of ten sessions needs 8 blocks in `full` and 2 in the window: one slab of twice as many.
    size = (1 + 2 * 10 * (8 + 2)) * 256
    kv = pk.PagedKVCacheManager(params, None, None, 4, available_bytes=size, allocate_pools=False)
    for turn in range(12):
        for session in range(10):
            ctx = prefilled(kv, [*range(100 * session, 100 * session + 32), 9000 + turn])
            assert ctx.cached_prefix_length == (32 if turn else 0)
            kv.release(ctx)
        kv.release(prefilled(kv, range(10_000 + 100 * turn, 10_016 + 100 * turn)))  # once, and never again
    assert kv.metrics()["evictions"] > 30


# What a request keeps


def test_case_66_the_window_counts_the_token_that_reads() -> None:
    kv = grouped({"window": SlidingWindow(4)}, 16, page_size=1, max_seq_len=16)
    ctx = prefilled(kv, range(10))
    # The next token, 10, reads 7, 8, 9 and itself.
    assert rows(kv, ctx)["window"] == [0] * 7 + [8, 9, 10]


def test_case_65_a_window_beside_full_attention_takes_nothing_from_it() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(1024)}, 5000, page_size=1)
    ctx = prefilled(kv, range(5000))
    pages = rows(kv, ctx)
    assert pages["full"] == [*range(1, 5001)]
    assert pages["window"] == [0] * 3977 + [*range(3978, 5001)]  # token 5,000 reads from 3,977 on


@pytest.mark.parametrize(("length", "gone"), [(626, 0), (627, 1), (754, 1), (755, 2), (1024, 4)])
def test_a_window_that_is_no_multiple_of_the_page_keeps_the_page_that_it_begins_in(
    length: int, gone: int
) -> None:
    kv = grouped({"window": SlidingWindow(500)}, 8, page_size=128, max_seq_len=1024)
    ctx = prefilled(kv, range(length))
    # Token 627 reads from 128 on, token 755 from 256 on, token 1,024 from 525 = 4 * 128 + 13 on.
    assert rows(kv, ctx)["window"][: gone + 1] == [0] * gone + [gone + 1]


def test_a_window_takes_no_more_pages_however_long_a_request_becomes() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(8)}, 32)
    ctx = claimed(kv, range(3))
    for length in range(3, 103):
        compute(kv, ctx, new_tokens=[length])
        # Of the tokens before `length`, the next one reads 7.
        kept = (length - 1) // 4 - max(length - 7, 0) // 4 + 1
        assert used(kv) == {"full": -(-length // 4), "window": kept}


# What is left behind the window


def test_a_block_behind_the_window_is_found_by_others() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)})
    far = prefilled(kv, range(16))
    assert rows(kv, far)["window"] == [0, 0, 3, 4]
    near = claimed(kv, range(5))
    kv.alloc(near)
    assert near.cached_prefix_length == 4
    assert rows(kv, near) == {"full": [1, 5], "window": [1, 5]}


def test_after_several_blocks_left_the_window_at_once_later_ones_are_stored() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)})
    ctx = prefilled(kv, range(16))  # blocks 0 and 1 go together
    for token in range(16, 25):
        ctx.update(token)
        compute(kv, ctx)
    assert hit(kv, range(25)) == 24
    kv.verify()


def test_a_page_that_others_took_behind_the_window_is_theirs() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, {"full": 16, "window": 5})
    ctx = prefilled(kv, range(16))
    thief = prefilled(kv, range(50, 58))
    assert rows(kv, thief)["window"] == [5, 1]  # page 1 was block 0 of the other
    for token in range(16, 21):
        ctx.update(token)
        compute(kv, ctx)
    kv.release(ctx)
    assert hit(kv, range(5)) == 0  # block 0 does not come back with what is released
    assert hit(kv, range(21)) == 20  # and is not needed behind the window
    again = prefilled(kv, range(5))
    assert rows(kv, again)["window"][0] not in (0, 1)
    assert rows(kv, thief)["window"] == [5, 1]
    assert hit(kv, range(50, 59)) == 8
    kv.release([thief, again])
    kv.verify()
    assert (used(kv), free(kv)) == ({"full": 0, "window": 0}, 5)


def test_a_block_that_one_group_has_lost_is_stored_there_anew_and_kept_in_the_other() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(6)}, {"full": 16, "window": 4})
    first = store(kv, range(12))
    evict(kv, 3)  # of the window the page that nobody had, and blocks 0 and 1
    assert hit(kv, range(9)) == 0
    second = prefilled(kv, [*range(8), 90])
    assert rows(kv, second)["full"][:2] == first["full"][:2]
    assert hit(kv, range(9)) == 8
    third = claimed(kv, [*range(8), 91])
    kv.alloc(third)
    assert third.cached_prefix_length == 8
    assert rows(kv, third)["full"][:2] == first["full"][:2]
    assert rows(kv, third)["window"][1] == rows(kv, second)["window"][1]
    kv.verify()


# What a scheduler is told


def test_the_first_new_block_is_the_one_behind_what_a_request_then_finds() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(12)}, {"full": 40, "window": 7})
    store(kv, range(28))
    evict(kv, 1)  # block 0 of the window: what ends before token 15 cannot be used
    for prompt, blocks in ((range(13), 0), (range(21), 5), ([*range(24), 90, 91, 92, 93, 94], 6)):
        tokens = list(prompt)
        summary = kv.analyze_prefix_reuse(tokens)
        assert summary.reusable_blocks_all == blocks
        full = pk.hash_blocks(tokens, 4)
        assert summary.first_new_block == (full[blocks] if blocks < len(full) else None)
    ctx = claimed(kv, tokens)
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 24
