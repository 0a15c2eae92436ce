"""Tiers of caches with several groups of layers: what is loaded, what it holds, and what waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.two_groups import NEAR, PAGE, PAGES, Hybrid, params_of, prompt
from pagekeeper.connectors import NullConnector
from pagekeeper.doctor import examine
from pagekeeper.params import FullAttention
from pagekeeper.transfers import Transfer, pending


@pytest.fixture
def native() -> Iterator[Hybrid]:
    cache = Hybrid()
    yield cache
    cache.kv.shutdown()


def test_host_memory_brings_back_of_each_group_what_it_needs(native: Hybrid) -> None:
    tokens = prompt(100, 8)
    assert native.serve(tokens) == 0
    native.forget()
    assert native.kv.probe_prefix_match_length(tokens) == 8 * PAGE
    assert native.serve(tokens) == 8 * PAGE
    # Tokens 27 to 31 are before the next one in its window: blocks 6 and 7.
    assert native.loaded() == 8 + 2


def test_what_the_device_has_of_a_group_is_not_loaded(native: Hybrid) -> None:
    tokens = prompt(100, 8)
    native.serve(tokens)
    native.forget()
    native.serve(tokens)
    held = native.claim(tokens)
    native.kv.alloc(held)
    for other in range(3):
        native.serve(prompt(1000 * other + 1000, 12))
    native.forget()
    before = native.loaded()
    # Half of the prompt, then tokens of its own: its window is blocks 2 and 3, which the window has lost.
    assert native.serve([*tokens[: 4 * PAGE], 7]) == 4 * PAGE
    assert native.loaded() - before == 2
    native.compute(held, tokens)
    native.kv.release(held)


def test_a_prompt_that_parts_earlier_finds_the_window_there(native: Hybrid) -> None:
    tokens = prompt(100, 6)
    native.serve(tokens)
    native.forget()
    assert native.serve(tokens[: 3 * PAGE + 2] + [5] * PAGE * 2) == 3 * PAGE


def test_a_block_that_a_token_by_itself_fills_is_stored_without_another_step(native: Hybrid) -> None:
    ctx = native.claim(prompt(100, 2)[: 2 * PAGE - 1])
    for most in (None, 1):
        native.kv.alloc(ctx, num_tokens=most)
        native.kv.runtime_inputs([[ctx]])
    for _ in range(2):
        native.kv.step(ctx, counts=0)
    native.settle()
    ctx.update(7)
    assert native.kv.metrics()["published_blocks"] == 2
    native.kv.release(ctx)
    native.settle()
    assert native.kv.metrics()["copies_in_flight"] == 0
    assert native.kv.metrics()["connector_host_stored_blocks"] == 2 * 2


def test_blocks_of_all_groups_survive_on_disk(tmp_path: Path) -> None:
    config = {"disk_offload_dir": str(tmp_path), "disk_offload_max_gb": 0.01}
    tokens = prompt(100, 8)
    cache = Hybrid(model_name="m", config=config)
    cache.serve(tokens)
    assert cache.kv.flush(10.0)
    cache.kv.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-0-group-1"]
    assert [(store.status, store.blocks) for store in examine(tmp_path).stores] == [("sound", 8)] * 2
    cache = Hybrid(model_name="m", config=config)
    assert cache.serve(tokens) == 8 * PAGE
    assert cache.kv.metrics()["connector_disk_loaded_blocks"] == 8 + 2
    cache.kv.shutdown()


def test_a_store_of_other_groups_is_refused(tmp_path: Path) -> None:
    config = {"disk_offload_dir": str(tmp_path), "disk_offload_max_gb": 0.01}
    Hybrid(model_name="m", config=config).kv.shutdown()
    plain = params_of(1, FullAttention(), kv_connector_config={"type": "rust_tiered", **config})
    with pytest.raises(ValueError, match="group is 1 of 2"):
        pk.PagedKVCacheManager(plain, total_num_pages=PAGES, max_batch_size=4, model_name="m")


def test_a_suspended_request_comes_back_with_the_same_row_in_each_group(native: Hybrid) -> None:
    tokens = prompt(100, 8)
    ctx = native.claim(tokens)
    native.kv.alloc(ctx, num_tokens=6 * PAGE + 2)
    native.kv.step(ctx)
    native.kv.alloc(ctx)
    for name, pool in native.pools.items():
        [row] = native.kv.get_cache_indices(ctx, name)
        for block, page in enumerate(row):
            if page:
                pool[page] = native.content(name, tokens, block)
    native.kv.step(ctx)
    rows = {name: native.kv.get_cache_indices(ctx, name)[0] for name in native.pools}
    assert [page > 0 for page in rows[NEAR]] == [False] * 7 + [True] * 2  # tokens 28 to 32
    native.settle()
    native.kv.suspend(ctx)
    native.settle()
    native.forget()
    native.kv.verify()
    assert native.kv.metrics()["connector_host_private_units"] == 9 + 2
    for pool in native.pools.values():
        pool[:] = 255
    native.kv.resume(ctx)
    native.settle()
    for name, pool in native.pools.items():
        [row] = native.kv.get_cache_indices(ctx, name)
        assert [page > 0 for page in row] == [page > 0 for page in rows[name]]
        for block, page in enumerate(row):
            if page:
                assert (pool[page] == native.content(name, tokens, block)).all()
    native.kv.verify()
    assert native.kv.metrics()["connector_host_private_units"] == 0


def test_a_request_that_leaves_gives_the_units_of_all_groups_back(native: Hybrid) -> None:
    ctx = native.claim(prompt(100, 8))
    native.kv.alloc(ctx)
    native.kv.step(ctx)
    native.kv.suspend(ctx)
    native.kv.release(ctx)
    native.settle()
    native.kv.verify()
    assert native.kv.metrics()["connector_host_private_units"] == 0
    assert all(native.kv.block_count(group=name).free == PAGES for name in native.pools)


class Lists(NullConnector):
    """A connector in Python that keeps blocks of several groups; its loads end when the test says so."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, pk.BlockKey], np.ndarray[Any, Any]] = {}
        self.pools: list[np.ndarray[Any, Any]] = []
        self.loads: list[tuple[list[list[int]], list[list[pk.BlockKey]], Any]] = []
        self.refuses = False

    def lookup(self, block_hashes: Any, replica_idx: int = 0, hint: object = None) -> list[list[bool]]:
        return [[(group, key) in self.kept for key in keys] for group, keys in enumerate(block_hashes)]

    def load(self, block_ids: Any, block_hashes: Any, replica_idx: int = 0, hint: object = None) -> Transfer:
        if self.refuses:
            raise pk.KVLoadRefused("the test says so")
        transfer, completer = pending([page for pages in block_ids for page in pages])
        self.loads.append((block_ids, block_hashes, completer))
        return transfer

    def offload(self, block_ids: Any, block_hashes: Any, replica_idx: int = 0) -> Any:
        for group, (pages, keys) in enumerate(zip(block_ids, block_hashes, strict=True)):
            for page, key in zip(pages, keys, strict=True):
                self.kept[group, key] = self.pools[group][page].copy()
        return super().offload(block_ids, block_hashes)

    def finish(self) -> None:
        for ids, hashes, completer in self.loads:
            for group, (pages, keys) in enumerate(zip(ids, hashes, strict=True)):
                for page, key in zip(pages, keys, strict=True):
                    self.pools[group][page] = self.kept[group, key]
            completer.finish()
        self.loads = []


def test_a_connector_in_python_gets_one_list_a_group() -> None:
    tier = Lists()
    cache = Hybrid(tier)
    tokens = prompt(100, 8)
    cache.serve(tokens)
    assert sorted(group for group, _ in tier.kept) == [0] * 8 + [1] * 8
    cache.forget()
    ctx = cache.claim(tokens)
    [transfer] = cache.kv.alloc([ctx])
    [(ids, hashes, _)] = tier.loads
    assert [len(pages) for pages in ids] == [len(keys) for keys in hashes] == [8, 2]
    assert list(transfer.block_ids) == [*ids[0], *ids[1]]
    assert (ctx.cached_prefix_length, ctx.processed_length) == (8 * PAGE, 0)
    tier.finish()
    assert cache.kv.poll_transfers() == [ctx.request_id]
    cache.kv.alloc(ctx)
    assert cache.compute(ctx, tokens) == 8 * PAGE
    cache.kv.verify()


@pytest.mark.parametrize("end", ["fails", "is refused", "is left by a release", "is left by a preemption"])
def test_a_load_that_does_not_land_leaves_nothing_behind(end: str) -> None:
    tier = Lists()
    cache = Hybrid(tier)
    tokens = prompt(100, 8)
    cache.serve(tokens)
    cache.forget()
    ctx = cache.claim(tokens)
    tier.refuses = end == "is refused"
    cache.kv.alloc(ctx)
    cache.kv.verify()
    if end == "is refused":
        assert (ctx.cached_prefix_length, ctx.active_length) == (0, len(tokens))
        cache.kv.step(ctx)
    elif end == "fails":
        tier.loads[0][2].fail("the test says so")
        assert cache.kv.poll_transfers() == [ctx.request_id]
        assert ctx.cached_prefix_length == 0
        cache.kv.alloc(ctx)
        assert cache.compute(ctx, tokens) == 0
    elif end == "is left by a release":
        cache.kv.release(ctx)
        tier.finish()
        assert cache.kv.poll_transfers() == []
    else:
        cache.kv.preempt(ctx)
        tier.finish()
        assert cache.kv.poll_transfers() == []
    cache.kv.verify()
    if end != "is left by a release":
        cache.kv.release(ctx)
    cache.settle()
    assert all(cache.kv.block_count(group=name).free == PAGES for name in cache.pools)


def test_a_prefetch_brings_what_each_group_needs_and_no_forward() -> None:
    tier = Lists()
    cache = Hybrid(tier)
    tokens = prompt(100, 8)
    cache.serve(tokens)
    cache.forget()
    transfer = cache.kv.prefetch(tokens)
    [(ids, _, _)] = tier.loads
    assert [len(pages) for pages in ids] == [8, 2]
    tier.finish()
    assert transfer.is_complete()
    assert cache.kv.poll_transfers() == []
    assert cache.kv.metrics()["requests"] == 0
    assert cache.kv.analyze_prefix_reuse(tokens).device_blocks == 8
    cache.kv.verify()
