"""Loads a Hugging Face Llama or Qwen2 directory: `config.json` and safetensors, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .model import DTYPE, Model, ModelConfig, Rope


class UnsupportedModelError(ValueError):
    """The directory is no model that this example can run; the message names the file and the field."""


def load_model(directory: Path) -> Model:
    """The model in `directory`, computed in `DTYPE` (8 bytes a parameter).

    Raises:
        UnsupportedModelError: a file is missing or damaged, or a field or a tensor is not what this decoder
            computes.
    """
    config = load_config(directory)
    return Model(config, _load_weights(directory, config))


def load_config(directory: Path) -> ModelConfig:
    """Reads `config.json`, and the end-of-text tokens from `generation_config.json` where there is one.

    Raises:
        UnsupportedModelError: see `load_model`.
    """
    path = directory / "config.json"
    fields = _read_json(path)
    kind = fields.get("model_type")
    if kind not in ("llama", "qwen2"):
        raise UnsupportedModelError(f"{path}: model_type={kind!r}: must be 'llama' or 'qwen2'")
    _refuse_what_is_not_computed(path, fields)

    hidden_size = _positive(path, fields, "hidden_size")
    num_heads = _positive(path, fields, "num_attention_heads")
    num_kv_heads = _positive(path, fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{path}: num_attention_heads={num_heads}: must be a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    head_dim = _positive(path, fields, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"{path}: head_dim={head_dim}: must be even, halves are rotated in pairs")
    llama_bias = kind == "llama" and bool(fields.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_positive(path, fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(path, fields, "intermediate_size"),
        num_layers=_positive(path, fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(path, fields),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or llama_bias,
        output_bias=llama_bias,
        mlp_bias=kind == "llama" and bool(fields.get("mlp_bias", False)),
        max_positions=_positive(path, fields, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(directory, fields),
    )


def _refuse_what_is_not_computed(path: Path, fields: Mapping[str, Any]) -> None:
    """Fields that would change the arithmetic, with the values under which they do not."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for name, values in allowed.items():
        if name in fields and fields[name] not in values:
            raise UnsupportedModelError(f"{path}: {name}={fields[name]!r}: must be {values[0]!r}")
    for index, layer in enumerate(fields.get("layer_types") or ()):
        if layer != "full_attention":
            raise UnsupportedModelError(f"{path}: layer_types[{index}]={layer!r}: must be 'full_attention'")


def _rope(path: Path, fields: Mapping[str, Any]) -> Rope:
    """`rope_theta` and `rope_scaling`, or the `rope_parameters` that newer checkpoints have instead."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    scaling = fields.get(name) or {}
    theta = float(scaling.get("rope_theta", fields.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, kind, float(scaling["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                kind,
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise UnsupportedModelError(f"{path}: {name} of type {kind!r} lacks {error}") from None
    raise UnsupportedModelError(f"{path}: {name} of type {kind!r}: must be 'default', 'linear' or 'llama3'")


def _eos_token_ids(directory: Path, fields: Mapping[str, Any]) -> frozenset[int]:
    generation = directory / "generation_config.json"
    source = _read_json(generation) if generation.exists() else fields
    eos = source.get("eos_token_id")
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)


def _load_weights(directory: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("loading a model needs safetensors: pip install safetensors") from error

    wanted = config.parameter_shapes()
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(directory):
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(f"{path}: cannot be read: {error}") from error
        for name, tensor in stored.items():
            if name in wanted:
                weights[name] = tensor.to(DTYPE)
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise UnsupportedModelError(f"{path}: {name} is no part of the model in config.json")
    for name, shape in wanted.items():
        if name not in weights:
            raise UnsupportedModelError(f"{directory}: the weights lack {name}")
        if tuple(weights[name].shape) != shape:
            raise UnsupportedModelError(
                f"{directory}: {name} has shape {tuple(weights[name].shape)}: config.json asks for {shape}"
            )
    return weights


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnsupportedModelError(f"{index}: has no weight_map")
        return [directory / name for name in sorted(set(weight_map.values()))]
    single = directory / "model.safetensors"
    if not single.exists():
        raise UnsupportedModelError(
            f"{directory}: has neither model.safetensors nor model.safetensors.index.json"
        )
    return [single]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path}: must hold a JSON object")
    return content


def _positive(path: Path, fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{path}: {name}={value!r}: must be a whole number of at least 1")
    return value
