"""While blocks are on their way to host memory no page, key or byte of theirs is another's."""

from __future__ import annotations

import pytest

import pagekeeper as pk
from model.faults import lanes, needs_faults
from model.host import HostCache, prompt_of

pytestmark = needs_faults

PAGES = 8
PROMPT = prompt_of(1, 4)
"""Four full blocks and a token: five pages."""


def storing(prompt: list[int] = PROMPT) -> tuple[HostCache, pk.TextContext]:
    """A request that is computed, and whose full blocks lanes hold on their way out."""
    cache = HostCache(PAGES)
    lanes(cache, "hold")
    return cache, cache.computed(prompt)


def host_blocks(cache: HostCache, prompt: list[int] = PROMPT) -> int:
    """Blocks of the prompt that would come from host memory, once the device has none."""
    cache.kv.truncate_prefix([])
    return cache.kv.analyze_prefix_reuse(prompt).host_blocks


@pytest.mark.parametrize("how", ["preempt", "release"])
def test_pages_of_a_store_that_waits_are_not_written_to_by_others(how: str) -> None:
    cache, ctx = storing()
    getattr(cache.kv, how)(ctx)
    assert (cache.kv.block_count().free, cache.kv.metrics()["pages_in_flight"]) == (4, 4)
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.alloc(cache.claimed(prompt_of(2, 4)))
    other = cache.computed(prompt_of(3, 3), no_store=True)  # writes to all pages that are free
    lanes(cache, "copy")
    cache.settled()
    cache.kv.release(other)
    assert host_blocks(cache) == 4
    cache.memory[:] = 0
    assert cache.serve(PROMPT) == 16, "what was stored is the first request's"


def test_a_store_that_fails_leaves_no_key_and_its_pages_are_free_only_then() -> None:
    cache, ctx = storing()
    cache.kv.release(ctx)
    other = cache.claimed(prompt_of(2, 4))
    with pytest.raises(pk.InsufficientBlocksError):
        cache.kv.alloc(other)
    lanes(cache, "fail")
    cache.settled()
    assert (host_blocks(cache), cache.counted("blocks"), cache.counted("jobs")) == (0, 0, 0)
    cache.forward(other)
    cache.kv.release(other)
    cache.settled()  # its own store fails too
    lanes(cache, "copy")
    cache.serve(PROMPT)
    assert cache.counted("stored_blocks") == 4, "the same keys are stored when they are published again"


def test_a_prompt_that_comes_again_before_it_is_stored_finds_whole_blocks_on_the_device_alone() -> None:
    cache, first = storing()
    cache.kv.release(first)
    reuse = cache.kv.analyze_prefix_reuse(PROMPT)
    assert (reuse.device_blocks, reuse.host_blocks, cache.counted("blocks")) == (4, 0, 0)
    second = cache.computed(PROMPT)
    assert second.cached_prefix_length == 16
    assert cache.holds(second)
    cache.kv.release(second)
    lanes(cache, "copy")
    cache.settled()
    assert (cache.counted("stored_blocks"), host_blocks(cache)) == (4, 4)
    cache.memory[:] = 0
    assert cache.serve(PROMPT) == 16


def test_blocks_of_a_request_that_goes_on_are_found_as_they_land() -> None:
    cache = HostCache(pages=16)
    prompt = prompt_of(1, 8)
    ctx = cache.computed(prompt, chunk=16)
    cache.settled()
    lanes(cache, "hold")
    cache.forward(ctx, 16)
    assert (cache.kv.metrics()["copies_in_flight"], cache.counted("blocks")) == (1, 4)
    cache.kv.preempt(ctx)
    assert host_blocks(cache, prompt) == 4, "those of the first chunk"
    lanes(cache, "copy")
    cache.settled()
    assert host_blocks(cache, prompt) == 8


def test_a_reset_beside_a_request_that_runs_and_stores_is_complete_when_both_have_ended() -> None:
    cache, ctx = storing()
    cache.kv.reset_prefix_cache()
    ctx.update(5)
    cache.forward(ctx)
    assert cache.holds(ctx), "it goes on with its own pages"
    lanes(cache, "copy")
    cache.settled()
    assert (cache.counted("stored_blocks"), cache.counted("unstored_blocks")) == (0, 4)
    cache.kv.release(ctx)
    assert (cache.kv.block_count().free, cache.counted("blocks")) == (PAGES, 0)
    reuse = cache.kv.analyze_prefix_reuse(PROMPT)
    assert (reuse.device_blocks, reuse.host_blocks) == (0, 0)
    assert cache.serve(PROMPT) == 0


def test_a_load_that_is_held_keeps_its_blocks_from_eviction() -> None:
    cache = HostCache(pages=16, units=4)
    cache.serve(PROMPT)
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    lanes(cache, "hold")
    ctx = cache.claimed(PROMPT)
    cache.kv.alloc(ctx)
    cache.kv.release(cache.computed(prompt_of(2, 3)))
    assert cache.counted("dropped_no_unit") == 3, "all units are being read"
    lanes(cache, "copy")
    assert cache.settled() == [ctx.request_id]
    cache.run(ctx)
    assert ctx.cached_prefix_length == 16
