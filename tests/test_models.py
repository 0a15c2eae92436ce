"""Models as their configurations describe them: what is read of them, and the groups they make."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.engine import claimed
from pagekeeper import PagedKVCacheManager, load_kv_manager
from pagekeeper.models import HuggingFaceModel, KeysAndValues, Layer
from pagekeeper.params import (
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
    RecurrentKVCacheParams,
)
from pagekeeper.planning import plan_cache
from pagekeeper.shares import with_layout
from real_models import MODELS
from small_configs import LLAMA, TOKEN, read


def real(name: str, **changes: Any) -> HuggingFaceModel:
    return HuggingFaceModel.read(MODELS[name].config | changes)


def several(model: HuggingFaceModel, **wishes: Any) -> MultiKVCacheParams:
    params = model.to_params(**wishes)
    assert isinstance(params, MultiKVCacheParams)
    return params


# What is kept, layer by layer


def test_a_window_model_of_two_head_sizes_is_charged_by_layer() -> None:
    # 50 layers of 16 x 256 with a window of 1,024, 10 of 4 x 512, at 32,768 tokens in bfloat16
    model = read(
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 60,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "num_global_key_value_heads": 4,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
        }
    )
    params = several(model)
    full, sliding = params["full"].bytes_per_token, params["sliding"].bytes_per_token
    assert (full, sliding) == (10 * 8_192, 50 * 16_384)
    assert full * 32_768 + sliding * 1_024 == 3_523_215_360
    shapes = [
        (keep.heads, keep.head_dim)
        for layer in model.layers
        for keep in layer.keeps
        if isinstance(keep, KeysAndValues)
    ]
    assert shapes == ([(16, 256)] * 5 + [(4, 512)]) * 10


def test_an_encoder_decides_what_cross_attention_takes() -> None:
    model = real("Whisper-large-v3")
    cross = several(model, page_size=16)["cross"]
    assert model.encoder_length == 1500
    assert cross.bytes_per_token * 1500 == 245_760_000
    assert -(-1500 // 16) * cross.bytes_per_page == 246_415_360  # 94 pages
    assert model.max_position_embeddings == 448


def test_an_image_of_as_many_tiles_as_one_may_have_is_what_a_vision_model_reads_across() -> None:
    assert real("Llama-3.2-11B-Vision").encoder_length == 4 * (40 * 40 + 1)


def test_layers_that_read_another_layers_kv_say_whose() -> None:
    model = real("Gemma-3n-E4B")
    assert [layer.shares_with for layer in model.layers[:20]] == [None] * 20
    assert [layer.shares_with for layer in model.layers[20:]] == [18, 18, 18, 18, 19] * 3
    assert model.layers[20].keeps == ()


def test_groups_name_the_layers_that_they_have() -> None:
    assert real("Gemma-3n-E4B").groups() == {
        "sliding": (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18),
        "full": (4, 9, 14, 19),
    }


def test_a_layer_with_attention_and_states_is_in_both_groups() -> None:
    model = read({"model_type": "falcon_h1", "num_hidden_layers": 3, "torch_dtype": "bfloat16"})
    assert model.groups() == {"full": (0, 1, 2), "states": (0, 1, 2)}


def test_layers_of_a_group_may_differ_in_their_heads() -> None:
    blocks: list[Any] = [{"attention": {"n_heads_in_group": size, "no_op": False}} for size in (2, 8, 4)]
    blocks.append({"attention": {"n_heads_in_group": None, "no_op": True}})
    model = read(model_type="nemotron-nas", block_configs=blocks)
    params = model.to_params()
    assert isinstance(params, MHAKVCacheParams)
    assert (params.n_kv_heads, params.num_layers) == ((4, 1, 2), 3)
    assert params.bytes_per_token == 2 * (4 + 1 + 2) * 8 * 2
    assert model.layers[3] == Layer()


def test_an_indexer_has_keys_where_it_runs() -> None:
    changes: dict[str, Any] = {
        "model_type": "glm_moe_dsa",
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "index_head_dim": 32,
    }
    model = read(**changes, indexer_types=["full", "shared", "shared", "full"])
    params = model.to_params()
    assert isinstance(params, MLAKVCacheParams)
    assert params.indexer is not None
    assert params.indexer.layer_mask == (True, False, False, True)
    assert params.bytes_per_token == 4 * 24 * 2 + 2 * 32 * 2


@pytest.mark.parametrize(
    ("dtype", "bytes_of_key"), [("bfloat16", 256), ("float8_e4m3fn", 132), ("float4_e2m1fn", 68)]
)
def test_an_indexer_has_a_type_of_its_own(dtype: str, bytes_of_key: int) -> None:
    # 128 values and a float32 scale
    params = real("DeepSeek-V3.2").to_params(dtype="float8_e4m3fn", indexer_dtype=dtype)
    assert params.bytes_per_token == 61 * (576 + bytes_of_key)


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    windows: dict[str, Any] = {"model_type": "mistral", "sliding_window": 512}
    assert list(read(**windows, max_position_embeddings=512).groups()) == ["full"]
    assert list(read(**windows, max_position_embeddings=513).groups()) == ["sliding"]


def test_chunks_without_a_size_are_no_chunks() -> None:
    assert list(read(model_type="llama4_text", attention_chunk_size=None).groups()) == ["full"]


def test_two_windows_are_two_groups_named_by_them() -> None:
    layers = {"0": {"sliding_window": 16}, "2": {"sliding_window": 32}}
    model = read(model_type="gemma3_text", sliding_window_pattern=2, per_layer_config=layers)
    assert model.groups() == {"sliding_16": (0,), "full": (1, 3), "sliding_32": (2,)}


# Types


def test_a_quantized_checkpoint_has_the_cache_that_it_was_quantized_for() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    model = read(quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    assert (model.dtype, model.kv_dtype, model.notes) == ("bfloat16", "float8_e4m3fn", ())
    assert model.to_params().bytes_per_token == TOKEN // 2
    assert model.to_params(dtype="bfloat16").bytes_per_token == TOKEN


def test_a_cache_of_four_bits_has_block_scales() -> None:
    scheme = {"num_bits": 4, "type": "float", "group_size": 16}
    params = read(head_dim=16, quantization_config={"kv_cache_scheme": scheme}).to_params()
    assert isinstance(params, MHAKVCacheParams)
    assert params.kvcache_quant_config == KVCacheQuantizationConfig.nvfp4()
    assert params.bytes_per_token == 4 * 2 * 2 * (16 // 2 + 1)


def test_eight_bit_integers_have_a_scale_for_as_many_values_as_is_said() -> None:
    # an fp16 scale for each 32 values: 136 bytes for 128
    scales = KVCacheQuantizationConfig("float16", 32)
    params = read(head_dim=128).to_params(dtype="int8", kvcache_quant_config=scales)
    assert params.bytes_per_token == 4 * 2 * 2 * 136
    with pytest.raises(ValueError, match="quantization_granularity=32: must divide the 80 values of a head"):
        read(head_dim=80).to_params(dtype="int8", kvcache_quant_config=scales)


def test_modelopt_says_it_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert HuggingFaceModel.read(tmp_path).kv_dtype == "float8_e4m3fn"


def test_quark_says_it_by_the_names_of_layers() -> None:
    of_layer = {"output_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}
    config = {"quant_method": "quark", "kv_cache_quant_config": {"*k_proj": of_layer, "*v_proj": of_layer}}
    assert read(quantization_config=config).kv_dtype == "float8_e4m3fn"


def test_quantized_weights_alone_leave_the_cache_as_it_is() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "kv_cache_scheme": None}
    assert read(quantization_config=fp8).kv_dtype == "bfloat16"


def test_a_scheme_that_is_not_understood_is_told_of() -> None:
    model = read(quantization_config={"kv_cache_scheme": {"num_bits": 3, "type": "float"}})
    assert model.kv_dtype == "bfloat16"
    assert "kv_cache_scheme={'num_bits': 3, 'type': 'float'} is not understood" in model.notes[0]


def test_scales_that_are_not_counted_are_told_of() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "token"}
    (note,) = read(quantization_config={"kv_cache_scheme": scheme}).notes
    assert note == "kv_cache_scheme: scales by token are not counted; give them as kvcache_quant_config"


@pytest.mark.parametrize("given", [{"dtype": "float16"}, {"torch_dtype": "torch.float16"}])
def test_the_type_goes_by_either_name(given: dict[str, str]) -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert read(bare | given).dtype == "float16"


# Parts of a model, and models beside it


@pytest.mark.parametrize(("stage", "gib"), [(range(16), 8.0), (range(16, 48), 16.0), (range(48), 24.0)])
def test_stages_of_a_pipeline_have_the_bytes_of_their_own_layers(stage: range, gib: float) -> None:
    model = read(num_hidden_layers=48, num_key_value_heads=4, head_dim=128)
    assert model.to_params(layers=stage).bytes_per_token * 262_144 == gib * 2**30


def test_the_longest_request_of_a_pipeline_is_that_of_the_stage_with_the_least_room() -> None:
    """Case 136: 32 and 64 KiB a token of 4 and 6 GiB, beside the null page of each."""
    model = read(num_hidden_layers=48, num_key_value_heads=4, head_dim=128)
    stages = [(range(16), 4 << 30), (range(16, 48), 6 << 30)]

    def longest(layers: range, memory: int) -> int:
        params = model.to_params(layers=layers)
        assert isinstance(params, MHAKVCacheParams)
        return plan_cache(params, memory + params.bytes_per_page, 1).longest()

    assert [longest(*stage) for stage in stages] == [131_072, 98_304]


def test_a_stage_with_states_alone_has_no_bytes_a_token() -> None:
    params = real("Jamba-v0.1").to_params(layers=range(2), snapshot_interval=512)
    assert isinstance(params, RecurrentKVCacheParams)
    assert (params.num_layers, params.bytes_per_token, params.chunk_alignment_tokens) == (2, 0, 512)


def test_case_148_a_stage_with_states_alone_is_planned_beside_a_mixed_one() -> None:
    """Both have room for as many requests, and give them the same pages of states."""
    model, served = real("Jamba-v0.1"), []
    for stage in (range(2), range(2, 6)):
        params = model.to_params(layers=stage, page_size=16, enable_prefix_caching=False)
        params = with_layout(params, "paged")
        plan = plan_cache(params, 2**30, 8, max_seq_len=4096)
        kv = load_kv_manager(params, 8, 4096, None, 2**30, allocate_pools=False)
        assert isinstance(kv, PagedKVCacheManager)
        batch = [claimed(kv, range(100)) for _ in range(2)]
        kv.alloc(batch, num_tokens=64)
        states, *others = params if isinstance(params, MultiKVCacheParams) else [None]
        served.append(
            (
                params.bytes_per_token,
                list(plan.pages(4096).values()),
                plan.fixed_bytes(4096),
                kv.block_count(group=states).total,
                [kv.get_cache_indices(ctx, states)[0] for ctx in batch],
                [kv.get_cache_indices(ctx, group)[0] for group in others for ctx in batch],
            )
        )
    # A layer's state is 8,192 x (3 + 16) values of 2 bytes, 311,296; a token has 2 x 8 x 128 of them in the
    # one layer with attention. Each of 8 requests has one page of states, and no block before it another.
    rows = [[0, 0, 0, 1], [0, 0, 0, 2]]
    assert served == [
        (0, [1], 2 * 311_296, 8, rows, []),
        (4096, [1, 256], 3 * 311_296, 8, rows, [[1, 2, 3, 4], [5, 6, 7, 8]]),
    ]


def test_a_stage_has_what_its_layers_read_of_others() -> None:
    model = real("Gemma-3n-E4B")
    assert model.groups(range(10)) == {"sliding": (0, 1, 2, 3, 5, 6, 7, 8), "full": (4, 9)}
    with pytest.raises(ValueError, match="layer 20 reads the KV of layer 18, so both must be in one stage"):
        model.to_params(layers=range(20, 35))


@pytest.mark.parametrize("layers", [range(3, 5), range(-1, 2), range(10**12), [0, 1], 2])
def test_a_stage_that_the_model_does_not_have_is_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="must be a range of numbers from 0 to 3"):
        read().to_params(layers=layers)


def test_a_stage_that_keeps_nothing_is_refused() -> None:
    model = read(model_type="nemotron_h", num_hidden_layers=3, hybrid_override_pattern="-E*")
    with pytest.raises(ValueError, match="none of these layers of the model keeps anything"):
        model.to_params(layers=range(2))


def test_layers_that_predict_more_tokens_are_numbered_behind_the_others() -> None:
    model = real("DeepSeek-V3")
    assert model.groups(mtp=True) == {"full": tuple(range(62))}
    assert model.to_params(mtp=True).bytes_per_token == 62 * 576 * 2


def test_several_modules_that_predict_tokens_have_their_layers_each() -> None:
    model = real("MiniMax-M2", num_mtp_modules=3, mtp_transformer_layers=1)
    assert len(model.mtp_layers) == 3


def test_a_draft_model_has_groups_beside_those_of_its_target() -> None:
    draft = read(num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    params = several(real("Qwen3-32B"), draft=draft, page_size=64, tensor_parallel_degree=2)
    assert list(params) == ["full", "draft_full"]
    assert params["draft_full"].bytes_per_token == 2 * 1 * 8 * 2
    assert params["full"].bytes_per_token == 64 * 2 * 4 * 128 * 2
    assert params.page_size == 64


def test_the_layer_of_a_draft_may_be_nested() -> None:
    draft = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": LLAMA | {"num_hidden_layers": 1},
    }
    assert len(HuggingFaceModel.read(draft).layers) == 1


def test_further_arguments_are_those_of_the_parameters() -> None:
    params = read().to_params(page_size=32, devices="cuda:1", enable_prefix_caching=False)
    assert (params.page_size, params.devices, params.enable_prefix_caching) == (32, ("cuda:1",), False)
    with pytest.raises(ValueError, match="page_size=0: must be a whole number"):
        read().to_params(page_size=0)
    with pytest.raises(TypeError, match="pages"):
        read().to_params(pages=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree=0: must be a whole number"),
        ({"dtype": "float7"}, "'float7' is not one of"),
        ({"dtype": "float4_e2m1fn"}, "must divide the 8 values of a head"),
        ({"indexer_dtype": "x"}, "'x' is not one of"),
        ({"state_dtype": "x"}, "state_dtype='x': .* is not one of"),
        ({"dtype": 5}, "dtype=5: a dtype is a DType, its name"),
        ({"mtp": "yes"}, "mtp='yes': must be True or False"),
        ({"draft": "llama"}, "draft='llama': must be a HuggingFaceModel or None"),
        ({"kvcache_quant_config": 3}, "kvcache_quant_config=3: must be a KVCacheQuantizationConfig or None"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read().to_params(**wish)


def test_states_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_degree=3: a state's 128 heads, groups or channels"):
        real("Mamba-Codestral-7B").to_params(tensor_parallel_degree=3)


def test_query_heads_of_latents_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_q_heads=64 do not divide among so many"):
        real("Kimi-K2").to_params(tensor_parallel_degree=3)
