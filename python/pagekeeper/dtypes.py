"""The element types and devices of a cache, understood from PageKeeper's, torch's and numpy's names.

Torch is neither imported nor needed here, except by `DType.to_torch`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pagekeeper.errors import shown

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["DType", "DTypeLike", "DeviceLike", "parse_device"]


class DType(StrEnum):
    """The element type of a cache. A member equals its name as a string: `DType.float32 == "float32"`.

    `float4_e2m1fn` is stored packed, two values in each one-byte element.
    """

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"
    float4_e2m1fn = "float4_e2m1fn"
    uint8 = "uint8"
    int8 = "int8"

    @classmethod
    def parse(cls, value: DTypeLike) -> DType:
        """The `DType` that `value` names.

        Args:
            value: a `DType`, a name ("bfloat16", also "torch.bfloat16"), a torch dtype, or a numpy dtype or
                scalar type.

        Raises:
            TypeError: `value` is none of these.
            ValueError: it names a type that no cache can have; the message lists those that one can.

        >>> DType.parse("torch.bfloat16")
        <DType.bfloat16: 'bfloat16'>
        """
        name = _dtype_name(value)
        try:
            return cls(_SPELLINGS.get(name, name))
        except ValueError:
            raise ValueError(f"dtype {shown(name)} is not one of {', '.join(cls)}") from None

    @property
    def size_in_bytes(self) -> int:
        """Bytes of one stored element, which holds `values_per_element` values."""
        return _SIZE_IN_BYTES[self]

    @property
    def values_per_element(self) -> int:
        """Values packed into one stored element: 2 for `float4_e2m1fn`, else 1."""
        return 2 if self is DType.float4_e2m1fn else 1

    def to_torch(self) -> torch.dtype:
        """The torch dtype of one stored element.

        Raises:
            ImportError: torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise ImportError(f"torch is needed for {self!r}: pip install 'pagekeeper[torch]'") from error
        name = "float4_e2m1fn_x2" if self is DType.float4_e2m1fn else self.value
        dtype: torch.dtype = getattr(torch, name)
        return dtype


class _DeviceReference(Protocol):
    """MAX's form of a device: `DeviceRef.CPU()`, here or in `pagekeeper.compat.max`."""

    @property
    def device_type(self) -> str: ...
    @property
    def id(self) -> int: ...


DTypeLike: TypeAlias = "DType | str | torch.dtype | np.dtype[np.generic] | type[np.generic]"
"""What `DType.parse` understands."""

DeviceLike: TypeAlias = "str | torch.device | _DeviceReference"
"""What `parse_device` understands."""


def parse_device(value: DeviceLike) -> str:
    """The device that `value` names, as "cpu", "cuda:<index>" or "meta", where tensors have no memory.

    Without an index "cuda" is "cuda:0". ROCm devices go by the name that torch gives them, "cuda"; MAX's name
    "gpu" is the same.

    Args:
        value: a name, a `torch.device`, or a `DeviceRef`.

    Raises:
        TypeError: `value` is none of these.
        ValueError: it names no such device.

    >>> parse_device("cuda")
    'cuda:0'
    """
    if isinstance(value, str):
        name = value
    elif _is_from_torch(value, "device"):
        name = str(value)
    elif hasattr(value, "device_type") and hasattr(value, "id"):
        kind = getattr(value.device_type, "value", value.device_type)  # MAX has an enum here
        name = f"{kind}:{value.id}"
    else:
        raise TypeError(f"a device is a name, a torch.device or a DeviceRef, not {shown(value)}")
    if name in ("cpu", "cpu:0"):
        return "cpu"
    if name == "meta":
        return name
    if match := _GPU.fullmatch(name):
        return f"cuda:{match['index'] or 0}"
    raise ValueError(f"device {shown(name)} is not 'cpu', 'cuda', 'cuda:<index>' or 'meta'")


def _dtype_name(value: object) -> str:
    if isinstance(value, str):
        return value.removeprefix("torch.")
    if _is_from_torch(value, "dtype"):
        return str(value).removeprefix("torch.")
    if isinstance(value, type) and value.__module__ == "numpy":
        return value.__name__
    name = getattr(value, "name", None)
    if isinstance(name, str) and any(base.__module__ == "numpy" for base in type(value).__mro__):
        return name
    raise TypeError(f"a dtype is a DType, its name, a torch dtype or a numpy dtype, not {shown(value)}")


def _is_from_torch(value: object, kind: str) -> bool:
    """Tells by name, since torch may not be there."""
    return type(value).__module__ == "torch" and type(value).__name__ == kind


_GPU = re.compile(r"(cuda|gpu)(:(?P<index>0|[1-9][0-9]*))?")

_SPELLINGS = {"float4_e2m1fn_x2": "float4_e2m1fn"}  # torch's name says that two values are packed

_SIZE_IN_BYTES = {
    DType.float64: 8,
    DType.float32: 4,
    DType.float16: 2,
    DType.bfloat16: 2,
    DType.float8_e4m3fn: 1,
    DType.float8_e5m2: 1,
    DType.float4_e2m1fn: 1,
    DType.uint8: 1,
    DType.int8: 1,
}
