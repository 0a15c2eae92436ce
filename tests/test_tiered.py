"""The host tier in Rust, through the manager: blocks leave the device and come back byte for byte."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagekeeper import (
    KVConnectorConfig,
    MHAKVCacheParams,
    PagedKVCacheManager,
    RequestID,
    RetentionConfig,
    TextContext,
    TokenRangeRetention,
)
from pagekeeper.transfers import LoadTransfer

PAGE_SIZE = 4
BYTES = 2 * PAGE_SIZE * 4 * 4
"""Bytes of a page: K and V of 4 tokens, one head of 4 float32."""


class Served:
    """A cache on plain memory whose forward writes f(prefix) into the page of each block."""

    def __init__(self, pages: int, units: int, lanes: int = 2, **options: Any) -> None:
        params = MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=4,
            num_layers=1,
            page_size=PAGE_SIZE,
            **options,
            kv_connector_config=KVConnectorConfig(
                type="rust_tiered", host_offload_max_gb=units * BYTES / 2**30, num_copy_lanes=lanes
            ),
        )
        assert params.bytes_per_page == BYTES
        self.memory: NDArray[np.uint8] = np.zeros((pages + 1, BYTES), np.uint8)
        self.kv = PagedKVCacheManager(
            params, total_num_pages=pages, max_batch_size=4, allocate_pools=False, buffers=[self.memory]
        )

    def serve(self, prompt: list[int], **options: Any) -> int:
        """Computes what is not cached, checks what is, and waits for offloads. Tokens that were cached."""
        kv = self.kv
        ctx = TextContext(request_id=RequestID(), tokens=prompt, **options)
        kv.claim(ctx)
        transfer = kv.alloc(ctx)
        if ctx.active_length == 0:
            transfer.synchronize(10)
            assert kv.poll_transfers() == [ctx.request_id]
            kv.alloc(ctx)
        (row,) = kv.get_cache_indices(ctx)
        for block in range(ctx.processed_length // PAGE_SIZE, len(row)):
            self.memory[row[block]] = expected(prompt, block)
        kv.runtime_inputs([[ctx]])
        kv.step(ctx, new_tokens=[7])
        for block in range(len(prompt) // PAGE_SIZE):
            assert (self.memory[row[block]] == expected(prompt, block)).all(), f"block {block}"
        cached = ctx.cached_prefix_length
        kv.release(ctx)
        self.settle()
        kv.verify()
        return cached

    def settle(self) -> None:
        while self.kv.metrics()["copies_in_flight"]:
            self.kv.poll_transfers()


def expected(prompt: list[int], block: int) -> int:
    """The byte that the page of a block is filled with: of the whole prefix up to it."""
    return hash(tuple(prompt[: (block + 1) * PAGE_SIZE])) % 251 + 1


def prompt_of(number: int, blocks: int) -> list[int]:
    return [number * 1000 + token for token in range(blocks * PAGE_SIZE + 1)]


def test_what_left_the_device_comes_back_from_host_memory() -> None:
    served = Served(pages=8, units=32)
    first, second = prompt_of(1, 6), prompt_of(2, 6)
    assert served.serve(first) == 0
    assert served.serve(second) == 0, "it takes all pages but one: the first prompt leaves"
    served.memory[:] = 0  # whatever comes now comes from the tier
    served.kv.truncate_prefix([])
    assert served.serve(first) == 24
    counted = served.kv.metrics()
    assert counted["loaded_blocks"] == 6
    assert counted["connector_host_stored_blocks"] == 12
    assert served.kv.host_byte_count().used == 12 * BYTES
    assert served.kv.host_byte_count().total == 32 * BYTES


def test_a_block_on_the_device_is_not_loaded() -> None:
    served = Served(pages=16, units=32)
    prompt = prompt_of(1, 6)
    served.serve(prompt)
    assert served.serve(prompt) == 24
    assert served.kv.metrics()["loaded_blocks"] == 0


def test_a_prefix_that_is_used_on_the_device_does_not_age_out_of_the_tier() -> None:
    served = Served(pages=16, units=8)
    hot = prompt_of(1, 4)
    served.serve(hot)
    for number in range(2, 8):
        served.serve(prompt_of(number, 2))
        served.serve(hot)  # hit on the device each time
    served.kv.truncate_prefix([])
    assert served.serve(hot) == 16
    assert served.kv.metrics()["loaded_blocks"] == 4


def test_the_least_recently_used_blocks_leave_the_tier_the_tail_first() -> None:
    served = Served(pages=8, units=6)
    first, second = prompt_of(1, 4), prompt_of(2, 4)
    served.serve(first)
    served.serve(second)
    served.kv.truncate_prefix([])
    assert served.serve(first) == 8, "two blocks of its tail made room for the second prompt"


def stored(served: Served) -> int:
    return served.kv.metrics()["connector_host_stored_blocks"]


def test_under_selective_a_block_goes_at_the_hit_that_is_asked_for() -> None:
    served = Served(pages=16, units=32, write_policy="selective", selective_min_hits=2)
    prompt = prompt_of(1, 4)
    counts = []
    for _ in range(4):
        served.serve(prompt)
        counts.append(stored(served))
    assert counts == [0, 0, 4, 4], "it was hit for the second time when it was served for the third"
    served.kv.truncate_prefix([])
    served.memory[:] = 0
    assert served.serve(prompt) == 16


def test_under_selective_a_block_of_a_high_priority_goes_at_once() -> None:
    served = Served(pages=16, units=32, write_policy="selective", selective_min_priority="high")
    kept = RetentionConfig([TokenRangeRetention(0, 8, priority=80)])
    served.serve(prompt_of(1, 4), retention=kept)
    assert stored(served) == 2
    served.kv.truncate_prefix([])
    assert served.serve(prompt_of(1, 4)) == 8


def test_under_on_evict_blocks_go_before_the_device_needs_their_pages() -> None:
    served = Served(pages=16, units=64, write_policy="on_evict")
    served.serve(prompt_of(1, 3))
    assert stored(served) == 0, "nothing is going to be evicted"
    for number in range(2, 30):
        served.serve([number])  # a page each, which is free again at once
        served.serve(prompt_of(number, 1))
    # 3 + 28 blocks were published on 16 pages: what left them is in the tier.
    for number, blocks in [(1, 3), *((number, 1) for number in range(2, 30))]:
        reuse = served.kv.analyze_prefix_reuse(prompt_of(number, blocks))
        assert reuse.reusable_blocks_all == blocks, number
    assert served.kv.metrics()["evictions"] >= 15
    served.kv.truncate_prefix([])
    served.memory[:] = 0
    assert served.serve(prompt_of(1, 3)) == 12
    assert served.kv.metrics()["loaded_blocks"] == 3


def test_under_on_evict_blocks_of_a_low_priority_are_dropped() -> None:
    served = Served(pages=8, units=64, write_policy="on_evict", secondary_offload_min_priority="high")
    for number in range(1, 20):
        served.serve(prompt_of(number, 1))
    assert stored(served) == 0


def test_a_reset_forgets_the_tier_too() -> None:
    served = Served(pages=8, units=32)
    prompt = prompt_of(1, 6)
    served.serve(prompt)
    served.kv.reset_prefix_cache()
    assert served.serve(prompt) == 0
    assert served.kv.host_byte_count().used == 6 * BYTES


def test_a_probe_tells_what_would_come_from_host_memory() -> None:
    served = Served(pages=8, units=32)
    prompt = prompt_of(1, 6)
    served.serve(prompt)
    served.kv.truncate_prefix(prompt[:8])
    reuse = served.kv.analyze_prefix_reuse(prompt)
    assert (reuse.device_blocks, reuse.host_blocks, reuse.disk_blocks) == (2, 4, 0)


def test_prefetch_brings_blocks_back_before_they_are_asked_for() -> None:
    served = Served(pages=8, units=32)
    prompt = prompt_of(1, 6)
    served.serve(prompt)
    served.kv.truncate_prefix([])
    served.memory[:] = 0
    served.kv.prefetch(prompt).synchronize(10)
    served.settle()
    assert served.kv.analyze_prefix_reuse(prompt).device_blocks == 6
    assert served.serve(prompt) == 24


def loading() -> tuple[Served, TextContext, LoadTransfer]:
    """A request whose six blocks are on their way from the tier."""
    served = Served(pages=8, units=32)
    prompt = prompt_of(1, 6)
    served.serve(prompt)
    served.kv.truncate_prefix([])
    ctx = TextContext(request_id=RequestID(), tokens=prompt)
    served.kv.claim(ctx)
    transfer = served.kv.alloc(ctx)
    assert isinstance(transfer, LoadTransfer)
    return served, ctx, transfer


def test_a_request_that_is_released_while_its_load_is_in_flight_leaves_nothing_behind() -> None:
    served, ctx, transfer = loading()
    served.kv.release(ctx)
    transfer.synchronize(10)
    served.settle()
    served.kv.verify()
    assert served.kv.block_count().free == 8
    assert served.kv.poll_transfers() == []


def test_copies_that_are_named_have_ended() -> None:
    served, ctx, transfer = loading()
    transfer.synchronize(10)
    with pytest.raises(ValueError, match="99"):
        served.kv.poll_transfers([99])
    assert served.kv.poll_transfers([transfer.id]) == [ctx.request_id]
    served.kv.verify()


def test_after_a_shutdown_the_cache_goes_on_without_the_tier() -> None:
    served = Served(pages=8, units=32)
    served.serve(prompt_of(1, 6))
    served.kv.shutdown()
    served.kv.shutdown()
    assert served.kv.host_byte_count().total == 0


def test_memory_is_given_back_with_the_manager() -> None:
    served = Served(pages=8, units=32)
    served.serve(prompt_of(1, 6))
    memory = weakref.ref(served.memory)
    del served
    gc.collect()
    assert memory() is None


def test_a_forked_process_is_told_that_its_tier_is_elsewhere() -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tiered import Served, prompt_of
served = Served(pages=8, units=32)
served.serve(prompt_of(1, 6))
child = os.fork()
if child == 0:
    reuse = served.kv.analyze_prefix_reuse(prompt_of(2, 3))
    try:
        served.kv.host_byte_count()
        served.kv.reset_prefix_cache()
    except RuntimeError as error:
        os._exit(17 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert served.serve(prompt_of(1, 6)) == 24
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_process_that_ends_without_a_shutdown_ends() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tiered import Served, prompt_of
served = Served(pages=200, units=320)
served.serve(prompt_of(1, 150))
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


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros((8, BYTES), np.uint8),
        np.zeros((9, BYTES), np.int8),
        np.zeros((9, 2 * BYTES), np.uint8)[:, ::2],
        np.frombuffer(bytes(9 * BYTES), np.uint8).reshape(9, BYTES),
    ],
)
def test_plain_memory_that_is_no_pool_is_refused(memory: NDArray[np.uint8]) -> None:
    params = MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=4, num_layers=1, page_size=4)
    with pytest.raises(ValueError, match=r"must be \[9, 128\] of uint8"):
        PagedKVCacheManager(params, total_num_pages=8, max_batch_size=1, buffers=[memory])
