"""Real models: the public fields of their configurations, and what they keep as their papers and cards say.

A group is told by its layers and shape alone. What it weighs is computed here, by the formulas in which such
caches are commonly given, and by nothing of the package.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Heads:
    """Keys and values of `layers` layers."""

    layers: int
    heads: int
    head_dim: int

    def token_bytes(self, bits: float, degree: int = 1) -> float:
        """Of one token on one of `degree` shards; each has one head at least."""
        return 2 * self.layers * max(self.heads // degree, 1) * self.head_dim * bits / 8


@dataclass(frozen=True)
class Latent:
    """Latents with key parts, on every shard; `index` more values, in bfloat16, of an indexer.

    Shards divide the query heads, `shared`.
    """

    layers: int
    width: int
    shared: int
    index: int = 0

    def token_bytes(self, bits: float, degree: int = 1) -> float:
        return self.layers * (self.width * bits / 8 + self.index * 2)


@dataclass(frozen=True)
class State:
    """States of `layers` layers: values of a convolution's inputs, in 2 bytes each, and of a recurrence.

    Shards divide `shared` heads or channels. `grouped` are those of the convolution's inputs that come in
    `groups`, which shards may have to repeat.
    """

    layers: int
    shared: int
    conv: int
    ssm: int
    grouped: int = 0
    groups: int = 16
    ssm_bytes: int = 2

    def request_bytes(self, degree: int = 1) -> float:
        conv = self.conv / degree + self.grouped / min(degree, self.groups)
        return self.layers * (conv * 2 + self.ssm / degree * self.ssm_bytes)


@dataclass(frozen=True)
class Real:
    config: dict[str, Any]
    groups: dict[str, Heads | Latent | State]
    kinds: dict[str, str] = field(default_factory=dict)


def dense(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


def full(layers: int, heads: int, head_dim: int) -> dict[str, Heads | Latent | State]:
    return {"full": Heads(layers, heads, head_dim)}


def deepseek(layers: int, heads: int, **more: Any) -> dict[str, Any]:
    # v_head_dim and num_key_value_heads are there to be ignored
    return (
        dense(
            layers,
            7168,
            heads,
            heads,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
        )
        | more
    )


MODELS = {
    "Llama-2-7B": Real(
        # the first configuration of Llama has no number of KV heads
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "torch_dtype": "float16",
        },
        full(32, 32, 128),
    ),
    "Llama-2-70B": Real(dense(80, 8192, 64, 8, model_type="llama"), full(80, 8, 128)),
    "Llama-3.1-8B": Real(
        dense(32, 4096, 32, 8, model_type="llama", max_position_embeddings=131_072), full(32, 8, 128)
    ),
    "Llama-3.1-405B": Real(dense(126, 16_384, 128, 8, model_type="llama"), full(126, 8, 128)),
    "Llama-3.2-1B": Real(dense(16, 2048, 32, 8, model_type="llama", head_dim=64), full(16, 8, 64)),
    "Llama-3.2-11B-Vision": Real(
        {
            "model_type": "mllama",
            "text_config": dense(
                40,
                4096,
                32,
                8,
                model_type="mllama_text_model",
                cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
                max_position_embeddings=131_072,
            ),
            "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4, "hidden_size": 1280},
        },
        {"full": Heads(32, 8, 128), "cross": Heads(8, 8, 128)},
        {"cross": "cross"},
    ),
    "Llama-4-Scout": Real(
        {
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "llama4_text",
                "num_hidden_layers": 48,
                "hidden_size": 5120,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_chunk_size": 8192,
                "no_rope_layers": [],
                "no_rope_layer_interval": 4,
                "max_position_embeddings": 10_485_760,
            },
        },
        {"chunked": Heads(36, 8, 128), "full": Heads(12, 8, 128)},
        {"chunked": "chunked_local(8192)"},
    ),
    "Llama-4-Maverick": Real(
        {
            "model_type": "llama4",
            "text_config": dense(
                48,
                5120,
                40,
                8,
                model_type="llama4_text",
                head_dim=128,
                attention_chunk_size=8192,
                no_rope_layers=[1, 1, 1, 0] * 12,
                max_position_embeddings=1_048_576,
            ),
        },
        {"chunked": Heads(36, 8, 128), "full": Heads(12, 8, 128)},
        {"chunked": "chunked_local(8192)"},
    ),
    "Qwen2-7B": Real(
        dense(28, 3584, 28, 4, model_type="qwen2", use_sliding_window=False, sliding_window=131_072),
        full(28, 4, 128),
    ),
    "Qwen2.5-72B": Real(
        dense(
            80,
            8192,
            64,
            8,
            model_type="qwen2",
            use_sliding_window=False,
            sliding_window=131_072,
            max_window_layers=70,
        ),
        full(80, 8, 128),
    ),
    "Qwen2-VL-7B": Real(
        dense(28, 3584, 28, 4, model_type="qwen2_vl", use_sliding_window=False, vision_config={"depth": 32}),
        full(28, 4, 128),
    ),
    "Qwen3-4B": Real(
        dense(36, 2560, 32, 8, model_type="qwen3", head_dim=128, sliding_window=None), full(36, 8, 128)
    ),
    "Qwen3-32B": Real(dense(64, 5120, 64, 8, model_type="qwen3", head_dim=128), full(64, 8, 128)),
    "Qwen3-30B-A3B": Real(dense(48, 2048, 32, 4, model_type="qwen3_moe", head_dim=128), full(48, 4, 128)),
    "Qwen3-235B-A22B": Real(dense(94, 4096, 64, 4, model_type="qwen3_moe", head_dim=128), full(94, 4, 128)),
    "Qwen3-Next-80B-A3B": Real(
        dense(
            48,
            2048,
            16,
            2,
            model_type="qwen3_next",
            head_dim=256,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
        ),
        # queries, keys and values of 3 tokens; a matrix a value head
        {
            "states": State(36, 32, 32 * 128 * 3, 32 * 128 * 128, 2 * 16 * 128 * 3, 16),
            "full": Heads(12, 2, 256),
        },
        {"states": "recurrent"},
    ),
    "Mistral-7B-v0.1": Real(
        dense(32, 4096, 32, 8, model_type="mistral", sliding_window=4096, max_position_embeddings=32_768),
        {"sliding": Heads(32, 8, 128)},
        {"sliding": "sliding_window(4096)"},
    ),
    "Mistral-7B-v0.3": Real(
        dense(32, 4096, 32, 8, model_type="mistral", sliding_window=None), full(32, 8, 128)
    ),
    "Mistral-Nemo-12B": Real(
        # 5,120 / 32 heads is 160
        dense(40, 5120, 32, 8, model_type="mistral", head_dim=128, sliding_window=None),
        full(40, 8, 128),
    ),
    "Mistral-Small-3.1-24B": Real(
        {
            "model_type": "mistral3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "sliding_window": None,
                "max_position_embeddings": 131_072,
            },
            "vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16},
        },
        full(40, 8, 128),
    ),
    "Mixtral-8x7B": Real(dense(32, 4096, 32, 8, model_type="mixtral", sliding_window=None), full(32, 8, 128)),
    "LLaVA-1.5-7B": Real(
        # all that its text model says beside is the vocabulary
        {
            "model_type": "llava",
            "torch_dtype": "float16",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "torch_dtype": "float16"},
        },
        full(32, 32, 128),
    ),
    "Gemma-2-9B": Real(
        dense(
            42,
            3584,
            16,
            8,
            model_type="gemma2",
            head_dim=256,
            sliding_window=4096,
            max_position_embeddings=8192,
        ),
        {"sliding": Heads(21, 8, 256), "full": Heads(21, 8, 256)},
        {"sliding": "sliding_window(4096)"},
    ),
    "Gemma-2-27B": Real(
        dense(
            46,
            4608,
            32,
            16,
            model_type="gemma2",
            head_dim=128,
            sliding_window=4096,
            max_position_embeddings=8192,
        ),
        {"sliding": Heads(23, 16, 128), "full": Heads(23, 16, 128)},
        {"sliding": "sliding_window(4096)"},
    ),
    "Gemma-3-4B": Real(
        # heads and their size are left to the family's defaults
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        {"sliding": Heads(29, 4, 256), "full": Heads(5, 4, 256)},
        {"sliding": "sliding_window(1024)"},
    ),
    "Gemma-3-27B": Real(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
            },
        },
        {"sliding": Heads(52, 16, 128), "full": Heads(10, 16, 128)},
        {"sliding": "sliding_window(1024)"},
    ),
    "Gemma-3n-E4B": Real(
        # the last 15 of 35 layers read what layers 18 and 19 keep
        {
            "model_type": "gemma3n",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3n_text",
                "num_hidden_layers": 35,
                "hidden_size": 2048,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "num_kv_shared_layers": 15,
                "sliding_window": 512,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            },
        },
        {"sliding": Heads(16, 2, 256), "full": Heads(4, 2, 256)},
        {"sliding": "sliding_window(512)"},
    ),
    "DeepSeek-V2-Lite": Real(
        dense(27, 2048, 16, 16, model_type="deepseek_v2", kv_lora_rank=512, qk_rope_head_dim=64),
        {"full": Latent(27, 576, 16)},
    ),
    "DeepSeek-V3": Real(
        deepseek(61, 128, model_type="deepseek_v3", num_nextn_predict_layers=1),
        {"full": Latent(61, 576, 128)},
    ),
    "DeepSeek-V3.2": Real(
        deepseek(61, 128, model_type="deepseek_v32", index_head_dim=128, index_n_heads=64, index_topk=2048),
        {"full": Latent(61, 576, 128, index=128)},
    ),
    "Kimi-K2": Real(
        deepseek(61, 64, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"]),
        {"full": Latent(61, 576, 64)},
    ),
    "GLM-4.5": Real(
        dense(92, 5120, 96, 8, model_type="glm4_moe", head_dim=128, num_nextn_predict_layers=1),
        full(92, 8, 128),
    ),
    "GLM-4.5-Air": Real(dense(46, 4096, 96, 8, model_type="glm4_moe", head_dim=128), full(46, 8, 128)),
    "ChatGLM3-6B": Real(
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 8192,
            "torch_dtype": "float16",
        },
        full(28, 2, 128),
    ),
    "gpt-oss-20b": Real(
        # without a dtype of its own; its sinks are a number a head, and no tokens
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        {"sliding": Heads(12, 8, 64), "full": Heads(12, 8, 64)},
        {"sliding": "sliding_window(128)"},
    ),
    "gpt-oss-120b": Real(
        dense(36, 2880, 64, 8, model_type="gpt_oss", head_dim=64, sliding_window=128),
        {"sliding": Heads(18, 8, 64), "full": Heads(18, 8, 64)},
        {"sliding": "sliding_window(128)"},
    ),
    "Phi-4": Real(dense(40, 5120, 40, 10, model_type="phi3", sliding_window=None), full(40, 10, 128)),
    "Phi-4-mini": Real(
        # a window longer than any sequence
        dense(32, 3072, 24, 8, model_type="phi3", sliding_window=262_144, max_position_embeddings=131_072),
        full(32, 8, 128),
    ),
    "MiniMax-Text-01": Real(
        dense(
            80, 6144, 64, 8, model_type="minimax_text_01", head_dim=128, attn_type_list=([0] * 7 + [1]) * 10
        ),
        {"states": State(70, 64, 0, 64 * 128 * 128), "full": Heads(10, 8, 128)},
        {"states": "recurrent"},
    ),
    "MiniMax-M2": Real(
        dense(62, 3072, 48, 8, model_type="minimax_m2", head_dim=128, attn_type_list=[1] * 62),
        full(62, 8, 128),
    ),
    "Nemotron-H-8B": Real(
        dense(
            52,
            4096,
            32,
            8,
            model_type="nemotron_h",
            attention_head_dim=128,
            hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
        ),
        # x, B and C of 3 tokens; a matrix a head, in float32
        {
            "states": State(24, 128, 128 * 64 * 3, 128 * 64 * 128, 2 * 8 * 128 * 3, 8, ssm_bytes=4),
            "full": Heads(4, 8, 128),
        },
        {"states": "recurrent"},
    ),
    "Jamba-v0.1": Real(
        dense(
            32,
            4096,
            32,
            8,
            model_type="jamba",
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        {"states": State(28, 8192, 8192 * 3, 8192 * 16), "full": Heads(4, 8, 128)},
        {"states": "recurrent"},
    ),
    "Mamba-Codestral-7B": Real(
        {
            "model_type": "mamba2",
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "torch_dtype": "bfloat16",
        },
        {"states": State(64, 128, 128 * 64 * 3, 128 * 64 * 128, 2 * 8 * 128 * 3, 8)},
        {"states": "recurrent"},
    ),
    "Whisper-large-v3": Real(
        {
            "model_type": "whisper",
            "d_model": 1280,
            "encoder_layers": 32,
            "num_hidden_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_layers": 32,
            "decoder_attention_heads": 20,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "torch_dtype": "float16",
        },
        {"full": Heads(32, 20, 64), "cross": Heads(32, 20, 64)},
        {"cross": "cross"},
    ),
    "Whisper-large-v3-turbo": Real(
        # 32 layers are the encoder's
        {
            "model_type": "whisper",
            "d_model": 1280,
            "encoder_layers": 32,
            "num_hidden_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_layers": 4,
            "decoder_attention_heads": 20,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "torch_dtype": "float16",
        },
        {"full": Heads(4, 20, 64), "cross": Heads(4, 20, 64)},
        {"cross": "cross"},
    ),
    "Flan-T5-XXL": Real(
        {
            "model_type": "t5",
            "d_model": 4096,
            "d_kv": 64,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 64,
            "torch_dtype": "bfloat16",
        },
        {"full": Heads(24, 64, 64), "cross": Heads(24, 64, 64)},
        {"cross": "cross"},
    ),
}
