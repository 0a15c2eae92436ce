"""The closed forms of windows, sinks and chunks say of blocks what the masks say token by token."""

import pytest

from model.windows import Chunked, Full, Kind, Window, blocks_behind, is_usable, needed_blocks

KINDS: list[Kind] = [
    Full(),
    *(Window(tokens, sinks) for tokens in (1, 2, 3, 4, 5, 8, 9, 11, 100) for sinks in (0, 1, 4, 5)),
    *(Chunked(tokens) for tokens in (1, 3, 4, 6, 8, 11, 100)),
]
WINDOWS = [kind for kind in KINDS if isinstance(kind, Window)]
CHUNKS = [kind for kind in KINDS if isinstance(kind, Chunked)]
PAGE = 4
ENDS = range(60)


def blocks_of(first: int, last: int) -> set[int]:
    """The blocks of the tokens first … last - 1."""
    return {token // PAGE for token in range(max(first, 0), last)}


def test_a_window_over_two_tokens_of_the_block_before_needs_that_block() -> None:
    # Token 9 with W=4 sees 6, 7, 8, 9: blocks 1 and 2 of 4 tokens. With two sinks also block 0.
    assert needed_blocks(Window(4), 9, PAGE) == {1, 2}
    assert needed_blocks(Window(4, sinks=2), 9, PAGE) == {0, 1, 2}
    # Chunks of 6 are 0-5, 6-11, …: token 9 sees 6, 7, 8, 9, token 12 itself.
    assert needed_blocks(Chunked(6), 9, PAGE) == {1, 2}
    assert needed_blocks(Chunked(6), 12, PAGE) == {3}
    assert needed_blocks(Full(), 9, PAGE) == {0, 1, 2}


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_a_window_needs_its_tokens_before_the_hit_and_the_pages_of_its_sinks(kind: Window) -> None:
    for e in ENDS:
        before = blocks_of(e - kind.tokens + 1, e) | blocks_of(0, min(kind.sinks, e))
        assert needed_blocks(kind, e, PAGE) == before | {e // PAGE}


@pytest.mark.parametrize("kind", CHUNKS, ids=str)
def test_chunked_local_attention_needs_the_run_of_the_current_chunk(kind: Chunked) -> None:
    for e in ENDS:
        assert needed_blocks(kind, e, PAGE) == blocks_of(e // kind.tokens * kind.tokens, e + 1)


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_a_missing_block_is_outlived_when_the_window_has_passed_its_last_token(kind: Window) -> None:
    for missing in range(-(-kind.sinks // PAGE), 6):  # those of sinks are never outlived
        a = (missing + 1) * PAGE
        for blocks in range(missing + 1, 40):
            present = set(range(blocks)) - {missing}
            assert is_usable(kind, present, blocks, PAGE) == (blocks * PAGE >= a + kind.tokens - 1)


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_a_page_may_go_when_the_next_position_is_a_window_past_it(kind: Window) -> None:
    sinks = set(range(-(-kind.sinks // PAGE)))
    for n in ENDS:
        passed = {block for block in range(n // PAGE) if (block + 1) * PAGE <= n - kind.tokens + 1}
        assert blocks_behind(kind, n, PAGE) == passed - sinks


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_one_token_needs_no_more_no_later_token_needs(kind: Kind) -> None:
    for n in ENDS:
        behind = blocks_behind(kind, n, PAGE)
        assert not any(behind & needed_blocks(kind, later, PAGE) for later in range(n, len(ENDS)))
