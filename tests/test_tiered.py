"""The host tier in Rust, through the manager: blocks leave the device and come back byte for byte."""

from __future__ import annotations

import gc
import pickle
import random
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from model.host import BYTES, PAGE_SIZE, HostCache, prompt_of
from pagekeeper import (
    BlockCount,
    ByteCount,
    EvictionPolicy,
    MHAKVCacheParams,
    PagedKVCacheManager,
    RetentionConfig,
    TextContext,
    TokenRangeRetention,
)
from pagekeeper.transfers import LoadTransfer


def test_what_left_the_device_comes_back_from_host_memory() -> None:
    cache = HostCache(pages=8, units=32)
    first, second = prompt_of(1, 6), prompt_of(2, 6)
    assert cache.serve(first) == 0
    assert cache.serve(second) == 0, "it takes all pages but one: the first prompt leaves"
    cache.memory[:] = 0  # whatever comes now comes from the tier
    cache.kv.truncate_prefix([])
    assert cache.serve(first) == 24
    counted = cache.kv.metrics()
    assert counted["loaded_blocks"] == 6
    assert counted["connector_host_stored_blocks"] == 12
    assert cache.kv.host_byte_count().used == 12 * BYTES
    assert cache.kv.host_byte_count().total == 32 * BYTES


def test_what_is_planned_takes_pages_and_no_units() -> None:
    cache = HostCache(pages=8, units=32)
    all_units = ByteCount(32 * BYTES, 32 * BYTES)
    assert (cache.kv.block_count(), cache.kv.host_byte_count()) == (BlockCount(8, 8), all_units)
    cache.kv.alloc(cache.claimed(prompt_of(1, 2)))
    assert (cache.kv.block_count(), cache.kv.host_byte_count()) == (BlockCount(5, 8), all_units)


def test_a_block_on_the_device_is_not_loaded() -> None:
    cache = HostCache(pages=16, units=32)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    assert cache.serve(prompt) == 24
    assert cache.kv.metrics()["loaded_blocks"] == 0


def test_a_prefix_that_is_used_on_the_device_does_not_age_out_of_the_tier() -> None:
    cache = HostCache(pages=16, units=8)
    hot = prompt_of(1, 4)
    cache.serve(hot)
    for number in range(2, 8):
        cache.serve(prompt_of(number, 2))
        cache.serve(hot)  # hit on the device each time
    cache.kv.truncate_prefix([])
    assert cache.serve(hot) == 16
    assert cache.kv.metrics()["loaded_blocks"] == 4


def test_sessions_that_take_turns_in_a_small_tier_read_their_own_bytes_alone() -> None:
    cache = HostCache(pages=7, units=8)
    turns = random.Random(0)
    for turn in range(300):
        cache.serve(prompt_of(1 + turns.randrange(6), 5))  # looks at every byte
        cache.serve(prompt_of(100 + turn, 1))
    counted = cache.kv.metrics()
    assert counted["loaded_blocks"] > 40, "sessions came back from the tier"
    assert counted["connector_host_evicted_blocks"] > 50, "and lost units to each other"


def test_the_block_that_the_last_token_of_a_request_fills_is_stored() -> None:
    cache = HostCache(pages=8, units=32)
    ctx = cache.computed(prompt_of(1, 2)[:7])
    ctx.update(7)
    cache.forward(ctx)  # the eighth token has KV now: its block is full
    cache.kv.release(ctx)
    cache.settled()
    assert cache.counted("stored_blocks") == 2


def test_the_least_recently_used_blocks_leave_the_tier_the_tail_first() -> None:
    cache = HostCache(pages=8, units=6)
    first, second = prompt_of(1, 4), prompt_of(2, 4)
    cache.serve(first)
    cache.serve(second)
    cache.kv.truncate_prefix([])
    assert cache.serve(first) == 8, "two blocks of its tail made room for the second prompt"


@pytest.mark.parametrize("policy", list(EvictionPolicy))
@pytest.mark.parametrize("priority", [35, 0])
def test_case_77_a_block_that_the_tier_has_does_not_give_way_to_the_others_of_its_prompt(
    priority: int, policy: EvictionPolicy
) -> None:
    cache = HostCache(pages=16, units=4, eviction_policy=policy)
    prompt, others = prompt_of(1, 4), [prompt_of(2, 1), prompt_of(3, 1)]
    cache.serve(prompt[:5], retention=RetentionConfig([TokenRangeRetention(0, 4, priority=priority)]))
    for other in others:
        cache.serve(other)
    cache.kv.truncate_prefix([])
    cache.serve(prompt, no_read=True)  # four blocks are offered, and the first is the oldest in the tier
    cache.kv.truncate_prefix([])
    there = [cache.kv.analyze_prefix_reuse(tokens).host_blocks for tokens in (prompt, *others)]
    assert (there, cache.counted("evicted_blocks")) == ([4, 0, 0], 2)


def test_a_block_in_the_middle_of_a_prompt_outlives_the_others_in_the_tier_by_its_own_priority() -> None:
    cache = HostCache(pages=16, units=4)
    middle = RetentionConfig([TokenRangeRetention(4, 8, priority=75)])
    cache.serve(prompt_of(1, 3), retention=middle)
    cache.serve(prompt_of(2, 4))
    # A free unit, and those of the first prompt's last and first block; for the fourth block there is none.
    assert [cache.counted(name) for name in ("evicted_blocks", "dropped_no_unit")] == [2, 1]
    cache.kv.truncate_prefix([])
    assert cache.kv.analyze_prefix_reuse(prompt_of(1, 3)).host_blocks == 0
    ctx = cache.computed(prompt_of(1, 3), chunk=4)
    reuse = cache.kv.analyze_prefix_reuse(prompt_of(1, 3))
    assert (reuse.device_blocks, reuse.host_blocks) == (1, 1)
    cache.run(ctx)
    assert ctx.cached_prefix_length == 4


def test_under_selective_a_block_goes_at_the_hit_that_is_asked_for() -> None:
    cache = HostCache(pages=16, units=32, write_policy="selective", selective_min_hits=2)
    prompt = prompt_of(1, 4)
    counts = []
    for _ in range(4):
        cache.serve(prompt)
        counts.append(cache.counted("stored_blocks"))
    assert counts == [0, 0, 4, 4], "it was hit for the second time when it was cache for the third"
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    assert cache.serve(prompt) == 16


def test_under_selective_a_block_of_a_high_priority_goes_at_once() -> None:
    cache = HostCache(pages=16, units=32, write_policy="selective", selective_min_priority="high")
    kept = RetentionConfig([TokenRangeRetention(0, 8, priority=80)])
    cache.serve(prompt_of(1, 4), retention=kept)
    assert cache.counted("stored_blocks") == 2
    cache.kv.truncate_prefix([])
    assert cache.serve(prompt_of(1, 4)) == 8


def test_under_on_evict_blocks_go_before_the_device_needs_their_pages() -> None:
    cache = HostCache(pages=16, units=64, write_policy="on_evict")
    cache.serve(prompt_of(1, 3))
    assert cache.counted("stored_blocks") == 0, "nothing is going to be evicted"
    for number in range(2, 30):
        cache.serve([number])  # a page each, which is free again at once
        cache.serve(prompt_of(number, 1))
    # 3 + 28 blocks were published on 16 pages: what left them is in the tier.
    for number, blocks in [(1, 3), *((number, 1) for number in range(2, 30))]:
        reuse = cache.kv.analyze_prefix_reuse(prompt_of(number, blocks))
        assert reuse.reusable_blocks_all == blocks, number
    assert cache.kv.metrics()["evictions"] >= 15
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    assert cache.serve(prompt_of(1, 3)) == 12
    assert cache.kv.metrics()["loaded_blocks"] == 3


def test_under_on_evict_blocks_of_a_low_priority_are_dropped() -> None:
    cache = HostCache(pages=8, units=64, write_policy="on_evict", secondary_offload_min_priority="high")
    for number in range(1, 20):
        cache.serve(prompt_of(number, 1))
    assert cache.counted("stored_blocks") == 0


def test_under_on_evict_the_default_priority_is_enough_and_one_less_is_not() -> None:
    cache = HostCache(pages=32, units=128, write_policy="on_evict")
    for number in range(100):
        kept = RetentionConfig([TokenRangeRetention(0, 4, priority=34 + number % 2)])
        cache.serve(prompt_of(number, 1), retention=kept)
    found = [cache.kv.analyze_prefix_reuse(prompt_of(number, 1)) for number in range(100)]
    assert [summary.host_blocks for summary in found[::2]] == [0] * 50
    assert [summary.reusable_blocks_all for summary in found[1::2]] == [1] * 50
    assert sum(summary.device_blocks for summary in found[1::2]) < 32 < cache.kv.metrics()["evictions"]


def test_under_on_evict_blocks_below_one_that_was_dropped_come_back_once_it_is_computed_again() -> None:
    cache = HostCache(pages=16, units=64, write_policy="on_evict")
    prompt = prompt_of(1, 3)
    cache.serve(prompt, retention=RetentionConfig([TokenRangeRetention(0, 4, priority="low")]))
    for number in range(2, 30):
        cache.serve([number])
        cache.serve(prompt_of(number, 1))
    assert cache.kv.analyze_prefix_reuse(prompt).reusable_blocks_all == 0
    cache.memory[:] = 0
    ctx = cache.computed(prompt, chunk=4)
    cache.run(ctx)
    assert ctx.cached_prefix_length == 8


def test_every_metric_is_documented_and_memory_of_this_process_is_never_lost() -> None:
    cache = HostCache(pages=8, units=4)
    for number in (1, 2):
        cache.serve(prompt_of(number, 4))
    table = (Path(__file__).parents[1] / "docs" / "tiers.md").read_text()
    documented = set(re.findall(r"^\| `(connector_host_\w+)` \|", table, re.MULTILINE))
    counted = cache.kv.metrics()
    documented.remove("connector_host_filled_blocks")  # with a disk alone
    assert {name for name in counted if name.startswith("connector_host_")} == documented
    assert [cache.counted(name) for name in ("dropped_lost", "lost_blocks", "losses")] == [0, 0, 0]
    assert (cache.counted("stored_blocks"), cache.counted("evicted_blocks")) == (8, 4)


def test_a_reset_forgets_the_tier_too() -> None:
    cache = HostCache(pages=8, units=32)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    cache.kv.reset_prefix_cache()
    assert cache.serve(prompt) == 0
    assert cache.kv.host_byte_count().used == 6 * BYTES


def test_a_probe_tells_what_would_come_from_host_memory() -> None:
    cache = HostCache(pages=8, units=32)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    cache.kv.truncate_prefix(prompt[:8])
    reuse = cache.kv.analyze_prefix_reuse(prompt)
    assert (reuse.device_blocks, reuse.host_blocks, reuse.disk_blocks) == (2, 4, 0)


def test_prefetch_brings_blocks_back_before_they_are_asked_for() -> None:
    cache = HostCache(pages=8, units=32)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    cache.kv.prefetch(prompt).synchronize(10)
    cache.settled()
    assert cache.kv.analyze_prefix_reuse(prompt).device_blocks == 6
    assert cache.serve(prompt) == 24


def loading() -> tuple[HostCache, TextContext, LoadTransfer]:
    """A request whose six blocks are on their way from the tier."""
    cache = HostCache(pages=8, units=32)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    cache.kv.truncate_prefix([])
    ctx = cache.claimed(prompt)
    transfer = cache.kv.alloc(ctx)
    assert isinstance(transfer, LoadTransfer)
    return cache, ctx, transfer


def test_a_request_that_is_released_while_its_load_is_in_flight_leaves_nothing_behind() -> None:
    cache, ctx, transfer = loading()
    cache.kv.release(ctx)
    transfer.synchronize(10)
    cache.settled()
    cache.kv.verify()
    assert cache.kv.block_count().free == 8
    assert cache.kv.poll_transfers() == []


def test_copies_that_are_named_have_ended() -> None:
    cache, ctx, transfer = loading()
    transfer.synchronize(10)
    with pytest.raises(ValueError, match="99"):
        cache.kv.poll_transfers([99])
    assert cache.kv.poll_transfers([transfer.id]) == [ctx.request_id]
    cache.kv.verify()


def test_after_a_shutdown_the_cache_goes_on_without_the_tier() -> None:
    cache = HostCache(pages=8, units=32)
    cache.serve(prompt_of(1, 6))
    cache.kv.shutdown()
    cache.kv.shutdown()
    assert cache.kv.host_byte_count().total == 0


def test_memory_is_given_back_with_the_manager() -> None:
    cache = HostCache(pages=8, units=32)
    cache.serve(prompt_of(1, 6))
    memory = weakref.ref(cache.memory)
    del cache
    gc.collect()
    assert memory() is None


def test_a_forked_process_is_told_that_its_tier_is_elsewhere() -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from model.host import HostCache, prompt_of
cache = HostCache(pages=8, units=32)
cache.serve(prompt_of(1, 6))
child = os.fork()
if child == 0:
    reuse = cache.kv.analyze_prefix_reuse(prompt_of(2, 3))
    try:
        cache.kv.host_byte_count()
        cache.kv.reset_prefix_cache()
    except RuntimeError as error:
        os._exit(17 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert cache.serve(prompt_of(1, 6)) == 24
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_spawned_process_gets_the_parameters_and_makes_a_manager_of_its_own() -> None:
    cache = HostCache(pages=8, units=32)
    cache.serve(prompt_of(1, 6))
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(cache.kv)
    program = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from model.host import HostCache, prompt_of
params = pickle.loads({pickle.dumps(cache.params)!r})
cache = HostCache(pages=8, units=32)
assert cache.params == params
assert cache.serve(prompt_of(1, 6)) == 0
assert cache.serve(prompt_of(1, 6)) == 24
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_process_that_ends_without_a_shutdown_ends() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from model.host import HostCache, prompt_of
cache = HostCache(pages=200, units=320)
cache.serve(prompt_of(1, 150))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "dkv", "block_store_endpoint": "tcp://127.0.0.1:1"}, "not there yet"),
        ({"type": "rust_tiered", "disk_offload_dir": "store"}, "needs model_name"),
        ({"type": "rust_tiered", "disk_offload_max_gb": 1e-6}, "one block takes"),
        ({"type": "rust_tiered", "disk_offload_max_gb": 1e6}, "are free"),
        ({"type": "rust_tiered", "host_offload_max_gb": 1e9}, "may still be used"),
        ({"type": "rust_tiered", "host_offload_max_gb": 1e-8}, "one unit takes 128"),
    ],
)
def test_what_cannot_be_had_is_refused(given: dict[str, object], message: str) -> None:
    params = MHAKVCacheParams(
        dtype="float32",
        n_kv_heads=1,
        head_dim=4,
        num_layers=1,
        page_size=PAGE_SIZE,
        kv_connector_config=given,
    )
    with pytest.raises(ValueError, match=message):
        PagedKVCacheManager(
            params,
            total_num_pages=8,
            max_batch_size=1,
            allocate_pools=False,
            buffers=[np.zeros((9, BYTES), np.uint8)],
        )


def test_a_tier_needs_the_pool_that_it_copies_from() -> None:
    params = MHAKVCacheParams(
        dtype="float32",
        n_kv_heads=1,
        head_dim=4,
        num_layers=1,
        page_size=4,
        kv_connector_config="rust_tiered",
    )
    with pytest.raises(ValueError, match="needs the pool"):
        PagedKVCacheManager(params, total_num_pages=8, max_batch_size=1, allocate_pools=False)
