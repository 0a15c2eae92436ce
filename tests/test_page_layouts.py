"""What lies where in a page: latents, layers that differ, scales, an indexer's keys (PAGE-6, PAGE-7)."""

import random
from typing import Any

import pytest
import torch

from pagekeeper.dtypes import DType
from pagekeeper.params import (
    IndexerKCache,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
)

NVFP4 = KVCacheQuantizationConfig.nvfp4()


def llama_8b(**changes: Any) -> MHAKVCacheParams:
    given: dict[str, Any] = dict(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32)
    return MHAKVCacheParams(**(given | changes))


def deepseek_v3(**changes: Any) -> MLAKVCacheParams:
    given: dict[str, Any] = dict(dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, num_layers=61)
    return MLAKVCacheParams(**(given | changes))


def regions(params: KVCacheParams) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [(r.name, r.shape, r.dtype.value, r.offset) for r in params.page_layout.regions]


# Sizes of real models


def test_llama_8b_has_pages_of_16_mebibytes() -> None:
    # 32 layers x key and value x 8 heads x 128 values x 2 bytes = 131,072 bytes a token, x 128 tokens
    assert llama_8b().bytes_per_page == 16 * 2**20


def test_latents_are_stored_once_without_a_second_field_for_values() -> None:
    params = deepseek_v3()
    # (512 + 64) values x 2 bytes x 61 layers; x 128 tokens
    assert (params.bytes_per_token, params.bytes_per_page) == (70_272, 8_994_816)
    assert regions(params) == [("kv", (61, 128, 1, 576), "bfloat16", 0)]


def test_a_draft_layer_of_64_heads_has_pages_of_4_mebibytes() -> None:
    params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=64, head_dim=128, num_layers=1)
    assert params.bytes_per_page == 2 * 64 * 128 * 2 * 128 == 4_194_304


# Companions


def test_nvfp4_has_a_scale_for_each_16_values() -> None:
    params = llama_8b(dtype="float4_e2m1fn", kvcache_quant_config=NVFP4)
    # 65,536 values a token in half a byte each, and 4,096 scales of a byte
    assert params.bytes_per_token == 32_768 + 4_096
    assert params.bytes_per_page == 4_718_592
    assert regions(params) == [
        ("kv", (32, 2, 128, 8, 64), "float4_e2m1fn", 0),
        ("kv_scales", (32, 2, 128, 8, 8), "float8_e4m3fn", 4_194_304),
    ]


def test_fp8_may_have_a_scale_for_each_head() -> None:
    params = llama_8b(dtype="float8_e4m3fn", kvcache_quant_config=KVCacheQuantizationConfig("float32", 128))
    # 65,536 values of a byte; 32 layers x 2 x 8 heads x 4 bytes of scales
    assert params.bytes_per_token == 65_536 + 2_048
    assert regions(params)[1] == ("kv_scales", (32, 2, 128, 8, 1), "float32", 8_388_608)


def test_latents_may_have_scales() -> None:
    params = deepseek_v3(dtype="float8_e4m3fn", kvcache_quant_config=KVCacheQuantizationConfig("float32", 64))
    # 576 values of a byte and 9 scales of 4 bytes, in 61 layers
    assert params.bytes_per_token == (576 + 36) * 61
    assert regions(params)[1][:2] == ("kv_scales", (61, 128, 1, 9))


@pytest.mark.parametrize(
    ("dtype", "stored", "bytes_per_token"),
    [
        ("bfloat16", (128, "bfloat16"), 256),
        ("float8_e4m3fn", (132, "uint8"), 132),  # 128 values and a scale of 4 bytes
        ("float4_e2m1fn", (68, "uint8"), 68),
    ],
)
def test_an_indexer_has_a_key_for_each_token_and_layer(
    dtype: str, stored: tuple[int, str], bytes_per_token: int
) -> None:
    params = deepseek_v3(indexer=IndexerKCache(head_dim=128, dtype=dtype))
    assert params.bytes_per_token == 70_272 + 61 * bytes_per_token
    assert regions(params)[1] == ("indexer_k", (61, 128, stored[0]), stored[1], 8_994_816)


def test_an_indexer_may_be_in_some_layers_alone() -> None:
    params = llama_8b(num_layers=4, indexer=IndexerKCache(layer_mask=[False, True, False, True]))
    keys = params.page_layout.regions[1]
    assert (keys.layers, keys.shape) == ((1, 3), (2, 128, 128))
    assert params.page_layout.find("indexer_k", 3) == (1, 1)
    assert params.page_layout.find("indexer_k", 2) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kvcache_quant_config": NVFP4}, r"^kvcache_quant_config=.*: bfloat16 has no scales"),
        (
            {"dtype": "float8_e4m3fn", "head_dim": 192, "kvcache_quant_config": KVCacheQuantizationConfig()},
            r"^kvcache_quant_config.quantization_granularity=128: must divide the 192 values of a head",
        ),
        (
            {
                "dtype": "float4_e2m1fn",
                "kvcache_quant_config": KVCacheQuantizationConfig("float8_e4m3fn", 32),
            },
            r"^kvcache_quant_config=.*granularity=32\): must be .*granularity=16\) for float4_e2m1fn",
        ),
        (
            {"indexer": IndexerKCache(layer_mask=[True])},
            r"^indexer.layer_mask: 1 given, must be num_layers=32",
        ),
    ],
)
def test_companions_that_do_not_fit_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama_8b(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVCacheQuantizationConfig("float33"), r"^scale_dtype='float33': "),
        (lambda: KVCacheQuantizationConfig(quantization_granularity=0), r"^quantization_granularity=0: "),
        (lambda: IndexerKCache(head_dim=0), r"^head_dim=0: "),
        (lambda: IndexerKCache(dtype="int8"), r"^dtype='int8': must be bfloat16, float8_e4m3fn or float4"),
        (
            lambda: IndexerKCache(head_dim=64, dtype="float8_e4m3fn"),
            r"^quantization_granularity=128: must divide head_dim=64",
        ),
        (
            lambda: IndexerKCache(head_dim=3, dtype="float4_e2m1fn", quantization_granularity=1),
            r"^head_dim=3: must be even for float4_e2m1fn",
        ),
        (lambda: IndexerKCache(layer_mask=[False, False]), r"^layer_mask=.*: must be .* one True at least"),
        (lambda: IndexerKCache(layer_mask=[1, True]), r"^layer_mask=.*: must be True or False"),  # type: ignore[list-item]
    ],
)
def test_a_companion_checks_itself(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Layers that differ


def test_layers_with_other_heads_have_a_region_of_their_own_under_the_same_page() -> None:
    params = MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=[8, 8, 2, 8], head_dim=64, num_layers=4, page_size=16
    )
    # 3 layers x 2 x 16 tokens x 8 heads x 64 values x 2 bytes, and 1 x 2 x 16 x 2 x 64 x 2
    assert params.bytes_per_page == 98_304 + 8_192
    assert regions(params) == [
        ("kv", (3, 2, 16, 8, 64), "bfloat16", 0),
        ("kv", (1, 2, 16, 2, 64), "bfloat16", 98_304),
    ]
    assert [region.layers for region in params.page_layout.regions] == [(0, 1, 3), (2,)]
    assert params.layer_to_pool == ((0, 0), (0, 1), (1, 0), (0, 2))


def test_layers_may_differ_in_head_dimension_and_type() -> None:
    params = MHAKVCacheParams(
        dtype=["float8_e4m3fn", "bfloat16", "bfloat16"],
        n_kv_heads=1,
        head_dim=[64, 64, 32],
        num_layers=3,
        page_size=4,
    )
    # 2 x 4 tokens = 8 heads: of 64 values of a byte, of 64 of two bytes, of 32 of two bytes
    assert [region.nbytes for region in params.page_layout.regions] == [512, 1024, 512]
    assert params.bytes_per_page == 2048


def test_only_layers_of_a_quantized_type_have_scales() -> None:
    params = MHAKVCacheParams(
        dtype=["bfloat16", "float4_e2m1fn"],
        n_kv_heads=2,
        head_dim=32,
        num_layers=2,
        page_size=4,
        kvcache_quant_config=NVFP4,
    )
    (scales,) = [region for region in params.page_layout.regions if region.name == "kv_scales"]
    assert (scales.layers, scales.shape) == ((1,), (1, 2, 4, 2, 2))


def test_a_list_of_equal_values_is_one_value() -> None:
    assert llama_8b(n_kv_heads=[8] * 32, head_dim=(128,) * 32, dtype=["bfloat16"] * 32) == llama_8b()


@pytest.mark.parametrize("field", ["n_kv_heads", "head_dim", "dtype"])
def test_a_list_has_a_value_for_each_layer(field: str) -> None:
    value = "bfloat16" if field == "dtype" else 8
    with pytest.raises(
        ValueError, match=rf"^{field}=.*: 3 values, must be one, or one for each of 32 layers"
    ):
        llama_8b(**{field: [value] * 3})


def test_a_bad_value_in_a_list_is_named_with_its_field() -> None:
    with pytest.raises(ValueError, match=r"^n_kv_heads=\[8, 0\]: must be a whole number from 1"):
        llama_8b(num_layers=2, n_kv_heads=[8, 0])


def test_a_width_that_cannot_be_packed_is_refused_by_the_names_it_comes_from() -> None:
    with pytest.raises(ValueError, match=r"^kv_lora_rank \+ qk_rope_head_dim=577: must be even for float4"):
        deepseek_v3(dtype="float4_e2m1fn", kv_lora_rank=513)


# Alignment


def test_a_region_begins_at_a_multiple_of_its_elements_and_so_does_the_next_page() -> None:
    small, large = RecurrentState("small", (3,), "uint8"), RecurrentState("large", (2,), "float32")
    first = RecurrentKVCacheParams(states=[small, large], num_layers=1, kind=Recurrent())
    last = RecurrentKVCacheParams(states=[large, small], num_layers=1, kind=Recurrent())
    assert ([r.offset for r in first.page_layout.regions], first.bytes_per_page) == ([0, 4], 12)
    assert ([r.offset for r in last.page_layout.regions], last.bytes_per_page) == ([0, 8], 12)


def random_params(draw: random.Random) -> KVCacheParams:
    layers, types = draw.randint(1, 4), list(DType)

    def each(values: list[Any]) -> Any:
        return draw.choice([draw.choice(values), draw.choices(values, k=layers)])

    indexer = draw.choice(
        [None, IndexerKCache(head_dim=6, dtype="float8_e4m3fn", quantization_granularity=3)]
    )
    if draw.random() < 0.3:
        states = [
            RecurrentState(name, (draw.randint(1, 3), 5), draw.choice(["uint8", "float16", "float64"]))
            for name in "abc"
        ]
        return RecurrentKVCacheParams(states=states, num_layers=layers, kind=Recurrent())
    if draw.random() < 0.5:
        return MLAKVCacheParams(
            dtype=each(types),
            kv_lora_rank=6,
            qk_rope_head_dim=2,
            num_layers=layers,
            page_size=3,
            indexer=indexer,
        )
    return MHAKVCacheParams(
        dtype=each(types),
        n_kv_heads=each([1, 2, 3]),
        head_dim=each([2, 4, 6]),
        num_layers=layers,
        page_size=draw.randint(1, 5),
        indexer=indexer,
    )


@pytest.mark.parametrize("seed", range(40))
def test_memory_of_whole_pages_can_be_viewed_region_by_region(seed: int) -> None:
    params = random_params(random.Random(seed))
    slab = torch.zeros((3, params.bytes_per_page), dtype=torch.uint8)
    for number, region in enumerate(params.page_layout.regions, start=1):
        part = slab[:, region.offset : region.offset + region.nbytes]
        view = part.view(region.dtype.to_torch()).view(3, *region.shape)
        assert view.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
        part += number
    touched = sum(
        3 * region.nbytes * number for number, region in enumerate(params.page_layout.regions, start=1)
    )
    assert int(slab.sum()) == touched, "regions have no byte in common"
    # Each layer is in one region of keys and values, or in all regions of states.
    if not isinstance(params, RecurrentKVCacheParams):
        layers = [layer for r in params.page_layout.regions if r.name == "kv" for layer in r.layers]
        assert sorted(layers) == list(range(params.num_layers))
