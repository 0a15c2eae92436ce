"""What a layer keeps, from the model's fields: its KV by the shape of its attention, or its states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pagekeeper.models.fields import Fields
from pagekeeper.models.keeps import Channels, KeysAndValues, Latents, States, StateTensor
from pagekeeper.models.source import Source
from pagekeeper.params.groups import AttentionKind

__all__ = [
    "AttentionReader",
    "EncoderReader",
    "StateReader",
    "audio_frames",
    "delta_rule",
    "image_patches",
    "keys_and_values",
    "keys_and_values_of_blocks",
    "keys_and_values_of_two_sizes",
    "kimi_delta",
    "latents",
    "latents_and_index",
    "latents_or_keys_and_values",
    "lightning",
    "mamba",
    "mamba2",
    "short_convolution",
]

AttentionReader: TypeAlias = Callable[[Fields, AttentionKind, int], KeysAndValues | Latents | None]
"""From the fields, the tokens that a layer reads and its number: its KV; None if it has no attention."""

StateReader: TypeAlias = Callable[[Fields], States]
"""From the fields: the state of one layer."""


EncoderReader: TypeAlias = Callable[[Source, Fields], int | None]
"""From the whole configuration and the fields: tokens of the encoder; None if it does not say."""


def keys_and_values(fields: Fields, kind: AttentionKind, layer: int) -> KeysAndValues:
    """`num_key_value_heads`, else all query heads; `head_dim`, else the hidden size over the query heads.

    With `multi_query` it is one head whatever else is said, but where `new_decoder_architecture` ends that.
    """
    if fields.get("multi_query") is True and fields.get("new_decoder_architecture") is not True:
        return KeysAndValues(kind, 1, _head_dim(fields))
    nested = fields.within("attn_config").count_or_none("kv_n_heads")
    heads = fields.count_or_none("num_key_value_heads") or nested
    return KeysAndValues(kind, heads or fields.count("num_attention_heads"), _head_dim(fields))


def keys_and_values_of_two_sizes(fields: Fields, kind: AttentionKind, layer: int) -> KeysAndValues:
    """The same; layers that read all tokens may have a size and a number of heads of their own.

    They are `global_head_dim` and, with `attention_k_eq_v`, `num_global_key_value_heads`, but where
    `per_layer_config` says what each layer has.
    """
    kept = keys_and_values(fields, kind, layer)
    if kind.type != "full" or fields.get("per_layer_config") is not None:
        return kept
    own = fields.count_or_none("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
    return KeysAndValues(kind, own or kept.heads, fields.count_or_none("global_head_dim") or kept.head_dim)


def keys_and_values_of_blocks(fields: Fields, kind: AttentionKind, layer: int) -> KeysAndValues | None:
    """A layer's own number of KV heads, by the query heads in a group: `block_configs[].attention`."""
    blocks = fields.listed("block_configs") or []
    if layer >= len(blocks):
        raise fields.refusal("block_configs", "must be a list with an entry for each layer")
    attention = Fields(blocks[layer]).within("attention")
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return None
    queries, group = fields.count("num_attention_heads"), attention.count("n_heads_in_group")
    if queries % group:
        raise attention.refusal("n_heads_in_group", f"must divide num_attention_heads={queries}")
    return KeysAndValues(kind, queries // group, _head_dim(fields))


def latents(fields: Fields, kind: AttentionKind, layer: int) -> Latents:
    """`kv_lora_rank` values, and `qk_rope_head_dim` with the position."""
    return Latents(
        kind,
        fields.count("kv_lora_rank"),
        fields.count("qk_rope_head_dim", least=0),
        fields.count("num_attention_heads"),
    )


def latents_and_index(fields: Fields, kind: AttentionKind, layer: int) -> Latents:
    """Latents, and an indexer's key of `index_head_dim` values but where `indexer_types` says "shared"."""
    plain = latents(fields, kind, layer)
    types = fields.listed("indexer_types")
    if types is not None and layer < len(types) and types[layer] == "shared":
        return plain
    return Latents(
        kind, plain.kv_lora_rank, plain.qk_rope_head_dim, plain.query_heads, fields.count("index_head_dim")
    )


def latents_or_keys_and_values(fields: Fields, kind: AttentionKind, layer: int) -> KeysAndValues | Latents:
    """Latents if there is a `kv_lora_rank`, else keys and values."""
    read = keys_and_values if fields.get("kv_lora_rank") is None else latents
    return read(fields, kind, layer)


def mamba(fields: Fields) -> States:
    """Mamba 1: `expand` x `hidden_size` channels, each with `ssm_state_size` values."""
    channels = fields.count_or_none("mamba_intermediate_size")
    inner = (Channels(channels or fields.count("expand") * fields.count("hidden_size")),)
    return States(
        (_convolution(fields, *inner), StateTensor("ssm", inner, (fields.count("ssm_state_size"),)))
    )


def mamba2(fields: Fields) -> States:
    """Mamba 2: a matrix of `mamba_head_dim` x `ssm_state_size` a head; the convolution sees B and C too."""
    heads, size = fields.count("mamba_num_heads"), fields.count("ssm_state_size")
    if fields.get("mamba_head_dim") in (None, "auto"):
        inner = fields.count_or_none("mamba_d_ssm") or fields.count("expand") * fields.count("hidden_size")
        width = inner // heads
    else:
        width = fields.count("mamba_head_dim")
    groups = Channels(fields.count("n_groups"), 2 * size, repeatable=True)
    return States(
        (
            _convolution(fields, Channels(heads, width), groups),
            StateTensor("ssm", (Channels(heads),), (width, size)),
        )
    )


def delta_rule(fields: Fields) -> States:
    """Gated delta rule: a matrix of key by value dimension a value head; the convolution sees q, k and v."""
    key_heads, key_dim = fields.count("linear_num_key_heads"), fields.count("linear_key_head_dim")
    value_heads, value_dim = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    queries_and_keys = Channels(key_heads, 2 * key_dim, repeatable=True)
    return States(
        (
            _convolution(fields, queries_and_keys, Channels(value_heads, value_dim)),
            StateTensor("ssm", (Channels(value_heads),), (key_dim, value_dim)),
        )
    )


def kimi_delta(fields: Fields) -> States:
    """Kimi's delta rule: as many keys as values, of one size; fields of `linear_attn_config` go first."""
    own = fields.within("linear_attn_config")
    heads = own.count_or_none("num_heads") or fields.count("linear_num_heads")
    width = own.count_or_none("head_dim") or fields.count("linear_head_dim")
    kernel = own.count_or_none("short_conv_kernel_size") or fields.count("conv_kernel")
    return States(
        (
            StateTensor("conv", (Channels(heads, 3 * width),), (kernel - 1,)),
            StateTensor("ssm", (Channels(heads),), (width, width)),
        )
    )


def lightning(fields: Fields) -> States:
    """Lightning attention: a matrix of head dimension squared for each query head."""
    width = _head_dim(fields)
    return States((StateTensor("ssm", (Channels(fields.count("num_attention_heads")),), (width, width)),))


def short_convolution(fields: Fields) -> States:
    """A convolution over the hidden values and nothing else."""
    return States((_convolution(fields, Channels(fields.count("hidden_size"))),))


def audio_frames(source: Source, fields: Fields) -> int | None:
    """`max_source_positions`: what the encoder makes of as much sound as it takes."""
    return fields.count("max_source_positions")


def image_patches(source: Source, fields: Fields) -> int | None:
    """Patches of an image of as many tiles as one may have, and a class token for each tile."""
    vision = Fields(source.whole, defaults={"max_num_tiles": 4}).within("vision_config")
    size, patch = vision.count_or_none("image_size"), vision.count_or_none("patch_size")
    if size is None or patch is None:
        return None
    return vision.count("max_num_tiles") * ((size // patch) ** 2 + 1)


def _convolution(fields: Fields, *channels: Channels) -> StateTensor:
    """The inputs that a causal convolution needs beside the newest: one less than its kernel is wide."""
    return StateTensor("conv", channels, (fields.count("conv_kernel", least=2) - 1,))


def _head_dim(fields: Fields) -> int:
    given = fields.count_or_none("head_dim")
    if given is not None:
        return given
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"head_dim: the config has none, and hidden_size={hidden} is no multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden // heads
