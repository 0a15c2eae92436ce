"""Pages of windows and chunks beside those that keep all: what goes, in which order, and what is left then.

The groups have pages of 4 tokens; a prompt that comes first lies on pages 1, 2, … of each.
"""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import prefilled
from model.grouped import grouped, next_to_go
from pagekeeper.params import ChunkedLocal, FullAttention, SlidingWindow


def manager(**kinds: Any) -> pk.PagedKVCacheManager:
    """A cache with a group of each kind."""
    return grouped(kinds)


def test_pages_behind_the_window_go_when_a_step_is_delivered() -> None:
    kv = manager(full=FullAttention(), window=SlidingWindow(6), sinks=SlidingWindow(6, sink_tokens=1))
    ctx = prefilled(kv, range(16))
    # Token 16 reads 11 to 16: block 2 from its last token on. The first token is a sink.
    rows = [kv.get_cache_indices(ctx, group)[0] for group in ("full", "window", "sinks")]
    assert rows == [[1, 2, 3, 4], [0, 0, 3, 4], [1, 0, 3, 4]]
    assert next_to_go(kv) == [[], [1, 2], [2]]


def test_a_window_goes_head_to_tail_and_its_sinks_last() -> None:
    kv = manager(full=FullAttention(), window=SlidingWindow(100, sink_tokens=5))
    kv.release(prefilled(kv, range(16)))
    assert next_to_go(kv) == [[4, 3, 2, 1], [3, 4, 1, 2]]


def test_so_it_does_when_a_pin_ends() -> None:
    kv = manager(full=FullAttention(), window=SlidingWindow(100, sink_tokens=5))
    ctx = prefilled(kv, range(16))
    pin = kv.pin(ctx)
    kv.release(ctx)
    assert next_to_go(kv) == [[], []]
    kv.unpin(pin)
    assert next_to_go(kv) == [[4, 3, 2, 1], [3, 4, 1, 2]]


@pytest.mark.parametrize(
    ("kind", "length", "left"),
    [
        (SlidingWindow(6), 21, 21),  # token 21 reads from 16 on, and the page that it goes to is its own
        (
            SlidingWindow(6),
            19,
            0,
        ),  # block 4 is stored and computed again, by token 16, which reads from 11 on
        (SlidingWindow(6), 10, 0),
        (ChunkedLocal(8), 10, 8),  # block 2 is gone, and begins a chunk
        (ChunkedLocal(8), 14, 0),  # block 3 is gone, and reads block 2
    ],
)
def test_a_truncation_leaves_what_the_next_token_can_go_on_from(kind: Any, length: int, left: int) -> None:
    kv = manager(full=FullAttention(), window=kind)
    ctx = prefilled(kv, range(22))
    ctx.truncate(length)
    assert ctx.processed_length == left
    kv.verify()


def test_a_request_that_starts_over_finds_what_it_has_stored() -> None:
    kv = manager(full=FullAttention(), window=SlidingWindow(6))
    ctx = prefilled(kv, range(22))
    ctx.truncate(10)
    kv.alloc(ctx)
    # Two blocks, and of the third the one token that it has beside the last.
    assert (ctx.processed_length, ctx.cached_prefix_length) == (9, 9)


def test_a_session_that_is_over_leaves_alone_what_another_holds_in_some_group() -> None:
    kv = manager(window=SlidingWindow(1), full=FullAttention())
    over, _ = prefilled(kv, range(12)), prefilled(kv, [*range(8), 99])
    kv.session_hint(over, "done")
    # The window has let go of pages 1 to 3. The other request holds the first two blocks, in `full`.
    assert next_to_go(kv)[0] == [3, 1, 2]
