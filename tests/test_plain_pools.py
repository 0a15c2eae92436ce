"""Pools of plain memory, without torch: page first, layer first, in one array or in many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagekeeper as pk

LAYERS, PAGE_SIZE, HEADS, DIM = 3, 4, 2, 4
PLANE = PAGE_SIZE * HEADS * DIM * 4
"""Bytes of the keys, or of the values, of a page in one layer; float32."""
PAGES = 12
PROMPT = list(range(100, 113))
"""Three blocks and a token: four pages."""


@dataclass
class Pool:
    """Memory as an engine has it."""

    memory: NDArray[np.uint8]
    buffers: list[NDArray[np.uint8]]
    """What the manager is given."""
    page: Callable[[int], NDArray[np.uint8]]
    """A view of a page, by the engine's own indices."""


def page_first() -> Pool:
    memory = np.zeros((PAGES + 1, LAYERS * 2 * PLANE), np.uint8)
    return Pool(memory, [memory], lambda page: memory[page])


def layer_first() -> Pool:
    memory = np.zeros((LAYERS, PAGES + 1, 2 * PLANE), np.uint8)
    return Pool(memory, [np.moveaxis(memory, 1, 0)], lambda page: memory[:, page])


def keys_and_values_first() -> Pool:
    memory = np.zeros((2, LAYERS, PAGES + 1, PAGE_SIZE, HEADS, DIM * 4), np.uint8)
    return Pool(memory, [np.moveaxis(memory, 2, 0)], lambda page: memory[:, :, page])


def an_array_a_layer() -> Pool:
    memory = np.zeros((LAYERS, 2, PAGES + 1, PLANE), np.uint8)
    return Pool(memory, [np.moveaxis(layer, 1, 0) for layer in memory], lambda page: memory[:, :, page])


def an_array_a_plane() -> Pool:
    memory = np.zeros((LAYERS, 2, PAGES + 1, PLANE), np.uint8)
    return Pool(memory, [plane for layer in memory for plane in layer], lambda page: memory[:, :, page])


def heads_apart() -> Pool:
    memory = np.zeros((HEADS, PAGES + 1, LAYERS * 2 * PAGE_SIZE, DIM * 4), np.uint8)
    return Pool(memory, [np.moveaxis(memory, 0, 2)], lambda page: memory[:, page])


LAYOUTS = [page_first, layer_first, keys_and_values_first, an_array_a_layer, an_array_a_plane, heads_apart]


def manager(buffers: Any, connector: str = "rust_tiered") -> pk.PagedKVCacheManager:
    params = pk.MHAKVCacheParams(
        dtype="float32",
        n_kv_heads=HEADS,
        head_dim=DIM,
        num_layers=LAYERS,
        page_size=PAGE_SIZE,
        kv_connector_config={"type": connector, "host_offload_max_gb": 2**-10},
    )
    return pk.PagedKVCacheManager(params, total_num_pages=PAGES, max_batch_size=4, buffers=buffers)


def settle(kv: pk.PagedKVCacheManager) -> list[object]:
    ready = kv.poll_transfers()
    while kv.metrics()["copies_in_flight"]:
        ready += kv.poll_transfers()
    return ready


@pytest.fixture(params=LAYOUTS)
def pool(request: pytest.FixtureRequest) -> Pool:
    made: Pool = request.param()
    return made


def computed(kv: pk.PagedKVCacheManager, pool: Pool) -> tuple[pk.TextContext, list[NDArray[np.uint8]]]:
    """A request whose pages hold random bytes, and these bytes, block by block."""
    ctx = pk.TextContext(request_id=pk.RequestID(), tokens=PROMPT)
    kv.claim(ctx)
    kv.alloc(ctx)
    random = np.random.default_rng(0)
    row = kv.get_cache_indices(ctx)[0]
    for page in row:
        pool.page(page)[...] = random.integers(0, 256, pool.page(page).shape, np.uint8)
    kv.step(ctx, counts=0)
    return ctx, [pool.page(page).copy() for page in row]


def test_blocks_go_to_host_memory_and_come_back_byte_for_byte(pool: Pool) -> None:
    kv = manager(pool.buffers)
    ctx, written = computed(kv, pool)
    kv.release(ctx)
    settle(kv)
    kv.truncate_prefix([])
    pool.memory[:] = 77
    ctx = pk.TextContext(request_id=pk.RequestID(), tokens=[*PROMPT, 1])
    kv.claim(ctx)
    kv.alloc(ctx).synchronize(10)
    assert settle(kv) == [ctx.request_id]
    row = kv.get_cache_indices(ctx)[0][:3]
    for page, block in zip(row, written, strict=False):
        assert (pool.page(page) == block).all()
    for page in set(range(PAGES + 1)) - set(row):
        assert (pool.page(page) == 77).all(), f"page {page} is nobody's"


def test_a_request_is_suspended_and_comes_back_byte_for_byte(pool: Pool) -> None:
    kv = manager(pool.buffers)
    ctx, written = computed(kv, pool)
    settle(kv)
    kv.suspend(ctx).synchronize(10)
    settle(kv)
    kv.truncate_prefix([])
    pool.memory[:] = 77
    kv.resume(ctx).synchronize(10)
    assert settle(kv) == [ctx.request_id]
    row = kv.get_cache_indices(ctx)[0]
    for page, block in zip(row, written, strict=True):
        assert (pool.page(page) == block).all()
    for page in set(range(PAGES + 1)) - set(row):
        assert (pool.page(page) == 77).all(), f"page {page} is nobody's"


def test_a_page_is_copied_where_two_requests_part(pool: Pool) -> None:
    kv = manager(pool.buffers, connector="null")
    parent, written = computed(kv, pool)
    child = kv.fork(parent)
    parent.update(1)
    child.update(2)
    kv.alloc([parent, child])
    kv.runtime_inputs([[parent, child]])
    (theirs, own) = (kv.get_cache_indices(ctx)[0][3] for ctx in (parent, child))
    assert theirs != own
    for page in (theirs, own):
        assert (pool.page(page) == written[3]).all()


def test_after_a_sleep_pages_may_lie_otherwise() -> None:
    first, second = page_first(), layer_first()
    kv = manager(first.buffers)
    ctx, written = computed(kv, first)
    settle(kv)
    kv.suspend(ctx).synchronize(10)
    kv.sleep()
    kv.wake(buffers=second.buffers)
    kv.resume(ctx).synchronize(10)
    assert settle(kv) == [ctx.request_id]
    for page, block in zip(kv.get_cache_indices(ctx)[0], written, strict=True):
        assert (second.page(page).ravel() == block.ravel()).all()


GIVEN = LAYERS * 2 * PLANE
ONE = np.zeros((PAGES + 1, GIVEN), np.uint8)
HALF = np.zeros((PAGES + 1, GIVEN // 2), np.uint8)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([ONE[1:]], r"^buffers\[0\]: \[12, 768\] of uint8, writable; must be \[13, \.\.\.\] of uint8"),
        ([ONE.view(np.int8)], r"^buffers\[0\]: \[13, 768\] of int8"),
        ([np.frombuffer(ONE.tobytes(), np.uint8).reshape(ONE.shape)], "read-only; must be"),
        ([np.zeros((LAYERS, PAGES + 1, 2 * PLANE), np.uint8)], "the first axis is the page"),
        ([np.zeros((), np.uint8)], r"^buffers\[0\]: \[\] of uint8"),
        ([HALF], r"^buffers: 384 bytes a page, must be 768 in all arrays"),
        ([ONE, HALF], "1152 bytes a page"),
        ([HALF, HALF], r"^buffers\[0\], buffers\[1\]: have bytes in common"),
        ([ONE[:, : GIVEN // 2], ONE[:, 100 : 100 + GIVEN // 2]], "have bytes in common"),
    ],
)
def test_plain_memory_that_is_no_pool_is_refused(buffers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manager(buffers)


def test_pages_that_overlap_have_no_host_tier() -> None:
    memory = np.zeros(PAGES * GIVEN // 2 + GIVEN, np.uint8)
    overlapping = np.lib.stride_tricks.as_strided(memory, (PAGES + 1, GIVEN), (GIVEN // 2, 1))
    with pytest.raises(ValueError, match="overlap"):
        manager([overlapping])


def test_arrays_and_something_else_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"buffers\[1\]: got list, must be a numpy array"):
        manager([HALF, [1]])
