"""Prompts on disk that are longer than host memory can bring up at once: what fits comes."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagekeeper as pk
from model.host import prompt_of
from model.on_disk import opened, reopened
from model.two_groups import PAGE, Hybrid, prompt

UNIT = 64 + 128
"""Bytes of a unit of each group of `Hybrid`."""


def refused(kv: pk.PagedKVCacheManager) -> int:
    return kv.metrics()["copies_refused"]


def test_of_two_loads_for_which_host_memory_is_short_the_later_gets_shorter(tmp_path: Path) -> None:
    cache, prompts = opened(tmp_path), [prompt_of(number, 3) for number in (1, 2)]
    for tokens in prompts:
        cache.serve(tokens)
    cache = reopened(cache, tmp_path, pages=16, units=4)
    cache.memory[:] = 0xEE
    first, second = map(cache.claimed, prompts)
    transfers = cache.kv.alloc([first, second])
    assert [len(list(transfer.block_ids)) for transfer in transfers] == [3, 1]
    assert (first.active_length, second.active_length) == (0, 0)
    assert set(cache.settled()) == {first.request_id, second.request_id}
    for ctx in (first, second):
        cache.run(ctx)
        assert ctx.cached_prefix_length == 12
    cache.kv.shutdown()


def test_a_prompt_for_which_no_unit_is_free_is_computed(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    cache = reopened(cache, tmp_path, pages=16, units=4)
    held = cache.computed(prompt_of(2, 3))
    cache.settled()
    assert cache.kv.flush(10)  # no unit is being written from
    cache.suspend(held)  # takes all units
    ctx = cache.claimed(prompt_of(1, 3))
    cache.run(ctx)
    assert (ctx.cached_prefix_length, refused(cache.kv)) == (0, 0)
    cache.kv.release(ctx)
    cache.kv.release(held)
    cache.settled()
    cache.kv.truncate_prefix([])
    assert cache.serve(prompt_of(1, 3)) == 12
    cache.kv.shutdown()


def test_a_prefetch_brings_what_fits(tmp_path: Path) -> None:
    cache = opened(tmp_path, pages=16)
    cache.serve(prompt_of(1, 12))
    cache = reopened(cache, tmp_path, pages=16, units=4)
    cache.kv.prefetch(prompt_of(1, 12))
    cache.settled()
    assert cache.kv.analyze_prefix_reuse(prompt_of(1, 12)).device_blocks == 4
    assert refused(cache.kv) == 0
    cache.kv.shutdown()


# Two groups: one of full attention, one of a window that needs the last two blocks of a hit


def hybrid_on_disk(place: Path, units: int, *prompts: list[int]) -> Hybrid:
    """A cache whose host has so many units a group, and whose disk has these prompts."""
    disk = {"disk_offload_dir": str(place), "disk_offload_max_gb": 0.01}
    cache = Hybrid(model_name="m", config=disk)
    for tokens in prompts:
        cache.serve(tokens)
    assert cache.kv.flush()
    cache.kv.shutdown()
    return Hybrid(model_name="m", config={**disk, "host_offload_max_gb": units * UNIT / 2**30})


def loads(cache: Hybrid, tokens: list[int]) -> list[int]:
    """Blocks, of both groups together, of each load that brings a prompt, all of whose blocks are checked."""
    ctx = cache.claim(tokens)
    brought = []
    while True:
        transfer = cache.kv.alloc(ctx)
        if ctx.active_length:
            break
        brought.append(len(list(transfer.block_ids)))
        cache.settle()
    cache.compute(ctx, tokens)
    cache.kv.release(ctx)
    assert ctx.cached_prefix_length == len(tokens) // PAGE * PAGE
    assert refused(cache.kv) == 0
    return brought


def test_a_long_prompt_of_two_groups_comes_in_as_many_loads_as_it_takes(tmp_path: Path) -> None:
    tokens = prompt(100, 12)
    cache = hybrid_on_disk(tmp_path, 4, tokens)
    assert loads(cache, tokens) == [4 + 2] * 3
    cache.kv.shutdown()


def test_a_window_that_the_host_has_no_units_for_comes_block_by_block(tmp_path: Path) -> None:
    tokens = prompt(100, 6)
    cache = hybrid_on_disk(tmp_path, 1, tokens)
    # The window of a block reads the one before it, which the load before has brought.
    assert loads(cache, tokens) == [1 + 1] * 6
    cache.kv.shutdown()


def test_a_later_request_of_a_batch_gets_what_both_groups_have_left(tmp_path: Path) -> None:
    prompts = prompt(100, 3), prompt(500, 3)
    cache = hybrid_on_disk(tmp_path, 4, *prompts)
    batch = [cache.claim(tokens) for tokens in prompts]
    transfers = cache.kv.alloc(batch)
    assert [len(list(transfer.block_ids)) for transfer in transfers] == [3 + 2, 1 + 1]
    cache.settle()
    cache.kv.verify()
    for ctx, tokens in zip(batch, prompts, strict=True):
        cache.kv.alloc(ctx)
        if not ctx.active_length:
            cache.settle()
            cache.kv.alloc(ctx)
        assert cache.compute(ctx, tokens) == 12
    cache.kv.shutdown()


@pytest.mark.parametrize("units", range(1, 9))
def test_a_prompt_of_two_groups_comes_back_whole_through_any_host(tmp_path: Path, units: int) -> None:
    tokens = prompt(100, 9)
    cache = hybrid_on_disk(tmp_path, units, tokens)
    assert sum(loads(cache, tokens)) >= 9 + 2
    cache.kv.shutdown()
