"""Which element type a cache has, by the format that is asked for and the encoding of the weights."""

from __future__ import annotations

from pagekeeper.dtypes import DType
from pagekeeper.errors import shown

__all__ = ["cache_dtype_for_encoding"]

_OF_FORMAT = {
    "float32": DType.float32,
    "bfloat16": DType.bfloat16,
    "float8_e4m3fn": DType.float8_e4m3fn,
    "float4_e2m1fn": DType.float4_e2m1fn,
}
_OF_ENCODING = {
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
    "float8_e4m3fn": DType.bfloat16,
    "float6_e2m3fn": DType.bfloat16,
    "float4_e2m1fnx2": DType.bfloat16,
    "gptq": DType.bfloat16,
    "q4_k": DType.float32,
    "q4_0": DType.float32,
    "q6_k": DType.float32,
}


def cache_dtype_for_encoding(quantization_encoding: str | None, kv_cache_format: str | None = None) -> DType:
    """The element type of a cache. Quantized weights do not make a quantized cache: that has to be asked for.

    Args:
        quantization_encoding: how the weights are stored: float32, float16, bfloat16, float8_e4m3fn,
            float6_e2m3fn, float4_e2m1fnx2, gptq, q4_k, q4_0 or q6_k, in any case.
        kv_cache_format: overrules it: float32, bfloat16, float8_e4m3fn or float4_e2m1fn, in any case.

    Returns:
        The type; float32 if neither is given.

    Raises:
        ValueError: an unknown encoding or format; the message lists those that are known.

    >>> cache_dtype_for_encoding("gptq")
    <DType.bfloat16: 'bfloat16'>
    """
    if kv_cache_format is not None:
        return _look_up(_OF_FORMAT, "kv_cache_format", kv_cache_format)
    if quantization_encoding is not None:
        return _look_up(_OF_ENCODING, "quantization_encoding", quantization_encoding)
    return DType.float32


def _look_up(known: dict[str, DType], argument: str, given: object) -> DType:
    dtype = known.get(given.lower()) if isinstance(given, str) else None
    if dtype is None:
        raise ValueError(f"{argument}={shown(given)}: must be one of {', '.join(map(repr, known))}, or None")
    return dtype
