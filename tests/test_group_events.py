"""Events of several groups of layers: each tells what it has and what it loses (EVT-1, EVT-3, EVT-6)."""

from typing import Any, TypeVar

import pagekeeper as pk
from model.engine import claimed, compute, hit
from model.grouped import grouped, store
from pagekeeper.events import BlockIndex, Cleared, Created, Event, Removed, Stored, Updated, block_key
from pagekeeper.params import (
    ChunkedLocal,
    FullAttention,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    SlidingWindow,
)

FULL, WINDOW = 0, 1
"""The groups of `hybrid` as events number them."""

Kind = TypeVar("Kind", bound=Event)


def hybrid(full: int = 16, window: int = 16, **options: Any) -> pk.PagedKVCacheManager:
    """Pages of 4 tokens; the window has two blocks and reads the one before them in part."""
    kinds = {"full": FullAttention(), "window": SlidingWindow(8)}
    return grouped(kinds, {"full": full, "window": window}, event_buffer_max_size=1000, **options)


def keys(tokens: Any) -> tuple[int, ...]:
    """The hashes of the prompt's full blocks of 4 tokens, as events have them."""
    return tuple(map(block_key, pk.hash_blocks(list(tokens), 4)))


def told(kv: pk.PagedKVCacheManager, kind: type[Kind]) -> list[Kind]:
    """Of the events since the last call, those of a kind."""
    return [event for event in kv.get_latest_events() if isinstance(event, kind)]


def test_the_first_events_tell_what_each_group_was_made_with() -> None:
    assert hybrid(full=40, window=8).get_latest_events() == [
        Created(0, 0, FULL, None, 4, (40,), FullAttention()),
        Created(1, 0, WINDOW, 8, 4, (8,), SlidingWindow(8)),
    ]


def test_the_window_of_a_chunked_group_is_its_chunk() -> None:
    kv = grouped({"chunked": ChunkedLocal(12)}, event_buffer_max_size=1, max_seq_len=100)
    assert [event.window for event in kv.get_latest_events()] == [12]


def test_groups_that_share_memory_tell_what_they_can_have_alone() -> None:
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 8, "page_size": 4}
    groups = {
        "full": pk.MHAKVCacheParams(**shape, num_layers=1),
        "window": pk.MHAKVCacheParams(**shape, num_layers=2, kind=SlidingWindow(8)),
    }
    params = MultiKVCacheParams(groups, event_buffer_max_size=8)
    # A page of `full` is 2 x 4 x 8 x 4 = 256 bytes, one of `window` 512: huge pages of 512, one of 9 is null.
    kv = pk.PagedKVCacheManager(params, None, available_bytes=9 * 512, max_batch_size=1, allocate_pools=False)
    assert [event.pages for event in told(kv, Created)] == [(16,), (8,)]


def test_each_group_tells_of_the_blocks_that_it_got() -> None:
    kv = hybrid()
    store(kv, range(13))
    assert [(event.group, event.hashes, event.parent_hash) for event in told(kv, Stored)] == [
        (FULL, keys(range(12)), None),
        (WINDOW, keys(range(12)), None),
    ]


def test_a_block_that_a_window_loses_is_gone_for_the_window_alone() -> None:
    kv = hybrid(window=6)
    store(kv, range(13))  # four pages; the head is given back first
    kv.get_latest_events()
    store(kv, range(100, 112))  # two pages that were never used, and one that is cached
    assert [(event.group, event.hashes) for event in told(kv, Removed)] == [(WINDOW, keys(range(4)))]


def test_blocks_of_other_priorities_are_told_for_each_group() -> None:
    kv = hybrid()
    ctx = claimed(kv, range(9))
    compute(kv, ctx)
    kv.get_latest_events()
    kv.session_hint(ctx, "resume_soon", priority=80)
    first, second = keys(range(8))
    assert [(event.group, event.block_hash, event.priority) for event in told(kv, Updated)] == [
        (FULL, first, (35, 80)),
        (FULL, second, (35, 80)),
        (WINDOW, first, (35, 80)),
        (WINDOW, second, (35, 80)),
    ]


def test_a_reset_empties_every_group() -> None:
    kv = hybrid()
    store(kv, range(13))
    kv.reset_prefix_cache()
    index = BlockIndex()
    events = kv.get_latest_events()
    assert index.apply(events)
    assert [event.group for event in events if isinstance(event, Cleared)] == [FULL, WINDOW]
    assert len(index) == 0


def test_blocks_below_a_prefix_are_removed_from_each_group_from_the_tail() -> None:
    kv = hybrid()
    store(kv, range(13))
    kv.get_latest_events()
    assert kv.truncate_prefix(list(range(4))) == 2
    _, second, third = keys(range(12))
    assert [(event.group, event.hashes) for event in told(kv, Removed)] == [
        (FULL, (third, second)),
        (WINDOW, (third, second)),
    ]


def test_a_snapshot_of_several_groups_tells_what_the_events_told() -> None:
    kv = hybrid(full=9, window=5)
    index = BlockIndex()
    for first in range(0, 100, 20):
        store(kv, range(first, first + 13))
        assert index.apply(kv.get_latest_events())
        late = BlockIndex()
        late.apply_snapshot(kv.event_snapshot())
        for group in (FULL, WINDOW):
            assert late.hashes(group) == index.hashes(group)
    assert index.hashes(FULL) != index.hashes(WINDOW)


# Groups of states have blocks here and there.


def states(interval: int = 8) -> pk.PagedKVCacheManager:
    params = RecurrentKVCacheParams(
        states=[RecurrentState("state", (4,), "float32")],
        num_layers=1,
        page_size=4,
        kind=Recurrent(interval, save_last_snapshot=False),
        event_buffer_max_size=1000,
    )
    return pk.PagedKVCacheManager(params, None, 16, max_batch_size=4, max_seq_len=100, allocate_pools=False)


def test_a_state_follows_the_last_one_that_was_told() -> None:
    kv = states()
    ctx = claimed(kv, range(30))
    for _ in range(3):
        compute(kv, ctx, num_tokens=8)
    chain = keys(range(28))
    # After 8, 16 and 24 tokens: blocks 1, 3 and 5.
    expected = [((chain[1],), None, 1), ((chain[3],), chain[1], 3), ((chain[5],), chain[3], 5)]
    found = [(event.hashes, event.parent_hash, event.first_block) for event in told(kv, Stored)]
    assert found == expected
    snapshot = [event for event in kv.event_snapshot().events if isinstance(event, Stored)]
    assert [(event.hashes, event.parent_hash, event.first_block) for event in snapshot] == expected


def test_a_state_that_chunks_passed_over_is_no_parent() -> None:
    kv = states()
    ctx = claimed(kv, range(30))
    compute(kv, ctx, num_tokens=12)  # past 8
    compute(kv, ctx, num_tokens=12)
    chain = keys(range(24))
    assert [(event.hashes, event.parent_hash) for event in told(kv, Stored)] == [((chain[5],), None)]


# An index answers like the manager, whatever the groups are.


def test_an_index_finds_what_every_group_can_go_on_from() -> None:
    kv = hybrid(full=16, window=6)
    store(kv, range(21))
    store(kv, range(100, 105))  # takes the window's blocks 0 and 1
    index = BlockIndex()
    index.apply(kv.get_latest_events())
    for length in range(1, 24):
        prompt = list(range(length))
        found = index.match_length(keys(prompt)[: (length - 1) // 4])
        assert found * 4 == hit(kv, prompt)
    # A window of 8 reads two blocks before the end of a block, and has blocks 2 to 4.
    assert [index.match_length(keys(range(4 * blocks))) for blocks in range(7)] == [0, 0, 0, 0, 4, 5, 5]


def test_the_index_may_know_of_less_where_no_group_needs_the_last_block() -> None:
    # Pages of a token; a request has computed 13, and of token 0 only the group with a sink keeps the page.
    # At tokens 6 and 12 chunks of 2 and of 3 begin, and each window sees its own token: a request can go on
    # from there with block 0 alone. The index says less, never more.
    kinds: dict[str, Any] = {
        "a": ChunkedLocal(3),
        "b": ChunkedLocal(2),
        "c": SlidingWindow(1, sink_tokens=1),
        "d": SlidingWindow(1),
    }
    common: dict[str, Any] = {"dtype": "float32", "num_layers": 1, "page_size": 1, "devices": ["cpu"]}
    params = MultiKVCacheParams(
        {
            name: pk.MHAKVCacheParams(
                **common, n_kv_heads=1, head_dim=4, event_buffer_max_size=1000, kind=kind
            )
            for name, kind in kinds.items()
        }
    )
    kv = pk.PagedKVCacheManager(
        params,
        total_num_pages=dict.fromkeys(kinds, 30),
        max_batch_size=4,
        max_seq_len=40,
        allocate_pools=False,
    )
    tokens = [1, 2, 1, 1, 2, 1, 2, 2, 1, 1, 2, 1, 2]
    ctx = claimed(kv, tokens)
    kv.alloc(ctx)
    kv.step(ctx, 5)
    kv.truncate_prefix([])  # what nobody holds
    index = BlockIndex()
    index.apply_snapshot(kv.event_snapshot())
    found = [kv.analyze_prefix_reuse(tokens[:end]).device_blocks for end in range(2, 14)]
    assert found == [0] * 5 + [6] * 6 + [12]
    hashes = pk.hash_blocks(tokens, 1, seed=kv.hash_seed)
    assert [index.match_length(hashes[: end - 1], 0) for end in range(2, 14)] == [0] * 12
