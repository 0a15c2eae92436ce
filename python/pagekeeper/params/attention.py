"""Groups of attention layers: what their pages hold of each token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, Unpack

from pagekeeper.dtypes import DType, DTypeLike
from pagekeeper.params.base import CommonArguments, KVCacheParams
from pagekeeper.params.checks import keep, parse_count, parse_flag, parse_instance, parse_length, whole_number
from pagekeeper.params.companions import IndexerKCache, KVCacheQuantizationConfig
from pagekeeper.params.groups import AttentionKind, ChunkedLocal, CrossAttention, FullAttention, SlidingWindow
from pagekeeper.params.layout import PageLayout, Part

__all__ = ["AttentionKVCacheParams", "MHAKVCacheParams", "MLAKVCacheParams"]

_Value = TypeVar("_Value")
PerLayer: TypeAlias = _Value | tuple[_Value, ...]
"""One value for all layers, or one for each where they differ."""

_FULL = FullAttention()


@dataclass(frozen=True, init=False)
class AttentionKVCacheParams(KVCacheParams):
    """What attention layers of every sort have. A page holds `page_size` tokens.

    Args:
        dtype: element type of the KV; anything that `DType.parse` understands. A list of one a layer where
            they differ.
        num_layers: layers whose KV one page holds.
        kind: which tokens the layers read: `FullAttention`, `SlidingWindow`, `ChunkedLocal` or
            `CrossAttention`.
        kvcache_quant_config: scales of quantized KV. None has no room for any.
        indexer: keys of a sparse-attention indexer. None has none.

    The other arguments and the errors are those of `KVCacheParams`.
    """

    dtype: PerLayer[DType]
    kvcache_quant_config: KVCacheQuantizationConfig | None
    indexer: IndexerKCache | None

    _kinds = (FullAttention, SlidingWindow, ChunkedLocal, CrossAttention)

    def __init__(
        self,
        *,
        dtype: DTypeLike | Sequence[DTypeLike],
        num_layers: int,
        kind: AttentionKind,
        kvcache_quant_config: KVCacheQuantizationConfig | None,
        indexer: IndexerKCache | None,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(num_layers=num_layers, kind=kind, **common)
        keep(self, "dtype", dtype, self._per_layer(DType.parse))
        keep(self, "kvcache_quant_config", kvcache_quant_config, parse_instance(KVCacheQuantizationConfig))
        keep(self, "indexer", indexer, parse_instance(IndexerKCache))

    def _per_layer(self, parse: Callable[[Any], _Value]) -> Callable[[object], PerLayer[_Value]]:
        """What parses one value, or a list of one a layer; a list of equal values is one value."""

        def parse_all(given: object) -> PerLayer[_Value]:
            if not isinstance(given, list | tuple):
                return parse(given)
            if len(given) != self.num_layers:
                raise ValueError(
                    f"{len(given)} values, must be one, or one for each of {self.num_layers} layers"
                )
            values = tuple(map(parse, given))
            return values[0] if len(set(values)) == 1 else values

        return parse_all

    def _check_layout(self, width: str) -> None:
        """Refuses what does not fit together; `width` names the field that the last axis comes from."""
        for _, shape, dtype in self._shapes():
            if shape[-1] % dtype.values_per_element:
                raise ValueError(
                    f"{width}={shape[-1]}: must be even for {dtype}, which packs two values a byte"
                )
        names = [region.name for region in self.page_layout.regions]
        if self.kvcache_quant_config is not None and "kv_scales" not in names:
            raise ValueError(f"kvcache_quant_config={self.kvcache_quant_config}: {self.dtype} has no scales")

    @abstractmethod
    def _shapes(self) -> list[tuple[Sequence[int], tuple[int, ...], DType]]:
        """Layers whose KV is alike; the values of one such layer in a page along each axis; their type."""

    @property
    def page_layout(self) -> PageLayout:
        """What lies where in a page: "kv" first, then "kv_scales", then "indexer_k".

        Layers that differ have regions of their own, in the order of their first layers.
        """
        kv, scales = [], []
        for layers, (*axes, width), dtype in self._shapes():
            kv.append(Part("kv", layers, (*axes, width // dtype.values_per_element), dtype))
            if self.kvcache_quant_config is not None:
                of_kv = self.kvcache_quant_config.scales_of(kv[-1], width)
                scales += [] if of_kv is None else [of_kv]
        keys = [] if self.indexer is None else [self.indexer.keys_of(self.num_layers, self.page_size)]
        return PageLayout.of([*kv, *scales, *keys])

    @property
    def layer_to_pool(self) -> tuple[tuple[int, int], ...]:
        """For each layer the number of its "kv" region, and its index on that one's first axis."""
        places = (self.page_layout.find("kv", layer) for layer in range(self.num_layers))
        return tuple(place for place in places if place is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the KV of one token and what belongs to it take in all layers.

        The token is the encoder's in `CrossAttention`.
        """
        return sum(region.nbytes for region in self.page_layout.regions) // self.page_size


@dataclass(frozen=True, init=False)
class MHAKVCacheParams(AttentionKVCacheParams):
    """A cache of multi-head, grouped-query or multi-query attention: a key and a value for each KV head.

    Where layers differ, `dtype`, `n_kv_heads` and `head_dim` are lists of one value a layer.

    Args:
        dtype: element type of the KV; anything that `DType.parse` understands.
        n_kv_heads: KV heads in each layer (not query heads).
        head_dim: values in one head's key or value. Even for `float4_e2m1fn`, which packs two into a byte.
        num_layers: layers whose KV one page holds.
        kind: which tokens the layers read: `FullAttention`, `SlidingWindow`, `ChunkedLocal` or
            `CrossAttention`.
        kvcache_quant_config: scales of quantized KV, [layers, 2, page_size, heads, scales]. None has no room
            for any.
        indexer: keys of a sparse-attention indexer. None has none.
        allow_kv_head_replication: whether `shard` may give one head to several shards.

    The other arguments and the errors are those of `KVCacheParams`.

    >>> params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=16)
    >>> params.bytes_per_token  # key and value x 8 heads x 128 values x 2 bytes x 32 layers
    131072
    """

    n_kv_heads: PerLayer[int]
    head_dim: PerLayer[int]
    allow_kv_head_replication: bool

    def __init__(
        self,
        *,
        dtype: DTypeLike | Sequence[DTypeLike],
        n_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        num_layers: int,
        kind: AttentionKind = _FULL,
        kvcache_quant_config: KVCacheQuantizationConfig | None = None,
        indexer: IndexerKCache | None = None,
        allow_kv_head_replication: bool = False,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(
            dtype=dtype,
            num_layers=num_layers,
            kind=kind,
            kvcache_quant_config=kvcache_quant_config,
            indexer=indexer,
            **common,
        )
        keep(self, "n_kv_heads", n_kv_heads, self._per_layer(parse_count))
        keep(self, "head_dim", head_dim, self._per_layer(parse_count))
        keep(self, "allow_kv_head_replication", allow_kv_head_replication, parse_flag)
        self._check_layout("head_dim")

    def _shapes(self) -> list[tuple[Sequence[int], tuple[int, ...], DType]]:
        return [
            (layers, (2, self.page_size, heads, width), dtype)
            for layers, (dtype, heads, width) in _alike(
                self.num_layers, self.dtype, self.n_kv_heads, self.head_dim
            )
        ]

    def shard(self, tensor_parallel_degree: int) -> MHAKVCacheParams:
        """The parameters of each of so many shards, among which the heads of a layer are divided.

        Args:
            tensor_parallel_degree: shards. With more shards than heads each head lies on several, if
                `allow_kv_head_replication`.

        Raises:
            ValueError: the heads do not divide.
        """
        degree = whole_number(tensor_parallel_degree, "tensor_parallel_degree")
        heads = self.n_kv_heads
        if isinstance(heads, tuple):
            return replace(self, n_kv_heads=tuple(self._heads_of_shard(each, degree) for each in heads))
        return replace(self, n_kv_heads=self._heads_of_shard(heads, degree))

    def _heads_of_shard(self, heads: int, degree: int) -> int:
        if heads % degree == 0:
            return heads // degree
        if degree % heads == 0 and self.allow_kv_head_replication:
            return 1
        hint = (
            f"; allow_kv_head_replication=True lets {degree // heads} shards have the same one"
            if degree % heads == 0
            else ""
        )
        raise ValueError(
            f"tensor_parallel_degree={degree}: {heads} KV heads do not divide among so many{hint}"
        )


@dataclass(frozen=True, init=False)
class MLAKVCacheParams(AttentionKVCacheParams):
    """A cache of multi-head latent attention: one latent for all heads, and a key part with the position.

    A page holds one head, and no values beside it. Every shard of a tensor-parallel group holds all.

    Args:
        dtype: element type of the latents; anything that `DType.parse` understands. A list of one a layer
            where they differ.
        kv_lora_rank: values of the latent.
        qk_rope_head_dim: values of the key part with the position, behind the latent; 0 for none.
        num_layers: layers whose latents one page holds.
        num_q_heads: query heads of each layer, which `shard` divides. None: it does not ask.
        kind: which tokens the layers read: `FullAttention`, `SlidingWindow`, `ChunkedLocal` or
            `CrossAttention`.
        kvcache_quant_config: scales of quantized latents, [layers, page_size, 1, scales]. None has no room
            for any.
        indexer: keys of a sparse-attention indexer. None has none.

    The other arguments and the errors are those of `KVCacheParams`.

    >>> params = MLAKVCacheParams(dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, num_layers=61)
    >>> params.bytes_per_token  # 512 + 64 values x 2 bytes x 61 layers
    70272
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    num_q_heads: int | None

    replicated = True

    def __init__(
        self,
        *,
        dtype: DTypeLike | Sequence[DTypeLike],
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        num_layers: int,
        num_q_heads: int | None = None,
        kind: AttentionKind = _FULL,
        kvcache_quant_config: KVCacheQuantizationConfig | None = None,
        indexer: IndexerKCache | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(
            dtype=dtype,
            num_layers=num_layers,
            kind=kind,
            kvcache_quant_config=kvcache_quant_config,
            indexer=indexer,
            **common,
        )
        keep(self, "kv_lora_rank", kv_lora_rank, parse_count)
        keep(self, "qk_rope_head_dim", qk_rope_head_dim, parse_length)
        keep(self, "num_q_heads", num_q_heads, lambda heads: None if heads is None else parse_count(heads))
        self._check_layout("kv_lora_rank + qk_rope_head_dim")

    def _shapes(self) -> list[tuple[Sequence[int], tuple[int, ...], DType]]:
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return [
            (layers, (self.page_size, 1, width), dtype)
            for layers, (dtype,) in _alike(self.num_layers, self.dtype)
        ]

    def shard(self, tensor_parallel_degree: int) -> MLAKVCacheParams:
        """The parameters of each of so many shards: these, but for the query heads.

        Raises:
            ValueError: the query heads do not divide.
        """
        degree = whole_number(tensor_parallel_degree, "tensor_parallel_degree")
        if self.num_q_heads is None:
            return self
        if self.num_q_heads % degree:
            raise ValueError(
                f"tensor_parallel_degree={degree}: num_q_heads={self.num_q_heads} do not divide among so many"
            )
        return replace(self, num_q_heads=self.num_q_heads // degree)


def _alike(num_layers: int, *values: PerLayer[Any]) -> list[tuple[Sequence[int], tuple[Any, ...]]]:
    """Layers that have the same of all `values`, and what they have."""
    if not any(isinstance(value, tuple) for value in values):
        return [(range(num_layers), values)]
    layers_of: dict[tuple[Any, ...], list[int]] = {}
    columns = (value if isinstance(value, tuple) else (value,) * num_layers for value in values)
    for layer, shape in enumerate(zip(*columns, strict=True)):
        layers_of.setdefault(shape, []).append(layer)
    return [(tuple(layers), shape) for shape, layers in layers_of.items()]
