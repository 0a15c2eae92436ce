"""TensorRT-LLM's block offsets, and the pointers that they are distances from (TAB-3, TAB-4, TAB-8)."""

from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, decode_and_prompt, manager, prefilled, store
from model.grouped import grouped
from pagekeeper.params import (
    FullAttention,
    IndexerKCache,
    KVCacheQuantizationConfig,
    MultiKVCacheParams,
    SlidingWindow,
)

PROMPT = list(range(10, 30))


@pytest.fixture
def kv() -> pk.PagedKVCacheManager:
    return manager(pages=9, max_batch_size=4)


@pytest.fixture
def batch(kv: pk.PagedKVCacheManager) -> list[pk.TextContext]:
    return decode_and_prompt(kv)


# Tables of a step


def test_the_tensorrt_form_has_an_entry_for_each_field_of_each_block(kv: Any, batch: Any) -> None:
    tables = kv.runtime_inputs([batch], form="tensorrt")[0]
    (offsets,) = tables.pools
    assert (offsets.dtype, offsets.shape) == (np.int32, (2, 2, 32))
    # Three layers: six entries a page.
    assert offsets[:, :, :2].tolist() == [[[6, 12], [7, 13]], [[18, 24], [19, 25]]]
    assert (offsets[:, :, 2:] == -1).all()
    assert (tables.seq_lens.dtype, tables.query_start_loc.dtype) == (np.int32, np.int32)
    assert tables.seq_lens.tolist() == [7, 5]
    assert tables.query_start_loc.tolist() == [0, 1, 6]
    assert (tables.max_query_len, tables.max_seq_len) == (5, 7)


def test_layers_that_differ_have_a_table_for_each_pool() -> None:
    kv = manager(num_layers=4, n_kv_heads=[2, 2, 1, 2])  # pools of three layers and of one
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    pools = kv.runtime_inputs([[ctx]], form="tensorrt")[0].pools
    assert [pool[0, :, :2].tolist() for pool in pools] == [[[6, 12], [7, 13]], [[2, 4], [3, 5]]]
    out = np.zeros((2, 1, 2, 2), np.int32)
    assert kv.copy_block_offsets(out, 0, ctx) == 2
    assert out[:, 0].tolist() == [[[6, 12], [7, 13]], [[2, 4], [3, 5]]]


def test_latents_have_entries_for_one_field() -> None:
    params = pk.MLAKVCacheParams(
        dtype="float32", kv_lora_rank=6, qk_rope_head_dim=2, num_layers=5, page_size=4
    )
    kv = pk.PagedKVCacheManager(params, None, 4, max_batch_size=1, allocate_pools=False)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    (offsets,) = kv.runtime_inputs([[ctx]], form="tensorrt")[0].pools
    assert offsets[0, 0, :3].tolist() == [5, 10, -1]
    assert (offsets[0, 1] == -1).all()


def test_a_shorter_row_leaves_no_entry_of_the_longer_one_before_it() -> None:
    kv = manager(pages=9)
    store(kv, PROMPT[:16])
    long = claimed(kv, range(60, 76))
    kv.alloc(long)
    for _ in range(2):
        kv.runtime_inputs([[long]], form="tensorrt")
    kv.release(long)
    short = claimed(kv, [1])
    kv.alloc(short)
    for _ in range(2):
        (offsets,) = kv.runtime_inputs([[short]], form="tensorrt")[0].pools
        (page,) = kv.get_cache_indices(short)[0]
        assert offsets[0].tolist() == [[6 * page] + [-1] * 31, [6 * page + 1] + [-1] * 31]


def test_a_block_behind_the_window_is_all_ones() -> None:
    kv = grouped({"full": FullAttention(), "window": SlidingWindow(5)})
    ctx = prefilled(kv, PROMPT[:12])
    ctx.update(7)
    kv.alloc(ctx)
    inputs = kv.runtime_inputs([[ctx]], form="tensorrt")
    (full,), (window,) = inputs["full"][0].pools, inputs["window"][0].pools
    # The token at 12 reads from 8 on. One layer: two entries a page.
    assert full[0, 0, :4].tolist() == [2, 4, 6, 8]
    assert window[0, 0, :4].tolist() == [-1, -1, 6, 8]


def test_a_form_that_cannot_be_written_is_refused_before_anything_is_taken() -> None:
    kv = manager(page_size=6)
    ctx = claimed(kv, PROMPT[:3])
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="page_size=6: TensorRT-LLM tables need a power of two above 1"):
        kv.runtime_inputs([[ctx]], form="tensorrt")
    assert kv.fingerprint() == before
    assert kv.runtime_inputs([[ctx]])[0].lookup_table[0, 0] == 1


def test_a_pool_with_a_page_past_the_last_entry_has_no_tables() -> None:
    kv = manager(pages=2, num_layers=2**29, n_kv_heads=1, head_dim=1)
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    with pytest.raises(ValueError, match=f"page 2 of {2**29} layers"):
        kv.runtime_inputs([[ctx]], form="tensorrt")


# Rows of the engine's own table


def test_a_block_offset_is_page_times_layers_times_two_plus_the_field(kv: Any, batch: Any) -> None:
    out = np.full((1, 3, 2, 4), 77, np.int32)
    assert kv.copy_block_offsets(out, 1, batch[1]) == 2
    # pages 3 and 4 of 3 layers: 3 * 3 * 2 = 18 and 24; a cell without a page is all ones
    assert out[0, 1].tolist() == [[18, 24, -1, -1], [19, 25, -1, -1]]
    assert (out[0, [0, 2]] == 77).all()


def test_block_offsets_may_be_asked_for_by_slot(kv: Any, batch: Any) -> None:
    out = np.zeros((1, 1, 2, 2), np.int32)
    kv.copy_block_offsets(out, 0, batch[0].slot)
    assert out[0, 0].tolist() == [[6, 12], [7, 13]]


@pytest.mark.parametrize(
    ("out", "row"),
    [
        (np.zeros((1, 1, 2, 2), np.int64), 0),
        (np.zeros((2, 1, 2, 2), np.int32), 0),
        (np.zeros((1, 1, 1, 2), np.int32), 0),
        (np.zeros((1, 2, 2), np.int32), 0),
        (np.zeros((1, 1, 2, 2), np.int32), 1),
        (np.zeros((1, 1, 2, 2), np.int32), -1),
        (np.zeros((1, 1, 2, 1), np.int32), 0),
    ],
    ids=["int64", "two pools", "one field", "three axes", "no such row", "negative row", "too few blocks"],
)
def test_a_block_offset_table_that_does_not_fit_is_refused_and_left_alone(
    kv: Any, batch: Any, out: Any, row: int
) -> None:
    with pytest.raises(ValueError, match=r"^(out: |slot=)"):
        kv.copy_block_offsets(out, row, batch[0])
    assert not out.any()


@pytest.mark.parametrize("page_size", [1, 6])
def test_block_offsets_need_a_page_size_that_is_a_power_of_two_above_one(page_size: int) -> None:
    kv = manager(page_size=page_size)
    ctx = prefilled(kv, PROMPT[:3])
    with pytest.raises(ValueError, match=f"page_size={page_size}"):
        kv.copy_block_offsets(np.zeros((1, 1, 2, 8), np.int32), 0, ctx)


@pytest.mark.parametrize(("layers", "fits"), [(2**29 - 1, True), (2**29, False)])
def test_a_block_offset_never_reaches_the_bit_that_marks_host_memory(layers: int, fits: bool) -> None:
    kv = manager(pages=2, num_layers=layers, n_kv_heads=1, head_dim=1)
    ctx = prefilled(kv, PROMPT[:8])  # pages 1 and 2: the values of page 2 are entry 4 * layers + 1
    out = np.zeros((1, 1, 2, 2), np.int32)
    if fits:
        kv.copy_block_offsets(out, 0, ctx)
        assert out[0, 0, :, 1].tolist() == [2**31 - 4, 2**31 - 3]
    else:
        with pytest.raises(ValueError, match=f"page 2 of {layers} layers"):
            kv.copy_block_offsets(out, 0, ctx)
        assert not out.any()


# Pointers


def address(kv: Any, layer: int, page: int, field: int, group: str | None = None) -> int:
    """Where a field of a layer begins in a page."""
    pointer: int = kv.get_buffers(layer, group=group)[page, field].data_ptr()
    return pointer


def test_entries_lead_from_the_pointers_to_the_pages() -> None:
    pytest.importorskip("torch")
    kv = manager(num_layers=4, n_kv_heads=[2, 2, 1, 2], allocate_pools=True)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    tables = kv.runtime_inputs([[ctx]], form="tensorrt")[0]
    pointers = kv.pool_pointers()
    assert [(it.scales, it.indexer_k) for it in pointers] == [(0, 0), (0, 0)]
    assert isinstance(kv.params, pk.MHAKVCacheParams)
    for layer, (pool, index) in enumerate(kv.params.layer_to_pool):
        block = 4 * [2, 2, 1, 2][layer] * 4 * 4  # tokens, heads, values, bytes
        for field in (0, 1):
            for number, page in enumerate(kv.get_cache_indices(ctx)[0]):
                entry = int(tables.pools[pool][0, field, number])
                place = pointers[pool].data + (entry + 2 * index) * block
                assert place == address(kv, layer, page, field)


def test_entries_lead_to_the_pages_of_groups_that_share_memory() -> None:
    pytest.importorskip("torch")
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 8, "page_size": 4}
    groups = {
        "full": pk.MHAKVCacheParams(**shape, num_layers=1),
        "window": pk.MHAKVCacheParams(**shape, num_layers=3, kind=SlidingWindow(64)),
    }
    kv = pk.PagedKVCacheManager(MultiKVCacheParams(groups), None, available_bytes=64 << 10, max_batch_size=1)
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    inputs = kv.runtime_inputs([[ctx]], form="tensorrt")
    for name, layers in (("full", 1), ("window", 3)):
        (pointers,), (offsets,) = kv.pool_pointers(name), inputs[name][0].pools
        for layer in range(layers):
            for number, page in enumerate(kv.get_cache_indices(ctx, name)[0]):
                place = pointers.data + (int(offsets[0, 1, number]) + 2 * layer) * 4 * 8 * 4
                assert place == address(kv, layer, page, 1, name)


def test_scales_and_an_indexers_keys_have_pointers_of_their_own() -> None:
    pytest.importorskip("torch")
    scaled = KVCacheQuantizationConfig("float32", 16)
    shape: dict[str, Any] = {"dtype": "float8_e4m3fn", "n_kv_heads": 1, "head_dim": 16, "num_layers": 2}
    params = pk.MHAKVCacheParams(
        **shape, page_size=4, kvcache_quant_config=scaled, indexer=IndexerKCache(layer_mask=[False, True])
    )
    kv = pk.PagedKVCacheManager(params, None, 4, max_batch_size=1)
    (pointers,) = kv.pool_pointers()
    assert pointers.data == kv.get_buffers(0).data_ptr()
    assert pointers.scales == kv.get_buffers(0, name="kv_scales").data_ptr()
    assert pointers.indexer_k == kv.get_buffers(1, name="indexer_k").data_ptr()
    assert len(set(pointers)) == 3


def test_without_a_pool_there_are_no_pointers(kv: Any) -> None:
    with pytest.raises(ValueError, match="there is no pool"):
        kv.pool_pointers()
