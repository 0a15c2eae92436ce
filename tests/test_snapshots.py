"""Groups of states: which positions hold one, where requests go on from, and what room they take (MGR-13).

Pages have 4 tokens, and snapshots are taken each 8 tokens, unless a test says otherwise.
"""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, hit
from model.grouped import grouped, next_to_go, rows, used
from pagekeeper.params import FullAttention, Recurrent, Scratch, SlidingWindow

EVERY_8 = Recurrent(8, save_last_snapshot=False)
AND_LAST = Recurrent(8, save_last_snapshot=True)


def manager(
    states: Any = EVERY_8, pages: Any = 40, *, others: dict[str, Any] | None = None, **options: Any
) -> pk.PagedKVCacheManager:
    """A cache of full attention and states, and perhaps other groups."""
    kinds = {"full": FullAttention(), "states": states} | (others or {})
    return grouped(kinds, pages, **options)


def forward(kv: pk.PagedKVCacheManager, ctx: pk.TextContext, *chunks: int) -> None:
    """Computes chunks of so many tokens; without any, all that is left."""
    for chunk in chunks or [None]:
        kv.alloc(ctx, num_tokens=chunk)
        carried_out(kv)
        kv.step(ctx)


def carried_out(kv: pk.PagedKVCacheManager) -> dict[str, list[list[int]]]:
    """Copies of pages, by group, as an engine takes them."""
    for name in kv.params:  # type: ignore[union-attr]
        kv.take_page_fills(name)
    return {name: kv.take_page_copies(name).tolist() for name in kv.params}  # type: ignore[union-attr]


def stored(kv: pk.PagedKVCacheManager, length: int, *chunks: int) -> None:
    """A request of the first so many tokens that is computed in chunks and over."""
    ctx = claimed(kv, range(length))
    forward(kv, ctx, *chunks)
    kv.release(ctx)


def taken_by_others(kv: pk.PagedKVCacheManager, pages: int) -> None:
    """Takes so many pages of each group, which stand for nothing afterwards."""
    others = [claimed(kv, [9000 + number], no_store=True, no_read=True) for number in range(pages)]
    kv.alloc(others)
    carried_out(kv)
    kv.release(others)


# Which positions hold a state


def test_a_request_holds_its_newest_state_and_placeholders() -> None:
    kv = manager()
    ctx = claimed(kv, range(30))
    held = []
    for chunk in (8, 8, 8, 6):
        forward(kv, ctx, chunk)
        held.append(rows(kv, ctx)["states"])
    # The states after 8, 16, 24 and 30 tokens: each that others may go on from stays where it is.
    assert held == [[0, 1], [0, 0, 0, 2], [0] * 5 + [3], [0] * 7 + [4]]
    assert used(kv) == {"full": 8, "states": 1}
    kv.verify()


def test_a_step_from_a_snapshot_needs_a_second_page_and_goes_on_from_a_copy() -> None:
    kv = manager()
    ctx = claimed(kv, range(30))
    forward(kv, ctx, 8)
    kv.alloc(ctx, num_tokens=8)
    assert rows(kv, ctx)["states"] == [0, 1, 0, 2]
    assert used(kv)["states"] == 2
    assert carried_out(kv)["states"] == [[1, 2]]
    kv.step(ctx)
    assert used(kv)["states"] == 1


def test_a_padding_request_that_is_shortened_has_no_state_to_move() -> None:
    kv = manager()
    ctx = pk.TextContext(pk.RequestID(), [1] * 4)
    kv.alloc_dummy(ctx)
    kv.step(ctx, new_tokens=[1])
    kv.preempt(ctx)
    kv.alloc(ctx)
    assert ctx.active_length == 5
    kv.shorten(ctx, 1)
    assert (ctx.active_length, used(kv)) == (1, {"full": 0, "states": 0})
    kv.verify()


def test_a_first_state_is_zeroed() -> None:
    kv = manager()
    ctx = claimed(kv, range(3))
    kv.alloc(ctx)
    assert kv.take_page_fills("states").tolist() == rows(kv, ctx)["states"]
    assert kv.take_page_fills("states").tolist() == []


def test_a_state_moves_with_its_request_and_stays_on_its_page() -> None:
    kv = manager()
    ctx = claimed(kv, range(6))
    forward(kv, ctx)
    places = []
    for token in range(6):
        ctx.update(token)
        forward(kv, ctx)
        row = rows(kv, ctx)["states"]
        places.append((len(row), row[-1], sum(row)))
    # 7 to 12 tokens. After 8 there is no snapshot to go on from: only a step that ends there makes one.
    assert places[:2] == [(2, 1, 1), (2, 1, 1)]
    assert [length for length, _, _ in places] == [2, 2, 3, 3, 3, 3]
    assert all(total == last for _, last, total in places)  # one page, the last


def test_without_reuse_each_request_has_one_page_of_states_for_life() -> None:
    kv = manager(pages={"full": 40, "states": 4}, enable_prefix_caching=False)
    batch = [claimed(kv, range(100 * number, 100 * number + 10)) for number in range(4)]
    kv.alloc(batch, num_tokens=8)
    pages = [rows(kv, ctx)["states"][-1] for ctx in batch]
    assert sorted(pages) == [1, 2, 3, 4]
    kv.step(batch)
    for _ in range(8):
        kv.alloc(batch)
        assert carried_out(kv)["states"] == []
        kv.step(batch, new_tokens=[0] * 4)
    assert [rows(kv, ctx)["states"][-1] for ctx in batch] == pages
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(claimed(kv, [1]))


# Where chunks end


def chunks(kv: pk.PagedKVCacheManager, ctx: pk.TextContext, budget: int | None = None) -> list[int]:
    """The chunks in which the request's tokens are computed, by the manager's word."""
    sizes = []
    while ctx.processed_length < len(ctx):
        sizes.append(kv.chunk_tokens(ctx, num_tokens=budget))
        forward(kv, ctx, sizes[-1])
        assert ctx.processed_length == sum(sizes) + ctx.cached_prefix_length
    return sizes


@pytest.mark.parametrize(
    ("states", "budget", "sizes"),
    [
        (EVERY_8, None, [8, 8, 8, 6]),
        (EVERY_8, 5, [5, 3, 5, 3, 5, 3, 5, 1]),
        (AND_LAST, None, [8, 8, 8, 4, 2]),  # 28 is the last page boundary that is at most 29
        (Recurrent(), None, [28, 2]),
        (Recurrent(save_last_snapshot=False), 20, [20, 10]),
        (Scratch(), 20, [20, 10]),
    ],
)
def test_chunks_go_to_the_next_snapshot_at_most(states: Any, budget: int | None, sizes: list[int]) -> None:
    kv = manager(states)
    ctx = claimed(kv, range(30))
    assert chunks(kv, ctx, budget) == sizes
    ctx.update(1)
    assert kv.chunk_tokens(ctx) == 1


@pytest.mark.parametrize(("states", "tokens"), [(EVERY_8, 8), (Recurrent(), 0), (Scratch(), 0)])
def test_the_manager_says_at_which_multiples_chunks_should_end(states: Any, tokens: int) -> None:
    assert manager(states).chunk_alignment_tokens == tokens
    assert manager(states, enable_prefix_caching=False).chunk_alignment_tokens == 0


def test_a_chunk_behind_a_hit_goes_from_where_the_hit_ends() -> None:
    kv = manager(AND_LAST)
    stored(kv, 30, 8, 8, 8, 4, 2)
    alike = claimed(kv, range(40))
    other = claimed(kv, [*range(10), *range(100, 120)])
    assert kv.chunk_tokens([alike, other]).tolist() == [4, 8]  # from 28, and from 8
    assert kv.chunk_tokens([alike, other], num_tokens=[3, 9]).tolist() == [3, 8]
    assert chunks(kv, alike) == [4, 4, 4]


def test_groups_of_states_take_snapshots_together() -> None:
    kv = manager(EVERY_8, others={"more": Recurrent(12)})
    ctx = claimed(kv, range(30))
    # The first group has none at 28, the second none at 8.
    assert (kv.chunk_alignment_tokens, chunks(kv, ctx)) == (24, [24, 6])
    kv.release(ctx)
    assert hit(kv, range(30)) == 24


@pytest.mark.parametrize("options", [{"no_store": True}, {"enable_prefix_caching": False}])
def test_who_leaves_nothing_to_others_computes_as_much_as_it_may(options: Any) -> None:
    no_store = options.pop("no_store", False)
    kv = manager(**options)
    ctx = claimed(kv, range(30), no_store=no_store)
    assert chunks(kv, ctx, 20) == [20, 10]


# Drafts


def test_drafts_are_refused_where_a_group_keeps_states() -> None:
    kv = manager()
    before = kv.fingerprint()
    with pytest.raises(
        ValueError, match="num_draft_tokens=2: must be 0: a group keeps states, which rejected drafts"
    ):
        kv.claim(pk.TextContext("a", [1, 2], num_draft_tokens=2))
    assert kv.fingerprint() == before
    kv.claim(pk.TextContext("a", [1, 2]))
    grouped({"full": FullAttention(), "scratch": Scratch()}).claim(
        pk.TextContext("a", [1, 2], num_draft_tokens=2)
    )


# Where others go on


def test_a_prompt_is_found_up_to_the_last_snapshot_before_its_end() -> None:
    kv = manager()
    stored(kv, 30, 8, 8, 8, 6)
    found = {length: hit(kv, range(length)) for length in (8, 9, 16, 17, 24, 25, 30)}
    assert found == {8: 0, 9: 8, 16: 8, 17: 16, 24: 16, 25: 24, 30: 24}


def test_a_chunk_that_ends_elsewhere_leaves_no_snapshot() -> None:
    kv = manager()
    stored(kv, 30, 10, 6, 14)
    assert {length: hit(kv, range(length)) for length in (9, 16, 17, 30)} == {9: 0, 16: 0, 17: 16, 30: 16}


def test_a_prompt_may_leave_one_more_snapshot_before_its_last_token() -> None:
    kv = manager(AND_LAST)
    stored(kv, 30, 8, 8, 8, 4, 2)
    # 28 is the last page boundary that is at most 29.
    assert [hit(kv, range(length)) for length in (28, 29, 30)] == [24, 28, 28]


@pytest.mark.parametrize(
    ("pages", "gone", "found"),
    [
        ({"full": 40, "states": 2}, 1, [0, 16]),  # the shallow snapshot goes first
        ({"full": 40, "states": 2}, 2, [0, 0]),
        ({"full": 4, "states": 40}, 1, [8, 8]),  # the deepest block
        ({"full": 4, "states": 40}, 3, [0, 0]),
    ],
)
def test_a_snapshot_serves_with_all_blocks_before_it_and_no_other_way(
    pages: dict[str, int], gone: int, found: list[int]
) -> None:
    kv = manager(pages=pages)
    stored(kv, 16, 8, 8)
    assert [hit(kv, range(length)) for length in (9, 17)] == [8, 16]
    taken_by_others(kv, gone)  # a page of each group for each
    assert [hit(kv, range(length)) for length in (9, 17)] == found


@pytest.mark.parametrize(("kinds", "found"), [({"full": FullAttention()}, 26), ({"states": EVERY_8}, 24)])
def test_no_part_of_a_block_serves_where_a_group_keeps_states(kinds: dict[str, Any], found: int) -> None:
    kv = grouped({"full": FullAttention()} | kinds, 40, enable_partial_reuse=True)
    stored(kv, 30, 8, 8, 8, 6)
    ctx = claimed(kv, [*range(26), 90, 91])
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == found


@pytest.mark.parametrize(("gone", "found"), [(3, 0), (2, 1056), (1, 1056)])
def test_case_58_of_snapshots_that_lie_behind_the_common_prefix_none_is_found(gone: int, found: int) -> None:
    kv = manager(Recurrent(528, save_last_snapshot=False), {"full": 400, "states": 5}, page_size=16)
    # States after 528, 1,056, 1,584 and 2,112 tokens, and one that went with its request.
    stored(kv, 2200, 528, 528, 528, 528, 88)
    taken_by_others(kv, gone)  # the one without a place first, then the shallow ones
    prompt = [*range(1500), *range(5000, 5700)]
    assert hit(kv, prompt) == found
    # The next block is stored, as are all up to token 1,488: what lacks is a state.
    assert kv.analyze_prefix_reuse(prompt).miss_reason == "no_snapshot"
    ctx = claimed(kv, prompt)
    kv.alloc(ctx, num_tokens=100)
    assert ctx.cached_prefix_length == found


def test_case_60_a_request_goes_on_from_the_state_of_its_own_prefix() -> None:
    kv = manager()
    other = claimed(kv, range(500, 530))
    forward(kv, other, 8, 8)
    ctx = claimed(kv, range(30))
    forward(kv, ctx, 8)
    snapshot = rows(kv, ctx)["states"][1]
    forward(kv, ctx, 8)
    assert snapshot not in rows(kv, ctx)["states"]
    reader = claimed(kv, [*range(8), 77, 78])
    kv.alloc(reader)
    assert (reader.cached_prefix_length, len(rows(kv, reader)["states"])) == (8, 3)
    assert carried_out(kv)["states"] == [[snapshot, rows(kv, reader)["states"][2]]]


def test_two_that_go_on_from_one_snapshot_have_copies_of_their_own() -> None:
    kv = manager()
    stored(kv, 10, 8, 2)
    pair = [claimed(kv, [*range(8), number]) for number in (50, 51)]
    kv.alloc(pair)
    copies = carried_out(kv)["states"]
    assert [source for source, _ in copies] == [1, 1]
    assert [to for _, to in copies] == [rows(kv, ctx)["states"][-1] for ctx in pair]
    assert len({to for _, to in copies}) == 2
    kv.step(pair)
    assert hit(kv, range(9)) == 8


def test_a_window_a_state_and_full_attention_go_on_where_all_of_them_can() -> None:
    kv = manager(pages={"full": 40, "states": 40, "window": 7}, others={"window": SlidingWindow(6)})
    stored(kv, 28, 8, 8, 8, 4)
    assert hit(kv, range(28)) == 24
    # Block 1 of the window, the older of the two that token 8 reads, goes: 16 is still usable, 8 is not.
    thief = claimed(kv, range(500, 508), no_store=True)
    kv.alloc(thief)
    carried_out(kv)
    assert [hit(kv, range(length)) for length in (9, 17, 25)] == [0, 16, 24]


def test_a_live_state_goes_before_shallow_snapshots_and_these_before_deep_ones() -> None:
    kv = manager()
    ctx = claimed(kv, range(22))
    forward(kv, ctx, 8, 8, 6)
    kv.release(ctx)
    # Pages in the order of the steps: after 8, 16 and 22 tokens. Blocks of full attention go tail first.
    assert next_to_go(kv) == [[6, 5, 4, 3, 2, 1], [3, 1, 2]]


def test_a_request_that_holds_a_snapshot_as_its_state_leaves_it_behind_the_shallow_ones() -> None:
    kv = manager()
    ctx = claimed(kv, range(16))
    forward(kv, ctx, 8, 8)
    kv.release(ctx)
    assert next_to_go(kv)[1] == [1, 2]


# Room


def test_case_52_a_step_without_room_for_its_next_state_is_refused_as_a_whole() -> None:
    kv = manager(pages={"full": 8, "states": 2})
    ctx, other = claimed(kv, range(20)), claimed(kv, [1])
    forward(kv, ctx, 8)
    kv.alloc(other)
    carried_out(kv)
    before, held = kv.fingerprint(), rows(kv, ctx)
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(ctx, num_tokens=8)
    assert refused.value.needed == 1
    assert (kv.fingerprint(), rows(kv, ctx)) == (before, held)
    kv.release(other)
    kv.alloc(ctx, num_tokens=8)


def test_case_148_a_cache_may_have_states_alone() -> None:
    kv = grouped({"states": EVERY_8}, 8, max_seq_len=64)
    ctx = claimed(kv, range(30))
    forward(kv, ctx, 8, 8, 8, 6)
    assert used(kv) == {"states": 1}
    kv.release(ctx)
    assert hit(kv, range(30)) == 24


def test_a_scratch_page_is_a_requests_own_for_life_and_shortens_no_hit() -> None:
    kv = grouped({"full": FullAttention(), "scratch": Scratch()}, {"full": 40, "scratch": 2})
    ctx = claimed(kv, range(9))
    kv.alloc(ctx)
    assert kv.take_page_fills("scratch").tolist() == [1]
    kv.step(ctx)
    for token in range(20):
        ctx.update(token)
        forward(kv, ctx)
        assert rows(kv, ctx)["scratch"] == [1]
    again = claimed(kv, [*range(8), 90])
    kv.alloc(again)
    assert (again.cached_prefix_length, rows(kv, again)["scratch"]) == (8, [2])
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(claimed(kv, [1]))
    kv.release([ctx, again])
    assert used(kv) == {"full": 0, "scratch": 0}
