"""What pages hold beside keys and values, and move with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagekeeper.dtypes import DType, DTypeLike
from pagekeeper.params.checks import keep, parse_count, parse_flag
from pagekeeper.params.layout import Part

__all__ = ["IndexerKCache", "KVCacheQuantizationConfig"]

_QUANTIZED = (DType.float8_e4m3fn, DType.float8_e5m2, DType.float4_e2m1fn, DType.int8, DType.uint8)


@dataclass(frozen=True, init=False)
class KVCacheQuantizationConfig:
    """Scales of quantized keys and values: one for each run of values along the head dimension.

    Args:
        scale_dtype: type of a scale.
        quantization_granularity: values that share a scale. It divides the head dimension.

    Raises:
        ValueError: a value is not allowed.
    """

    scale_dtype: DType
    quantization_granularity: int

    def __init__(self, scale_dtype: DTypeLike = "float32", quantization_granularity: int = 128) -> None:
        keep(self, "scale_dtype", scale_dtype, DType.parse)
        keep(self, "quantization_granularity", quantization_granularity, parse_count)

    @classmethod
    def nvfp4(cls) -> KVCacheQuantizationConfig:
        """NVFP4's block scales: a float8_e4m3fn for each 16 values."""
        return cls("float8_e4m3fn", 16)

    def scales_of(self, kv: Part, width: int) -> Part | None:
        """The scales of a region of keys and values; None if they are of a type that needs none.

        Args:
            kv: the region.
            width: values on its last axis.

        Raises:
            ValueError: they do not fit each other.
        """
        if kv.dtype not in _QUANTIZED:
            return None
        if kv.dtype is DType.float4_e2m1fn and self != self.nvfp4():
            raise ValueError(f"kvcache_quant_config={self}: must be {self.nvfp4()} for {kv.dtype}")
        if width % self.quantization_granularity:
            raise ValueError(
                f"kvcache_quant_config.quantization_granularity={self.quantization_granularity}: must divide "
                f"the {width} values of a head"
            )
        scales = width // self.quantization_granularity
        return Part("kv_scales", kv.layers, (*kv.shape[:-1], scales), self.scale_dtype)


@dataclass(frozen=True, init=False)
class IndexerKCache:
    """Keys by which sparse attention chooses the tokens that it reads: one head a layer, alike on all shards.

    Quantized keys lie with their scales, which are float32, in one array of bytes.

    Args:
        head_dim: values of a key.
        dtype: type of the values, "bfloat16", "float8_e4m3fn" or "float4_e2m1fn".
        quantization_granularity: values that share a scale; divides `head_dim`. Without meaning for
            "bfloat16".
        layer_mask: for each layer of the group whether it has an indexer. None: all have.

    Raises:
        ValueError: a value is not allowed.
    """

    head_dim: int
    dtype: DType
    quantization_granularity: int
    layer_mask: tuple[bool, ...] | None

    def __init__(
        self,
        *,
        head_dim: int = 128,
        dtype: DTypeLike = "bfloat16",
        quantization_granularity: int = 128,
        layer_mask: Sequence[bool] | None = None,
    ) -> None:
        keep(self, "head_dim", head_dim, parse_count)
        keep(self, "dtype", dtype, _parse_indexer_dtype)
        keep(self, "quantization_granularity", quantization_granularity, parse_count)
        keep(self, "layer_mask", layer_mask, _parse_mask)
        if self.dtype is not DType.bfloat16 and self.head_dim % self.quantization_granularity:
            raise ValueError(
                f"quantization_granularity={self.quantization_granularity}: "
                f"must divide head_dim={self.head_dim}"
            )
        if self.head_dim % self.dtype.values_per_element:
            raise ValueError(f"head_dim={head_dim}: must be even for {self.dtype}, two values a byte")

    def keys_of(self, num_layers: int, page_size: int) -> Part:
        """The region that the keys are in.

        Raises:
            ValueError: the mask is not as long as the group has layers.
        """
        layers: Sequence[int] = range(num_layers)
        if self.layer_mask is not None:
            if len(self.layer_mask) != num_layers:
                raise ValueError(
                    f"indexer.layer_mask: {len(self.layer_mask)} given, must be num_layers={num_layers}"
                )
            layers = tuple(layer for layer, has in enumerate(self.layer_mask) if has)
        if self.dtype is DType.bfloat16:
            return Part("indexer_k", layers, (page_size, self.head_dim), self.dtype)
        scales = self.head_dim // self.quantization_granularity * DType.float32.size_in_bytes
        stored = self.head_dim // self.dtype.values_per_element + scales
        return Part("indexer_k", layers, (page_size, stored), DType.uint8)


def _parse_indexer_dtype(value: DTypeLike) -> DType:
    dtype = DType.parse(value)
    if dtype not in (DType.bfloat16, DType.float8_e4m3fn, DType.float4_e2m1fn):
        raise ValueError("must be bfloat16, float8_e4m3fn or float4_e2m1fn")
    return dtype


def _parse_mask(value: Sequence[bool] | None) -> tuple[bool, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not any(parse_flag(has) for has in value):
        raise ValueError("must be a list of True and False, a layer each, with one True at least")
    return tuple(parse_flag(has) for has in value)
