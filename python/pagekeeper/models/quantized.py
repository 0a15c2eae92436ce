"""Which element type a checkpoint asks its cache to have, where it was quantized with its KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagekeeper.dtypes import DType
from pagekeeper.errors import shown
from pagekeeper.models.source import Source

__all__ = ["model_dtype", "quantized_kv_dtype"]

_OF_SCHEME: dict[tuple[str, object], DType] = {
    ("float", 8): DType.float8_e4m3fn,
    ("float", 4): DType.float4_e2m1fn,
    ("int", 8): DType.int8,
}
"""`kv_cache_scheme` of compressed-tensors and ModelOpt: type and bits."""

_OF_NAME = {
    "fp8": DType.float8_e4m3fn,
    "fp8_e4m3": DType.float8_e4m3fn,
    "fp8_e5m2": DType.float8_e5m2,
    "nvfp4": DType.float4_e2m1fn,
    "int8": DType.int8,
}
"""`kv_cache_quant_algo` of ModelOpt, and the types in Quark's `kv_cache_quant_config`, in small letters."""


def model_dtype(source: Source) -> tuple[DType, list[str]]:
    """The type that the model computes in, and notes on it: bfloat16 where the configuration names none."""
    given = source.of_text_or_whole("dtype", "torch_dtype")
    if given is None or given == "auto":
        return DType.bfloat16, ["the config names no dtype: bfloat16 is taken"]
    try:
        return DType.parse(given), []
    except (TypeError, ValueError) as error:
        raise ValueError(f"dtype={shown(given)}: {error}") from None


def quantized_kv_dtype(source: Source) -> tuple[DType | None, list[str]]:
    """The type that the checkpoint's cache has, None if that is the model's; and notes on it.

    Quantized weights do not make a quantized cache: the configuration has to say it of the KV.
    """
    for settings in _settings(source):
        scheme = settings.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            bits = scheme.get("num_bits")
            dtype = _OF_SCHEME.get((str(scheme.get("type")), bits if isinstance(bits, int) else None))
            return dtype, _notes("kv_cache_scheme", scheme, dtype)
        for key in ("kv_cache_quant_algo", "kv_cache_quant_config", "kv_cache_scheme"):
            if settings.get(key):
                dtype = _OF_NAME.get(_name_in(settings[key]))
                return dtype, _notes(key, settings[key], dtype)
    return None, []


def _settings(source: Source) -> Iterator[Mapping[str, Any]]:
    """Where it may be said: in the text model's or the whole model's configuration, or in the file beside."""
    for fields in (source.text, source.whole, source.sidecar):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(fields.get(key), Mapping):
                yield fields[key]


def _name_in(setting: object) -> str:
    """The one type that a setting names, in small letters; "" if there are several or none."""
    if isinstance(setting, Mapping):
        names = {
            _name_in(value) for key, value in setting.items() if isinstance(value, Mapping) or key == "dtype"
        }
        names.discard("")
        return names.pop() if len(names) == 1 else ""
    return setting.lower() if isinstance(setting, str) else ""


def _notes(key: str, setting: object, dtype: DType | None) -> list[str]:
    if dtype is None:
        return [f"{key}={shown(setting)} is not understood: the cache is taken to have the model's dtype"]
    strategy = setting.get("strategy") if isinstance(setting, Mapping) else None
    if strategy in ("token", "group", "block"):
        return [f"{key}: scales by {strategy} are not counted; give them as kvcache_quant_config"]
    return []
