"""How much of real models fits, as pages that a cache then hands out, against numbers worked out by hand."""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager
from pagekeeper.params import KVCacheQuantizationConfig, SlidingWindow


def test_case_135_a_request_one_token_beyond_all_pages_is_refused_for_good() -> None:
    kv = manager(12, 8192)  # 13 with the null page
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(claimed(kv, [1] * 98_305), num_tokens=1)
    whole = claimed(kv, [1] * 98_304)
    kv.alloc(whole)
    assert (whole.active_length, kv.block_count().free) == (98_304, 0)


def test_case_138_windows_and_full_layers_hold_the_bytes_that_each_of_them_needs() -> None:
    shape: dict[str, Any] = {"dtype": "bfloat16", "page_size": 16}
    full = pk.MHAKVCacheParams(**shape, n_kv_heads=4, head_dim=512, num_layers=10)
    window = pk.MHAKVCacheParams(
        **shape, n_kv_heads=16, head_dim=256, num_layers=50, kind=SlidingWindow(1024)
    )
    params = pk.MultiKVCacheParams({"full": full, "window": window})
    # A token takes 2 * 4 * 512 * 2 = 8,192 bytes in a full layer, and 2 * 16 * 256 * 2 = 16,384 in a window.
    assert params.bytes_per_token == 10 * 8_192 + 50 * 16_384
    assert params.bytes_per_token_kept == 10 * 8_192
    pages = {"full": 2048, "window": 2048}
    kv = pk.PagedKVCacheManager(params, None, pages, 1, allocate_pools=False)
    compute(kv, claimed(kv, range(32_768)))
    held = {name: kv.block_count(group=name).used * params[name].bytes_per_page for name in params}
    # Token 32,768 reads from 31,745 on: 64 whole pages of the window.
    assert held == {"full": 10 * 8_192 * 32_768, "window": 50 * 16_384 * 1024}
    assert sum(held.values()) == 3_523_215_360


@pytest.mark.parametrize("num_bytes", [1 << 20, (1 << 20) + 4095])
def test_case_141_a_type_of_half_the_bytes_holds_twice_the_tokens(num_bytes: int) -> None:
    longest = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        params = pk.MHAKVCacheParams(dtype=dtype, n_kv_heads=2, head_dim=8, num_layers=4, page_size=16)
        assert params.bytes_per_page == 16 * 128 * (2 if dtype == "bfloat16" else 1)
        # The null page is one of them.
        size = num_bytes + params.bytes_per_page
        kv = pk.PagedKVCacheManager(params, None, None, 1, available_bytes=size, allocate_pools=False)
        longest[dtype] = kv.total_num_pages * 16
        with pytest.raises(pk.RequestTooLargeError):
            kv.alloc(claimed(kv, [1] * (longest[dtype] + 1)))
        kv.alloc(claimed(kv, [1] * longest[dtype]))
    assert longest["float8_e4m3fn"] in (2 * longest["bfloat16"], 2 * longest["bfloat16"] + 16)
    assert longest["bfloat16"] == num_bytes // 4096 * 16


def test_case_142_scales_count_among_the_bytes_of_a_head() -> None:
    scales = KVCacheQuantizationConfig("float16", 32)
    shape: dict[str, Any] = {"dtype": "float8_e4m3fn", "n_kv_heads": 1, "num_layers": 1, "page_size": 1}
    params = pk.MHAKVCacheParams(**shape, head_dim=128, kvcache_quant_config=scales)
    # 128 bytes and 4 scales of 2 bytes, each for a key and a value
    assert params.bytes_per_page == 2 * 136
    with pytest.raises(ValueError, match=r"quantization_granularity=32: must divide the 80 values of a head"):
        pk.MHAKVCacheParams(**shape, head_dim=80, kvcache_quant_config=scales)


def test_case_145_a_window_beyond_the_longest_sequence_holds_what_full_attention_does() -> None:
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 8, "num_layers": 1}
    groups = {
        "full": pk.MHAKVCacheParams(**shape, page_size=64),
        "window": pk.MHAKVCacheParams(**shape, page_size=64, kind=SlidingWindow(32_768)),
    }
    kv = pk.PagedKVCacheManager(
        pk.MultiKVCacheParams(groups),
        None,
        {"full": 9, "window": 9},
        1,
        max_seq_len=512,
        allocate_pools=False,
    )
    ctx = claimed(kv, range(511), num_draft_tokens=1)
    compute(kv, ctx, new_tokens=[0])
    kv.alloc(ctx)  # 512 tokens and two rounds of a draft: 514, and 516 is the most
    assert [kv.block_count(group=name).used for name in groups] == [9, 9]
    with pytest.raises(ValueError, match="512"):
        kv.claim(pk.TextContext(pk.RequestID(), [1] * 513))
