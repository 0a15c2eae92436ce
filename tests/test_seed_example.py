"""The example of the system that the interface comes from, with nothing but its imports changed."""

import numpy as np

from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, RequestID, TextContext, TokenBuffer
from pagekeeper.compat.max import CPU, DeviceRef, DType, InferenceSession


def make_manager() -> PagedKVCacheManager:
    params = MHAKVCacheParams(
        dtype=DType.float32,
        n_kv_heads=8,
        head_dim=128,
        num_layers=2,
        page_size=128,
        devices=[DeviceRef.CPU()],
    )
    return PagedKVCacheManager(
        params=params,
        session=InferenceSession(devices=[CPU()]),
        total_num_pages=8,
        max_batch_size=4,
    )


def make_context() -> TextContext:
    tokens = np.array([1, 2, 3, 4], dtype=np.int64)
    return TextContext(request_id=RequestID(), max_length=1000, tokens=TokenBuffer(tokens))


def test_the_seed_example_runs_and_gives_each_request_a_page_of_its_own() -> None:
    kv_manager = make_manager()
    ctx1 = make_context()
    ctx2 = make_context()

    kv_manager.claim(ctx1)
    kv_manager.claim(ctx2)
    kv_manager.alloc(ctx1)
    kv_manager.alloc(ctx2)
    inputs = kv_manager.runtime_inputs([[ctx1, ctx2]])
    ctx1.update(42)
    ctx2.update(42)
    kv_manager.step(ctx1)

    tables = inputs[0]
    assert tables.lookup_table.dtype == np.uint32
    assert tables.lookup_table.tolist() == [[1] + [0] * 23, [2] + [0] * 23]  # 8 pages and 16 cells of slack
    assert tables.cache_lengths.tolist() == [0, 0]
    assert tables.max_prompt_length == 4
    assert (kv_manager.block_count().free, kv_manager.block_count().total) == (6, 8)
    assert (ctx1.processed_length, ctx2.processed_length) == (4, 0)
    kv_manager.verify()


def test_the_seed_example_goes_on_to_decode() -> None:
    kv_manager = make_manager()
    ctx = make_context()
    kv_manager.claim(ctx)
    kv_manager.alloc(ctx)
    ctx.update(42)
    kv_manager.step(ctx)

    kv_manager.alloc(ctx)
    inputs = kv_manager.runtime_inputs([[ctx]])
    assert inputs[0].cache_lengths.tolist() == [4]
    assert ctx.active_length == 1
    ctx.update(43)
    kv_manager.step(ctx)

    assert ctx.tokens.all.tolist() == [1, 2, 3, 4, 42, 43]
    assert ctx.processed_length == 5
    kv_manager.release(ctx)
    assert kv_manager.block_count().free == 8
