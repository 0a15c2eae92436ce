"""A model as its configuration describes it, and the parameters of the cache that it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar, Unpack

from pagekeeper.dtypes import DType, DTypeLike
from pagekeeper.errors import shown
from pagekeeper.models.families import GENERIC, family_of
from pagekeeper.models.family import Family
from pagekeeper.models.fields import Fields
from pagekeeper.models.keeps import Keep, Layer, group_layers
from pagekeeper.models.layer_types import LayerType, listed_types
from pagekeeper.models.parameters import Wishes, params_of_group
from pagekeeper.models.quantized import model_dtype, quantized_kv_dtype
from pagekeeper.models.source import Source
from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MultiKVCacheParams,
    SlidingWindow,
    whole_number,
)
from pagekeeper.params.base import CommonArguments
from pagekeeper.params.checks import parse_flag, parse_instance
from pagekeeper.params.groups import AttentionKind

__all__ = ["HuggingFaceModel"]

_MTP_COUNTS = (("num_mtp_layers", 0), ("mtp_transformer_layers", 1))
_Given = TypeVar("_Given")
_Value = TypeVar("_Value")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a model keeps of the tokens that it has seen, layer by layer. `read` makes one.

    Attributes:
        model_type: the type of the text model, as the configuration has it; "" if it has none.
        family: the name of the `Family` that it is read as; "generic" if its type is not known.
        is_known: whether its type is known. If not, it was read by the fields that most have: check it.
        notes: what was assumed or left out while reading, a sentence each.
        dtype: type that the model computes in.
        kv_dtype: type that its cache has: what the checkpoint was quantized for, else `dtype`.
        ssm_dtype: type of the states of its recurrences: what the configuration asks for, else `dtype`.
        layers: what each layer keeps.
        mtp_layers: what the layers for multi-token prediction keep, which draft tokens.
        max_position_embeddings: tokens of the longest sequence; None if the configuration does not say.
        encoder_length: tokens that the encoder gives to each request, at most; None without an encoder, or if
            the configuration does not say.

    >>> qwen = HuggingFaceModel.read({
    ...     "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
    ... })
    >>> qwen.to_params(page_size=16).bytes_per_token
    147456
    >>> qwen.to_params(tensor_parallel_degree=16, dtype="float8_e4m3fn").bytes_per_token  # 1 head of 8
    9216
    """

    model_type: str
    family: str
    is_known: bool
    notes: tuple[str, ...]
    dtype: DType
    kv_dtype: DType
    ssm_dtype: DType
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...]
    max_position_embeddings: int | None
    encoder_length: int | None

    @classmethod
    def read(cls, config: str | PathLike[str] | Mapping[str, Any]) -> HuggingFaceModel:
        """Reads a model's configuration. Logs a warning if the model's type is not known.

        Args:
            config: a directory that has a `config.json`, such a file, or what is in one. A multimodal model's
                text model is read. `hf_quant_config.json` beside it is read too.

        Raises:
            FileNotFoundError: there is no such file.
            TypeError: `config` is neither a path nor a mapping.
            ValueError: it holds no configuration, or one that cannot be read; the message names the field.
        """
        source = Source.load(config)
        family = family_of(source.model_type)
        notes = []
        if family is None:
            family = GENERIC
            notes.append(
                f"model_type={shown(source.model_type)} is not known: it was read by the fields that most "
                "models have, so check what it keeps"
            )
            _LOG.warning(notes[0])
        fields = Fields(source.text, family.names, family.defaults)
        try:
            layers = _layers(family, fields)
            mtp_layers = _mtp_layers(family, fields, len(layers))
            dtype, of_dtype = model_dtype(source)
            kv_dtype, of_kv = quantized_kv_dtype(source)
            ssm_dtype = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
            return cls(
                model_type=source.model_type,
                family=family.name,
                is_known=family is not GENERIC,
                notes=(*notes, *of_dtype, *of_kv),
                dtype=dtype,
                kv_dtype=kv_dtype or dtype,
                ssm_dtype=dtype if ssm_dtype in (None, "auto") else DType.parse(ssm_dtype),
                layers=layers,
                mtp_layers=mtp_layers,
                max_position_embeddings=fields.count_or_none("max_position_embeddings"),
                encoder_length=family.encoder_length(source, fields),
            )
        except (TypeError, ValueError) as error:
            kind = f"{family.name} model" if family is not GENERIC else f"model_type={source.model_type!r}"
            raise ValueError(f"{_told(config)}, {kind}: {error}") from error

    def groups(self, layers: range | None = None, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
        """The layers of each group of the cache by its name, in the order that they have in its pages.

        Layers for multi-token prediction are numbered on after the model's own. A layer may be in two groups;
        one that keeps nothing, or reads another layer's KV, is in none.

        Args:
            layers: as in `to_params`.
            mtp: as in `to_params`.
        """
        members = group_layers(self._numbered(layers, mtp))
        return {name: tuple(number for number, _ in keeps) for name, keeps in members.items()}

    def to_params(
        self,
        *,
        tensor_parallel_degree: int = 1,
        dtype: DTypeLike | None = None,
        kvcache_quant_config: KVCacheQuantizationConfig | None = None,
        indexer_dtype: DTypeLike = DType.bfloat16,
        state_dtype: DTypeLike | None = None,
        snapshot_interval: int | None = None,
        layers: range | None = None,
        mtp: bool = False,
        draft: HuggingFaceModel | None = None,
        **common: Unpack[CommonArguments],
    ) -> KVCacheParams | MultiKVCacheParams:
        """The parameters of the model's cache, of one shard: one group's, or those of several by name.

        Groups are called "full", "sliding", "chunked", "cross" and "states"; where a model has several of one
        kind, by their windows besides: "sliding_512". Those of a draft model begin with "draft_".

        Args:
            tensor_parallel_degree: shards, from 1. Heads are divided among them; with more shards than KV
                heads, each head lies on several. Latents lie on all of them whole.
            dtype: element type of the KV. None is the checkpoint's, `kv_dtype`.
            kvcache_quant_config: scales of quantized KV. None is `KVCacheQuantizationConfig.nvfp4` for
                "float4_e2m1fn" and none for other types.
            indexer_dtype: element type of the keys of a sparse-attention indexer.
            state_dtype: element type of states. None is the model's, but for recurrences with a type of their
                own, `ssm_dtype`.
            snapshot_interval: tokens between two snapshots of the states, as in `Recurrent`.
            layers: the layers of one stage of a pipeline, by their numbers. None: all of them.
            mtp: whether the layers for multi-token prediction have KV too, in groups with the model's own.
            draft: a model that drafts tokens, whose groups are added.
            common: further arguments of the parameters, as in `KVCacheParams`.

        Raises:
            TypeError: an argument is unknown.
            ValueError: a value is not allowed, heads do not divide, or the layers keep nothing.
        """
        wishes = Wishes(
            degree=whole_number(tensor_parallel_degree, "tensor_parallel_degree"),
            dtype=None if dtype is None else _parsed("dtype", dtype, DType.parse),
            quantization=kvcache_quant_config,
            indexer_dtype=_parsed("indexer_dtype", indexer_dtype, DType.parse),
            state_dtype=None if state_dtype is None else _parsed("state_dtype", state_dtype, DType.parse),
            snapshot_interval=snapshot_interval,
        )
        mtp = _parsed("mtp", mtp, parse_flag)
        draft = _parsed("draft", draft, parse_instance(HuggingFaceModel))
        groups = self._params_of_groups(wishes, layers, mtp, common)
        if draft is not None:
            of_draft = draft._params_of_groups(wishes, None, False, common)
            groups |= {f"draft_{name}": params for name, params in of_draft.items()}
        if len(groups) == 1:
            return next(iter(groups.values()))
        return MultiKVCacheParams(groups)

    def _params_of_groups(
        self, wishes: Wishes, layers: range | None, mtp: bool, common: CommonArguments
    ) -> dict[str, KVCacheParams]:
        groups = group_layers(self._numbered(layers, mtp))
        if not groups:
            raise ValueError(f"layers={layers}: none of these layers of the model keeps anything")
        own = wishes.of_model(self.kv_dtype, self.dtype, self.ssm_dtype)
        return {
            name: params_of_group([keep for _, keep in keeps], own, common) for name, keeps in groups.items()
        }

    def _numbered(self, layers: range | None, mtp: bool) -> dict[int, Layer]:
        """The layers that are asked for by their numbers."""
        numbers = range(len(self.layers)) if layers is None else _parse_stage(layers, len(self.layers))
        chosen = {number: self.layers[number] for number in numbers}
        for number, layer in chosen.items():
            if layer.shares_with is not None and layer.shares_with not in chosen:
                raise ValueError(
                    f"layers={layers}: layer {number} reads the KV of layer {layer.shares_with}, so both "
                    "must be in one stage"
                )
        return chosen | (dict(enumerate(self.mtp_layers, len(self.layers))) if mtp else {})


def _layers(family: Family, fields: Fields) -> tuple[Layer, ...]:
    sorts = listed_types(fields) or family.layers(fields)
    if fields.count_or("num_hidden_layers", len(sorts)) != len(sorts):
        raise fields.refusal("num_hidden_layers", f"the config has a word for each of {len(sorts)} layers")
    own = len(sorts) - fields.count_or("num_kv_shared_layers", 0)
    if own < 1:
        raise fields.refusal("num_kv_shared_layers", f"must be less than the {len(sorts)} layers")
    layers = [Layer(_keeps(family, fields, sort, number)) for number, sort in enumerate(sorts[:own])]
    for number, sort in enumerate(sorts[own:], own):
        giver = max((layer for layer in range(own) if sorts[layer] == sort), default=None)
        if giver is None:
            raise ValueError(f"layer {number} has no earlier layer of its sort whose KV it could read")
        layers.append(Layer(shares_with=giver))
    return tuple(layers)


def _mtp_layers(family: Family, fields: Fields, number: int) -> tuple[Layer, ...]:
    """Layers behind the model's own, which read all tokens and are otherwise like its attention layers."""
    count = fields.count_or("num_mtp_layers", 0, most=64) * fields.count_or(
        "mtp_transformer_layers", 1, most=64
    )
    return tuple(Layer(_keeps(family, fields, "full", layer)) for layer in range(number, number + count))


def _keeps(family: Family, fields: Fields, sort: LayerType, number: int) -> tuple[Keep, ...]:
    keeps: list[Keep | None] = []
    fields = fields.of_layer(number)
    for part in sort.split("+"):
        if part == "states":
            if family.states is None:
                raise ValueError(f"layer {number} has states, of which nothing is known in such a model")
            keeps.append(family.states(fields))
        elif part != "nothing":
            keeps.append(family.attention(fields, _kind(part, fields), number))
    return tuple(keep for keep in keeps if keep is not None)


def _kind(sort: str, fields: Fields) -> AttentionKind:
    """The tokens that a layer reads. A window that no sequence outgrows is none."""
    if sort == "cross":
        return CrossAttention()
    if sort == "full":
        return FullAttention()
    size = fields.count("sliding_window" if sort == "sliding" else "attention_chunk_size")
    longest = fields.count_or_none("max_position_embeddings")
    if longest is not None and size >= longest:
        return FullAttention()
    return SlidingWindow(size) if sort == "sliding" else ChunkedLocal(size)


def _parsed(name: str, given: _Given, parse: Callable[[_Given], _Value]) -> _Value:
    """What `given` says; a refusal names the argument."""
    try:
        return parse(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={shown(given)}: {error}") from None


def _parse_stage(layers: object, num_layers: int) -> range:
    """The numbers of the layers of a stage."""
    if not isinstance(layers, range) or not all(0 <= end < num_layers for end in (*layers[:1], *layers[-1:])):
        raise ValueError(f"layers={shown(layers)}: must be a range of numbers from 0 to {num_layers - 1}")
    return layers


def _told(config: object) -> str:
    """The configuration as messages tell it."""
    return "config" if isinstance(config, Mapping) else str(config)
