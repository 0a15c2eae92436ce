"""How large a model's weights are: by the files that lie beside its configuration, or about, by its shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pagekeeper.models.families import GENERIC, family_of
from pagekeeper.models.fields import Fields
from pagekeeper.models.quantized import model_dtype
from pagekeeper.models.source import Source

__all__ = ["estimate_weights", "weights_on_disk"]


def weights_on_disk(model: str | PathLike[str]) -> int | None:
    """Bytes of the safetensors files beside a configuration; None if there are none.

    Args:
        model: a directory, or a file in it. If it has an index, the files that this names count, and what it
            says of their size if they are not there.

    Raises:
        ValueError: the index cannot be read.
    """
    path = Path(model)
    directory = path if path.is_dir() else path.parent
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return _bytes_of(directory.glob("*.safetensors")) or None
    try:
        content = json.loads(index.read_bytes())
        files = [directory / name for name in sorted(set(content["weight_map"].values()))]
        if all(file.is_file() for file in files):
            return _bytes_of(files)
        return int(content["metadata"]["total_size"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index}: is no index of safetensors files: {error!r}") from None


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def estimate_weights(config: str | PathLike[str] | Mapping[str, Any]) -> int | None:
    """About how many bytes the weights of a text model have; None where its fields do not say enough.

    Embeddings, attention and feed-forward layers count, as transformers of today have them: gated, or
    experts. Layers with states are taken to have as many weights as such with attention.

    Args:
        config: as for `HuggingFaceModel.read`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no configuration.
    """
    source = Source.load(config)
    family = family_of(source.model_type) or GENERIC
    fields = Fields(source.text, family.names, family.defaults)
    try:
        hidden, layers = fields.count("hidden_size"), fields.num_layers
        embeddings = fields.count("vocab_size") * hidden * (1 if fields.flag("tie_word_embeddings") else 2)
        parameters = embeddings + layers * _attention(fields, hidden) + _feed_forward(fields, hidden, layers)
    except ValueError:
        return None
    return int(parameters * _bits(source) / 8)


def _attention(fields: Fields, hidden: int) -> int:
    heads = fields.count("num_attention_heads")
    latent = fields.count_or_none("kv_lora_rank")
    if latent is None:
        width = fields.count_or_none("head_dim") or hidden // heads
        return 2 * hidden * width * (heads + (fields.count_or_none("num_key_value_heads") or heads))
    rope, plain = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, compressed = fields.count("v_head_dim"), fields.count_or_none("q_lora_rank")
    queries = heads * (plain + rope)
    return (
        (compressed * (hidden + queries) if compressed else hidden * queries)
        + hidden * (latent + rope)
        + latent * heads * (plain + value)
        + heads * value * hidden
    )


def _feed_forward(fields: Fields, hidden: int, layers: int) -> int:
    experts = next((count for name in _EXPERTS if (count := fields.count_or_none(name))), None)
    if experts is None:
        return layers * 3 * hidden * fields.count("intermediate_size")
    width = fields.count_or_none("moe_intermediate_size") or fields.count("intermediate_size")
    shared = fields.count_or("n_shared_experts", 0) * width + fields.count_or(
        "shared_expert_intermediate_size", 0
    )
    dense = min(fields.count_or("first_k_dense_replace", 0), layers)
    of_dense = fields.count("intermediate_size") if dense else 0
    return 3 * hidden * (dense * of_dense + (layers - dense) * (experts * width + shared))


def _bits(source: Source) -> float:
    """Bits of a weight: as the checkpoint was quantized, else those of its type."""
    settings = source.of_text_or_whole("quantization_config")
    if isinstance(settings, Mapping):
        method, bits = str(settings.get("quant_method")), settings.get("bits")
        if isinstance(bits, int) and bits in range(2, 9):
            return bits
        if settings.get("load_in_4bit") or method in _BITS:
            return 4 if settings.get("load_in_4bit") else _BITS[method]
    return 8 * model_dtype(source)[0].size_in_bytes


_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_BITS = {"fp8": 8, "fbgemm_fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4.25, "nvfp4": 4.5}
"""Bits of a weight by `quant_method`, scales of blocks included."""
