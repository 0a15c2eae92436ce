"""Why look-ups of several groups found no more (MET-3)."""

import pagekeeper as pk
from model.engine import claimed, compute, prefilled
from model.grouped import grouped, store
from pagekeeper.params import (
    FullAttention,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    SlidingWindow,
)


def hybrid(full: int = 16, window: int = 16) -> pk.PagedKVCacheManager:
    kinds = {"full": FullAttention(), "window": SlidingWindow(8)}
    return grouped(kinds, {"full": full, "window": window}, enable_partial_reuse=False)


def with_states() -> pk.PagedKVCacheManager:
    """A snapshot after each eight tokens, two blocks."""
    states = RecurrentKVCacheParams(
        states=[RecurrentState("state", (4,), "float32")],
        num_layers=1,
        page_size=4,
        kind=Recurrent(8, save_last_snapshot=False),
    )
    full = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=4)
    params = MultiKVCacheParams({"full": full, "states": states})
    return pk.PagedKVCacheManager(
        params, None, {"full": 16, "states": 16}, max_batch_size=4, allocate_pools=False
    )


def test_a_block_that_the_window_cannot_go_on_from_is_not_new_but_of_no_use() -> None:
    kv = hybrid(window=6)
    store(kv, range(21))
    store(kv, range(100, 109))  # takes the page that stands for nothing, and the window's blocks 0 and 1
    # What is stored of 17 tokens are four blocks, behind which the window reads blocks 2 and 3.
    assert kv.analyze_prefix_reuse(list(range(17))).miss_reason is None
    # Behind three it reads blocks 1 and 2.
    shorter = kv.analyze_prefix_reuse(list(range(13)))
    assert (shorter.reusable_blocks_all, shorter.miss_reason, shorter.evicted_at_step) == (0, "window", None)
    claim = claimed(kv, range(13))
    compute(kv, claim)
    assert kv.metrics()["missed_window"] == 3


def test_a_block_that_full_attention_has_lost_was_evicted_whatever_a_window_lacks() -> None:
    kv = hybrid(full=5)
    store(kv, range(17))
    store(kv, range(100, 109))
    gone = kv.analyze_prefix_reuse(list(range(17)))
    assert gone.miss_reason == "evicted"
    assert gone.evicted_at_step is not None


def test_a_prompt_that_ends_before_the_next_state_misses_a_snapshot() -> None:
    kv = with_states()
    ctx = claimed(kv, range(30))
    for _ in range(3):
        compute(kv, ctx, num_tokens=8)
    kv.release(ctx)
    # The state after 8 tokens is there, that after 12 is not, and nothing was evicted.
    found = kv.analyze_prefix_reuse(list(range(14)))
    assert (found.reusable_blocks_all, found.miss_reason) == (2, "no_snapshot")
    prefilled(kv, range(14))
    metrics = kv.metrics()
    assert (metrics["missed_no_snapshot"], metrics["missed_evicted"], metrics["evictions"]) == (1, 0, 0)


def test_what_nobody_stored_is_new_for_several_groups_too() -> None:
    kv = hybrid()
    store(kv, range(9))
    assert kv.analyze_prefix_reuse(list(range(8)) + [77] * 5).miss_reason == "never_stored"


def test_each_group_tells_of_the_blocks_that_others_hold() -> None:
    kv = hybrid()
    holder = prefilled(kv, range(21))
    # Behind five blocks full attention reads all of them, and the window the last two.
    held = kv.analyze_prefix_reuse(list(range(21)))
    assert (held.reusable_blocks_allocated, held.allocated_by_group) == (5, (5, 2))
    kv.release(holder)
    assert kv.analyze_prefix_reuse(list(range(21))).allocated_by_group == (0, 0)
