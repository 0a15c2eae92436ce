"""The families of models: how each names its fields, which layers it has, what they keep.

An entry says what is not as in most models. `defaults` are what the family's fields are where a configuration
leaves them out, as those nested in multimodal ones often do.
"""

from __future__ import annotations

from typing import Any

from pagekeeper.models.family import Family
from pagekeeper.models.fields import NAMES
from pagekeeper.models.layer_types import (
    all_layers,
    at_indices,
    common_layers,
    every_nth,
    from_flags,
    from_layers_on,
    full_attn_layers,
    period_and_offset,
    spelled,
    unrotated_in_full,
    windowed,
)
from pagekeeper.models.readers import (
    audio_frames,
    delta_rule,
    image_patches,
    keys_and_values_of_blocks,
    keys_and_values_of_two_sizes,
    kimi_delta,
    latents,
    latents_and_index,
    latents_or_keys_and_values,
    lightning,
    mamba,
    mamba2,
    short_convolution,
)

__all__ = ["FAMILIES", "GENERIC", "family_of"]


def family_of(model_type: str) -> Family | None:
    """The family that a model type belongs to; None if it is unknown."""
    return _BY_TYPE.get(model_type)


def _shape(layers: int, hidden: int, heads: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    """Defaults of the fields that every transformer has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DELTA_RULE: dict[str, Any] = {
    "conv_kernel": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_LATENTS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_MAMBA2: dict[str, Any] = {
    "mamba_num_heads": 128,
    "mamba_head_dim": "auto",
    "ssm_state_size": 256,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
}
_OF_DECODER = {
    "num_hidden_layers": ("decoder_layers",),
    "num_attention_heads": ("decoder_attention_heads",),
    "num_key_value_heads": ("decoder_key_value_heads",),
    "hidden_size": ("d_model",),
    "max_position_embeddings": ("max_target_positions", "max_position_embeddings"),
}
_OF_T5 = {"num_hidden_layers": ("num_decoder_layers", "num_layers")}

FAMILIES = (
    Family("Llama", ("llama",), defaults=_shape(32, 4096, 32, max_position_embeddings=2048)),
    Family(
        "Llama 4",
        ("llama4", "llama4_text"),
        unrotated_in_full,
        defaults=_shape(
            48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, max_position_embeddings=131_072
        ),
    ),
    Family(
        "Llama 3.2 Vision",
        ("mllama", "mllama_text_model"),
        at_indices("cross", "full", "cross_attention_layers", without="full"),
        defaults=_shape(
            40,
            4096,
            32,
            8,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
            max_position_embeddings=131_072,
        ),
        encoder_length=image_patches,
    ),
    Family("Llama-Nemotron", ("nemotron-nas", "deci"), attention=keys_and_values_of_blocks),
    Family(
        "Qwen 2",
        ("qwen2",),
        from_layers_on,
        defaults=_shape(32, 4096, 32, 32, max_position_embeddings=32_768, **_QWEN_WINDOW),
    ),
    Family(
        "Qwen 2 VL",
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        from_layers_on,
        defaults=_shape(
            80, 8192, 64, 8, max_position_embeddings=32_768, **(_QWEN_WINDOW | {"max_window_layers": 80})
        ),
    ),
    Family(
        "Qwen 2.5 Omni",
        ("qwen2_5_omni_text",),
        from_layers_on,
        defaults=_shape(28, 3584, 28, 4, max_position_embeddings=32_768, **_QWEN_WINDOW),
    ),
    Family(
        "Qwen 2 MoE",
        ("qwen2_moe",),
        from_layers_on,
        defaults=_shape(24, 2048, 16, 16, max_position_embeddings=32_768, **_QWEN_WINDOW),
    ),
    Family(
        "Qwen 3",
        ("qwen3",),
        from_layers_on,
        defaults=_shape(32, 4096, 32, 32, head_dim=128, max_position_embeddings=32_768, **_QWEN_WINDOW),
    ),
    Family(
        "Qwen 3 VL",
        ("qwen3_vl", "qwen3_vl_text"),
        defaults=_shape(32, 4096, 32, 32, head_dim=128, max_position_embeddings=128_000),
    ),
    Family(
        "Qwen 3 MoE",
        ("qwen3_moe",),
        windowed,
        defaults=_shape(24, 2048, 32, 4, max_position_embeddings=32_768, **_QWEN_WINDOW),
    ),
    Family(
        "Qwen 3 VL MoE",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        defaults=_shape(24, 2048, 16, 16, max_position_embeddings=128_000),
    ),
    Family(
        "Qwen 3 Omni",
        ("qwen3_omni_moe_text",),
        windowed,
        defaults=_shape(28, 2048, 28, 4, max_position_embeddings=32_768),
    ),
    Family(
        "Qwen 3-Next",
        ("qwen3_next",),
        every_nth("full", "states", "full_attention_interval", default=4),
        states=delta_rule,
        defaults=_shape(48, 2048, 16, 2, head_dim=256, max_position_embeddings=32_768, **_DELTA_RULE),
    ),
    Family(
        "Qwen 3.5",
        ("qwen3_5", "qwen3_5_text"),
        every_nth("full", "states", "full_attention_interval", default=4),
        states=delta_rule,
        defaults=_shape(32, 4096, 16, 4, head_dim=256, max_position_embeddings=32_768, **_DELTA_RULE),
    ),
    Family(
        "Qwen 3.5 MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        every_nth("full", "states", "full_attention_interval", default=4),
        states=delta_rule,
        defaults=_shape(40, 2048, 16, 2, head_dim=256, max_position_embeddings=32_768, **_DELTA_RULE),
    ),
    Family(
        "Mistral",
        ("mistral", "mistral3", "ministral"),
        windowed,
        defaults=_shape(32, 4096, 32, 8, sliding_window=4096, max_position_embeddings=131_072),
    ),
    Family(
        "Ministral 3",
        ("ministral3",),
        windowed,
        defaults=_shape(34, 4096, 32, 8, head_dim=128, max_position_embeddings=262_144),
    ),
    Family(
        "Mixtral", ("mixtral",), windowed, defaults=_shape(32, 4096, 32, 8, max_position_embeddings=131_072)
    ),
    Family(
        "Gemma", ("gemma",), defaults=_shape(28, 3072, 16, 16, head_dim=256, max_position_embeddings=8192)
    ),
    Family(
        "Gemma 2",
        ("gemma2",),
        every_nth("full", "sliding", 2),
        defaults=_shape(26, 2304, 8, 4, head_dim=256, sliding_window=4096, max_position_embeddings=8192),
    ),
    Family(
        "Gemma 3",
        ("gemma3", "gemma3_text"),
        every_nth("full", "sliding", "sliding_window_pattern", default=6),
        defaults=_shape(26, 2304, 8, 4, head_dim=256, sliding_window=4096, max_position_embeddings=131_072),
    ),
    Family(
        "Gemma 3n",
        ("gemma3n", "gemma3n_text"),
        every_nth("full", "sliding", 5),
        defaults=_shape(
            35,
            2048,
            8,
            2,
            head_dim=256,
            sliding_window=512,
            num_kv_shared_layers=15,
            max_position_embeddings=32_768,
        ),
    ),
    Family(
        "Gemma 4",
        ("gemma4", "gemma4_text"),
        every_nth("full", "sliding", 6),
        keys_and_values_of_two_sizes,
        defaults=_shape(
            30,
            2304,
            8,
            4,
            head_dim=256,
            global_head_dim=512,
            sliding_window=512,
            max_position_embeddings=131_072,
        ),
    ),
    Family(
        "DeepSeek V2",
        ("deepseek_v2",),
        attention=latents_or_keys_and_values,
        defaults=_shape(32, 4096, 32, max_position_embeddings=2048, **_LATENTS),
    ),
    Family(
        "DeepSeek V3",
        ("deepseek_v3",),
        attention=latents,
        defaults=_shape(61, 7168, 128, 128, max_position_embeddings=4096, num_mtp_layers=1, **_LATENTS),
    ),
    Family(
        "DeepSeek V3.2",
        ("deepseek_v32",),
        attention=latents_and_index,
        defaults=_shape(61, 7168, 128, 128, index_head_dim=128, max_position_embeddings=163_840, **_LATENTS),
    ),
    Family("Kimi K2", ("kimi_k2", "kimi_k25"), attention=latents),
    Family(
        "Kimi Linear",
        ("kimi_linear",),
        full_attn_layers,
        latents,
        kimi_delta,
        defaults=_shape(
            27,
            2304,
            32,
            32,
            linear_num_heads=32,
            linear_head_dim=128,
            conv_kernel=4,
            max_position_embeddings=1_048_576,
            **_LATENTS,
        ),
    ),
    Family(
        "GLM 4",
        ("glm", "glm4"),
        defaults=_shape(40, 4096, 32, 2, head_dim=128, max_position_embeddings=131_072),
    ),
    Family(
        "GLM 4V", ("glm4v", "glm4v_text"), defaults=_shape(40, 4096, 32, 2, max_position_embeddings=32_768)
    ),
    Family("ChatGLM", ("chatglm",)),
    Family(
        "GLM 4.5",
        ("glm4_moe",),
        defaults=_shape(46, 4096, 96, 8, max_position_embeddings=131_072, num_mtp_layers=1),
    ),
    Family(
        "GLM 4.5V",
        ("glm4v_moe", "glm4v_moe_text"),
        defaults=_shape(46, 4096, 96, 8, max_position_embeddings=65_536),
    ),
    Family(
        "GLM 4.7 Flash",
        ("glm4_moe_lite",),
        attention=latents,
        defaults=_shape(47, 2048, 20, 20, max_position_embeddings=202_752, **_LATENTS),
    ),
    Family(
        "GLM 5",
        ("glm_moe_dsa",),
        attention=latents_and_index,
        defaults=_shape(78, 6144, 64, 64, index_head_dim=128, max_position_embeddings=202_752, **_LATENTS),
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        every_nth("full", "sliding", 2),
        defaults=_shape(36, 2880, 64, 8, head_dim=64, sliding_window=128, max_position_embeddings=131_072),
    ),
    Family("Phi", ("phi",), defaults=_shape(24, 2048, 32, max_position_embeddings=2048)),
    Family(
        "Phi 3 and 4",
        ("phi3", "phi3_v"),
        windowed,
        defaults=_shape(32, 3072, 32, max_position_embeddings=4096),
    ),
    Family(
        "Phi 4 Multimodal",
        ("phi4_multimodal", "phi4mm"),
        windowed,
        defaults=_shape(32, 3072, 32, 8, max_position_embeddings=131_072),
    ),
    Family(
        "Phi MoE", ("phimoe",), windowed, defaults=_shape(32, 4096, 32, 8, max_position_embeddings=131_072)
    ),
    Family(
        "MiniMax",
        ("minimax", "minimax_text_01", "minimax_m1"),
        from_flags("attn_type_list", every_nth("states", "full", 2)),
        states=lightning,
        defaults=_shape(32, 4096, 32, 8, max_position_embeddings=131_072),
    ),
    Family(
        "MiniMax M2",
        ("minimax_m2",),
        defaults=_shape(62, 3072, 48, 8, head_dim=128, max_position_embeddings=196_608),
    ),
    Family(
        "Nemotron-H",
        ("nemotron_h",),
        spelled("hybrid_override_pattern"),
        states=mamba2,
        defaults={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
            "max_position_embeddings": 4096,
            "hybrid_override_pattern": "ME*-",
        },
    ),
    Family(
        "Jamba",
        ("jamba",),
        period_and_offset,
        states=mamba,
        defaults=_shape(
            32,
            4096,
            32,
            8,
            attn_layer_period=8,
            attn_layer_offset=4,
            ssm_state_size=16,
            conv_kernel=4,
            expand=2,
            max_position_embeddings=262_144,
        ),
    ),
    Family(
        "Bamba",
        ("bamba",),
        at_indices("full", "states", "attn_layer_indices", without="states"),
        states=mamba2,
        defaults=_shape(32, 4096, 32, 8, max_position_embeddings=262_144, **_MAMBA2),
    ),
    Family(
        "Granite 4",
        ("granitemoehybrid",),
        all_layers("states"),
        states=mamba2,
        defaults=_shape(32, 4096, 32, max_position_embeddings=2048, **_MAMBA2),
    ),
    Family(
        "Falcon-H1",
        ("falcon_h1",),
        all_layers("full+states"),
        states=mamba2,
        defaults=_shape(
            32,
            4096,
            32,
            8,
            mamba_d_ssm=1024,
            max_position_embeddings=8192,
            **_MAMBA2,
        ),
    ),
    Family(
        "Mamba",
        ("mamba", "falcon_mamba"),
        all_layers("states"),
        states=mamba,
        names={"mamba_intermediate_size": ("intermediate_size",)},
        defaults={
            "num_hidden_layers": 32,
            "hidden_size": 768,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
        },
    ),
    Family(
        "Mamba 2",
        ("mamba2",),
        all_layers("states"),
        states=mamba2,
        names={"mamba_num_heads": ("num_heads",), "mamba_head_dim": ("head_dim",)},
        defaults={
            "num_hidden_layers": 64,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
    ),
    Family(
        "LFM 2",
        ("lfm2",),
        at_indices("full", "states", "full_attn_idxs", without="full"),
        states=short_convolution,
        defaults=_shape(32, 2560, 32, 8, conv_kernel=3, max_position_embeddings=128_000),
    ),
    Family(
        "Whisper",
        ("whisper",),
        all_layers("full+cross"),
        names=_OF_DECODER,
        defaults=_shape(4, 384, 6, max_source_positions=1500, max_position_embeddings=448),
        encoder_length=audio_frames,
    ),
    Family(
        "BART",
        ("bart", "mbart"),
        all_layers("full+cross"),
        names=_OF_DECODER,
        defaults=_shape(12, 1024, 16, max_position_embeddings=1024),
    ),
    Family(
        "T5",
        ("t5",),
        all_layers("full+cross"),
        names=_OF_T5,
        defaults=_shape(6, 512, 8, head_dim=64),
    ),
    Family(
        "mT5 and umT5",
        ("mt5", "umt5"),
        all_layers("full+cross"),
        names=_OF_T5,
        defaults=_shape(8, 512, 6, head_dim=64),
    ),
)
"""The families that are known, in no order that matters: no model type is in two."""

GENERIC = Family(
    "generic",
    (),
    common_layers,
    latents_or_keys_and_values,
    names={
        "num_hidden_layers": ("decoder_layers", "num_decoder_layers", *NAMES["num_hidden_layers"]),
        "num_attention_heads": ("decoder_attention_heads", *NAMES["num_attention_heads"]),
    },
)
"""How a model of an unknown type is read: by the fields that most models have."""

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
