"""Caches that transformers fills, weighed: as many bytes as the parameters say of the same configuration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pagekeeper.models import FAMILIES, HuggingFaceModel
from pagekeeper.params import KVCacheParams, RecurrentKVCacheParams

with warnings.catch_warnings():
    # What transformers says about its own imports is not about this project.
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    # Loaded when they are first named: here, so that it is in no test's time.
    AutoConfig = transformers.AutoConfig
    AutoModelForCausalLM = transformers.AutoModelForCausalLM
    AutoModelForSeq2SeqLM = transformers.AutoModelForSeq2SeqLM
    AutoModelForSpeechSeq2Seq = transformers.AutoModelForSpeechSeq2Seq

TOKENS = 20
WINDOW = 8
FRAMES = 16

SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENTS = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {
        "head_dim": 12,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        **EXPERTS,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12, **EXPERTS},
    "qwen3_next": {
        "head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "shared_expert_intermediate_size": 16,
        **EXPERTS,
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 12},
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 12, "num_hidden_layers": 7},
    "gemma3n_text": {
        "sliding_window": WINDOW,
        "head_dim": 12,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
    },
    "deepseek_v2": LATENTS | {"topk_method": "greedy"},
    "deepseek_v3": LATENTS,
    "deepseek_v32": LATENTS | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "glm4_moe": {
        "head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": {"head_dim": 12, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": WINDOW},
    "minimax": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "minimax_m2": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        "head_dim": 12,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "num_hidden_layers": 5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 10,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "mamba": {"state_size": 6},
    "mamba2": {"num_heads": 16, "head_dim": 8, "state_size": 10, "n_groups": 2, "chunk_size": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_state": 10, "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_state": 10, "mamba_chunk_size": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 16,
        "mamba_d_state": 10,
        "mamba_chunk_size": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "lfm2": {"full_attn_idxs": [1, 3]},
    "glm_moe_dsa": LATENTS
    | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "indexer_types": ["full", "shared"] * 2},
    "kimi_linear": LATENTS | {"linear_num_heads": 2, "linear_head_dim": 8, "num_hidden_layers": 5, **EXPERTS},
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "whisper": {
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 8,
        "max_source_positions": FRAMES,
        "decoder_start_token_id": 1,
    },
    "t5": {"d_model": 64, "d_kv": 12, "num_heads": 8, "num_layers": 3, "num_decoder_layers": 2},
    "bart": {"d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 8},
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def groups_of(directory: Path) -> Mapping[str, KVCacheParams]:
    model = HuggingFaceModel.read(directory)
    params = model.to_params(dtype="float32", state_dtype="float32", page_size=1)
    return {next(iter(model.groups())): params} if isinstance(params, KVCacheParams) else params


def weigh_attention(layers: list[Any], group: str, tokens: int) -> float:
    """Bytes of one token in all of these layers, which keep as many as `tokens`."""
    assert {layer.keys.shape[2] for layer in layers} == {tokens}, group
    index = [layer.indexer_keys for layer in layers if getattr(layer, "indexer_keys", None) is not None]
    kept = sum(bytes_of([layer.keys, layer.values]) for layer in layers)
    # An indexer's keys are planned in bfloat16, half of what the float32 model has.
    return (kept + bytes_of(index) / 2) / tokens


def weigh_states(cache: Any, layers: list[int]) -> int:
    """Bytes of the states of these layers.

    Transformers keeps as many inputs of a convolution as its kernel is wide, although it reads one less of
    them again: the oldest is left out.
    """
    if hasattr(cache, "linear_cache"):
        return bytes_of(cache.linear_cache[layer] for layer in layers)
    kept = [cache.layers[layer] for layer in layers]
    convolutions = [state[..., 1:] for layer in kept for state in layer.conv_states.values()]
    recurrences = [s for layer in kept for s in layer.recurrent_states.values() if s is not None]
    return bytes_of(convolutions) + bytes_of(recurrences)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_decoder_keeps_the_bytes_that_its_parameters_say(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **(SHAPE | MODELS[model_type]))
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True).cache
    layers = HuggingFaceModel.read(tmp_path).groups()
    for name, params in groups_of(tmp_path).items():
        if isinstance(params, RecurrentKVCacheParams):
            assert weigh_states(cache, list(layers[name])) == params.bytes_per_page
            continue
        # The last token reads itself, so that one less is kept.
        kept = TOKENS if name == "full" else WINDOW - 1
        weight = weigh_attention([cache.layers[layer] for layer in layers[name]], name, kept)
        assert weight == params.bytes_per_token
    weighed = {layer for numbers in layers.values() for layer in numbers}
    others = [layer for number, layer in enumerate(cache.layers) if number not in weighed]
    assert [layer for layer in others if getattr(layer, "keys", None) is not None] == []


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_an_encoder_decoder_keeps_the_bytes_that_its_parameters_say(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **ENCODER_DECODERS[model_type], vocab_size=99, pad_token_id=0)
    config.save_pretrained(tmp_path)
    auto = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    heard = (
        {"input_features": torch.randn(1, config.num_mel_bins, 2 * FRAMES)}
        if model_type == "whisper"
        else {"input_ids": torch.arange(3, 3 + FRAMES)[None]}
    )
    with torch.no_grad():
        cache = model(**heard, decoder_input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=True).cache
    groups = groups_of(tmp_path)
    own = weigh_attention(cache.self_attention_cache.layers, "full", TOKENS)
    across = weigh_attention(cache.cross_attention_cache.layers, "cross", FRAMES)
    assert (own, across) == (groups["full"].bytes_per_token, groups["cross"].bytes_per_token)


# Their own defaults are no model: head sizes that do not divide, or a text model of another type.
WITHOUT_DEFAULTS = {"glm4_moe", "glm4v_moe", "glm4v_moe_text", "kimi_k25", "mistral3", "qwen3_omni_moe_text"}


@pytest.mark.parametrize(
    "model_type", sorted({t for f in FAMILIES for t in f.model_types} - WITHOUT_DEFAULTS)
)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {model_type}")
    whole = HuggingFaceModel.read(AutoConfig.for_model(model_type).to_dict())
    bare = HuggingFaceModel.read({"model_type": model_type})
    assert bare.layers == whole.layers
    assert bare.max_position_embeddings == whole.max_position_embeddings
