"""Stand-ins for the names of Modular MAX that a program needs beside PageKeeper's own.

With them MAX's own example of a paged cache runs with only its imports changed::

    from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, RequestID, TextContext, TokenBuffer
    from pagekeeper.compat.max import CPU, DeviceRef, DType, InferenceSession
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pagekeeper.dtypes import DType

__all__ = ["CPU", "DType", "DeviceRef", "InferenceSession"]


@dataclass(frozen=True)
class DeviceRef:
    """A device by kind and index, accepted wherever PageKeeper takes a device."""

    device_type: Literal["cpu", "gpu"]
    id: int = 0

    @classmethod
    def CPU(cls, id: int = 0) -> DeviceRef:
        """The CPU, whose memory stands for a device's."""
        return cls("cpu", id)

    @classmethod
    def GPU(cls, id: int = 0) -> DeviceRef:
        """The GPU with this index."""
        return cls("gpu", id)


@dataclass(frozen=True)
class CPU:
    """The CPU as a device of a session."""

    id: int = 0


class InferenceSession:
    """Holds the devices of a session. A cache manager takes one and needs nothing of it.

    Args:
        devices: the session's devices, such as `[CPU()]`.
    """

    def __init__(self, devices: Iterable[object]) -> None:
        self.devices = tuple(devices)
