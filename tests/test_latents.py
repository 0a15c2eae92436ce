"""Caches of latents (MLA) and pages with companions, through the manager: views, tables, copies, tiers."""

from typing import Any

import numpy as np
import pytest
import torch

import pagekeeper as pk
from model.engine import claimed, prefilled, row
from pagekeeper.params import (
    IndexerKCache,
    KVCacheQuantizationConfig,
)

PROMPT = list(range(10, 30))


def latents(**changes: Any) -> pk.MLAKVCacheParams:
    given: dict[str, Any] = dict(
        dtype="float32", kv_lora_rank=6, qk_rope_head_dim=2, num_layers=3, page_size=4, num_q_heads=4
    )
    return pk.MLAKVCacheParams(**(given | changes))


def with_companions(**changes: Any) -> pk.MHAKVCacheParams:
    """Pages of 4 tokens in 2 layers, a scale for each key and value, an indexer in the second layer."""
    return pk.MHAKVCacheParams(
        dtype="float4_e2m1fn",
        n_kv_heads=1,
        head_dim=16,
        num_layers=2,
        page_size=4,
        kvcache_quant_config=KVCacheQuantizationConfig.nvfp4(),
        indexer=IndexerKCache(
            head_dim=32, dtype="float8_e4m3fn", quantization_granularity=32, layer_mask=[False, True]
        ),
        **changes,
    )


def manager(params: pk.KVCacheParams, pages: int = 8, **options: Any) -> pk.PagedKVCacheManager:
    return pk.PagedKVCacheManager(params, total_num_pages=pages, max_batch_size=4, **options)


# Latents


def test_a_layer_of_latents_has_one_head_and_no_axis_for_values() -> None:
    kv = manager(latents())
    assert tuple(kv.get_buffers(1).shape) == (9, 4, 1, 8)
    assert tuple(kv.get_buffers(1, layout="HND").shape) == (9, 1, 4, 8)
    assert tuple(kv.pages_view().shape) == (9, 3 * 4 * 8 * 4)


def test_layers_of_latents_and_pages_are_the_same_memory() -> None:
    kv = manager(latents())
    kv.get_buffers(2)[5, 3, 0, 7] = 1.5
    values = kv.pages_view()[5].view(torch.float32).reshape(3, 4, 8)
    assert values[2, 3, 7] == 1.5
    assert int(values.count_nonzero()) == 1


def test_a_pool_of_latents_may_be_adopted() -> None:
    tensor = torch.zeros((9, 3, 4, 1, 8))
    assert manager(latents(), buffers=[tensor]).get_buffers(0).data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match=r"must be \[9, 3, 4, 1, 8\] of torch.float32 on cpu"):
        manager(latents(), buffers=[torch.zeros((9, 3, 2, 4, 1, 8))])


def test_a_row_of_block_offsets_has_one_field_for_latents() -> None:
    kv = manager(latents())
    ctx = prefilled(kv, PROMPT[:6])
    out = np.full((1, 1, 2, 3), 77, np.int32)
    assert kv.copy_block_offsets(out, 0, ctx) == 2
    # pages 1 and 2 of 3 layers: entries 3 and 6; there is no second field
    assert out[0, 0].tolist() == [[3, 6, -1], [-1, -1, -1]]


@pytest.mark.parametrize(("layers", "fits"), [(2**30 - 1, True), (2**30, False)])
def test_an_entry_of_latents_may_be_as_large_as_any(layers: int, fits: bool) -> None:
    kv = manager(latents(num_layers=layers), pages=2, allocate_pools=False)
    ctx, out = prefilled(kv, PROMPT[:8]), np.zeros((1, 1, 2, 2), np.int32)
    if fits:
        kv.copy_block_offsets(out, 0, ctx)
        assert out[0, 0, 0].tolist() == [2**30 - 1, 2**31 - 2]
    else:
        with pytest.raises(ValueError, match=f"page 2 of {layers} layers: its entry {2**31}"):
            kv.copy_block_offsets(out, 0, ctx)


def test_latents_are_shared_and_copied_like_any_pages() -> None:
    kv = manager(latents())
    ctx = prefilled(kv, PROMPT[:6])
    kv.get_buffers(1)[row(kv, ctx)[1], :2] = 3.0
    child = kv.fork(ctx)
    child.update(9)
    kv.alloc(child)
    kv.runtime_inputs([[child]])
    assert row(kv, child)[0] == row(kv, ctx)[0]
    assert row(kv, child)[1] != row(kv, ctx)[1]
    assert bool((kv.get_buffers(1)[row(kv, child)[1], :2] == 3.0).all())
    kv.verify()


@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer"])
def test_latents_have_the_tables_of_any_cache(form: Any) -> None:
    tables = []
    plain = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1, page_size=4)
    for params in (latents(), plain):
        kv = manager(params)
        ctx = claimed(kv, PROMPT[:6])
        kv.alloc(ctx)
        (inputs,) = kv.runtime_inputs([[ctx]], form=form)
        tables.append(
            [np.asarray(getattr(inputs, name)).tolist() for name in type(inputs).__dataclass_fields__]
        )
    assert tables[0] == tables[1]


# Companions


def test_each_region_of_a_page_has_views_of_its_own() -> None:
    kv = manager(with_companions())
    assert tuple(kv.get_buffers(1).shape) == (9, 2, 4, 1, 8)
    assert tuple(kv.get_buffers(1, "HND", "kv_scales").shape) == (9, 2, 1, 4, 1)
    assert tuple(kv.get_buffers(1, name="indexer_k").shape) == (9, 4, 36)
    assert kv.get_buffers(0, name="kv_scales").dtype == torch.float8_e4m3fn


def test_a_layer_without_an_indexer_says_what_it_has() -> None:
    kv = manager(with_companions())
    with pytest.raises(ValueError, match=r"^name='indexer_k': layer 0 has 'kv', 'kv_scales'$"):
        kv.get_buffers(0, name="indexer_k")


def test_keys_of_an_indexer_have_no_heads_to_put_first() -> None:
    kv = manager(with_companions())
    with pytest.raises(ValueError, match=r"^layout='HND': must be 'NHD' of name='indexer_k'"):
        kv.get_buffers(1, "HND", "indexer_k")


def test_no_one_view_has_the_bytes_of_several_regions() -> None:
    with pytest.raises(ValueError, match="its bytes in 3 tensors"):
        manager(with_companions()).pages_view()


def test_a_pool_with_companions_is_adopted_region_by_region() -> None:
    shapes = [(9, 2, 2, 4, 1, 8), (9, 2, 2, 4, 1, 1), (9, 1, 4, 36)]
    types = [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.uint8]
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
    kv = manager(with_companions(), buffers=tensors)
    assert kv.get_buffers(1, name="indexer_k").data_ptr() == tensors[2].data_ptr()
    with pytest.raises(ValueError, match=r"^buffers: 1 given, must be 3 \(kv, kv_scales, indexer_k\)"):
        manager(with_companions(), buffers=tensors[:1])
    with pytest.raises(ValueError, match=r"^buffers\[1\]: .*must be \[9, 2, 2, 4, 1, 1\] of torch.float8"):
        manager(with_companions(), buffers=[tensors[0], tensors[2], tensors[1]])


def everything(kv: pk.PagedKVCacheManager) -> list[torch.Tensor]:
    """The bytes of each region, [pages + 1, layers, ...]."""
    regions = [(0, "kv"), (1, "kv"), (0, "kv_scales"), (1, "kv_scales"), (1, "indexer_k")]
    return [kv.get_buffers(layer, name=name).view(torch.uint8) for layer, name in regions]


def test_companions_are_copied_with_their_page() -> None:
    kv = manager(with_companions())
    ctx = prefilled(kv, PROMPT[:6])
    for number, region in enumerate(everything(kv), start=1):
        region[row(kv, ctx)[1]] = number
    child = kv.fork(ctx)
    child.update(9)
    kv.alloc(child)
    kv.runtime_inputs([[child]])
    copied = row(kv, child)[1]
    assert copied != row(kv, ctx)[1]
    assert [region[copied].unique().tolist() for region in everything(kv)] == [[1], [2], [3], [4], [5]]


def test_companions_go_to_host_memory_and_come_back_with_their_page() -> None:
    host = {"type": "rust_tiered", "host_offload_max_gb": 2**-10}
    kv = manager(with_companions(kv_connector_config=host))
    ctx = prefilled(kv, PROMPT[:9], no_store=True)
    for number, region in enumerate(everything(kv), start=1):
        region[row(kv, ctx)[0]] = number
    kv.suspend(ctx).synchronize(10)
    kv.poll_transfers()
    for region in everything(kv):
        region[:] = 0
    kv.resume(ctx).synchronize(10)
    kv.poll_transfers()
    first = row(kv, ctx)[0]
    assert [region[first].unique().tolist() for region in everything(kv)] == [[1], [2], [3], [4], [5]]
    kv.shutdown()


def test_layers_that_differ_are_views_of_the_pool_that_they_are_in() -> None:
    params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=[2, 1, 2], head_dim=4, num_layers=3, page_size=4)
    kv = manager(params)
    assert [tuple(kv.get_buffers(layer).shape) for layer in range(3)] == [
        (9, 2, 4, 2, 4),
        (9, 2, 4, 1, 4),
        (9, 2, 4, 2, 4),
    ]
    kv.get_buffers(2)[5] = 1.0
    assert [int(kv.get_buffers(layer).count_nonzero()) for layer in range(3)] == [0, 0, 64]


def test_layers_that_differ_need_block_offsets_for_each_of_their_pools() -> None:
    kv = manager(
        pk.MHAKVCacheParams(dtype="float32", n_kv_heads=[2, 1], head_dim=4, num_layers=2, page_size=4)
    )
    with pytest.raises(ValueError, match=r"must be int32 \[2, rows, 2, blocks\]"):
        kv.copy_block_offsets(np.zeros((1, 1, 2, 2), np.int32), 0, prefilled(kv, PROMPT[:6]))


def test_available_bytes_count_companions() -> None:
    # 2 layers x 2 x 4 tokens x (8 bytes + 1 scale), and 4 tokens x 36 bytes: 288 bytes a page
    kv = manager_of_bytes(with_companions(), 10 * 288)
    assert kv.total_num_pages == 9


def manager_of_bytes(params: pk.KVCacheParams, available_bytes: int) -> pk.PagedKVCacheManager:
    return pk.PagedKVCacheManager(params, available_bytes=available_bytes, max_batch_size=1)
