"""How much of a device's memory is left for its cache: what models are asked, and what is set aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.params import KVCacheParams, MultiKVCacheParams, whole_number
from pagekeeper.params.checks import finite_number

__all__ = [
    "DEVICE_MEMORY_UTILIZATION",
    "MemoryPlanner",
    "ModelConfig",
    "ModelConfigWithKVCache",
    "PagedMemoryPlanner",
]

DEVICE_MEMORY_UTILIZATION = 0.9
"""The part of the free memory that may be used if nobody says another: as `KVCacheConfig` has it."""


@runtime_checkable
class ModelConfig(Protocol):
    """What a planner asks of a model's configuration."""

    @property
    def devices(self) -> Sequence[object]:
        """The devices that the model runs on."""


@runtime_checkable
class ModelConfigWithKVCache(ModelConfig, Protocol):
    """What a planner asks of the configuration of a model that has a cache."""

    def get_kv_params(self) -> KVCacheParams | MultiKVCacheParams:
        """The parameters of the cache on each device."""


class MemoryPlanner:
    """How much memory a model takes beside its cache. Subclasses know more of their models.

    All sizes are bytes of all devices together.

    Args:
        config: the model's configuration.

    Raises:
        TypeError: it has no `devices`.
    """

    signal_buffer_bytes: ClassVar[int] = 0
    """Bytes of the buffers by which one device tells the others that it is ready."""

    _always_signal_buffers: ClassVar[bool] = False

    def __init__(self, config: ModelConfig) -> None:
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config: got {type(config).__name__}, must have devices, as a ModelConfig")
        self.config = config

    def estimate_weights_size(self, pipeline_config: Any) -> int:
        """Bytes of the weights: what `pipeline_config.model.weights_size()` says."""
        return int(pipeline_config.model.weights_size())

    def estimate_activation_memory(self, pipeline_config: Any, huggingface_config: Any) -> int:
        """Bytes that a forward needs for a time; 0."""
        return 0

    def infer_max_batch_size(
        self, pipeline_config: Any, devices: Sequence[object], weights_size: int
    ) -> int | None:
        """Requests at a time, if the model has an opinion; None."""
        return None

    def estimate_signal_buffer_memory(self, pipeline_config: Any, arch_config: Any = None) -> int:
        """Bytes of the signal buffers: `signal_buffer_bytes` for each device; one device alone needs none."""
        devices = len(self.config.devices)
        return self.signal_buffer_bytes * devices if devices > 1 or self._always_signal_buffers else 0


class PagedMemoryPlanner(MemoryPlanner):
    """A planner of models with a paged cache.

    Args:
        config: the model's configuration.

    Raises:
        TypeError: it has no `devices` or no `get_kv_params`.
    """

    activation_bytes: ClassVar[int] = 0
    """Bytes that are set aside for activations."""

    def __init__(self, config: ModelConfigWithKVCache) -> None:
        super().__init__(config)
        if not isinstance(config, ModelConfigWithKVCache):
            raise TypeError(
                f"config: got {type(config).__name__}, must have get_kv_params, as a ModelConfigWithKVCache"
            )
        self.kv_params = config.get_kv_params()

    @classmethod
    def with_activation_reservation(
        cls, activation_bytes: int, always_signal_buffers: bool = False
    ) -> type[Self]:
        """A planner that sets memory aside for activations, named after how much it is.

        Args:
            activation_bytes: bytes of all devices together.
            always_signal_buffers: whether one device alone has signal buffers too.

        Raises:
            ValueError: a negative number, or something else.

        >>> PagedMemoryPlanner.with_activation_reservation(15 * 2**30).__name__
        'PagedMemoryPlanner(15GiB)'
        """
        reserved = whole_number(activation_bytes, "activation_bytes", 0, 2**63 - 1)
        if not isinstance(always_signal_buffers, bool):
            raise ValueError(f"always_signal_buffers={shown(always_signal_buffers)}: must be True or False")
        name = f"{cls.__name__}({reserved / 2**30:g}GiB)"
        fields = {"activation_bytes": reserved, "_always_signal_buffers": always_signal_buffers}
        return type(name, (cls,), {**fields, "__doc__": cls.__doc__, "__module__": cls.__module__})

    def estimate_activation_memory(self, pipeline_config: Any, huggingface_config: Any) -> int:
        """Bytes that a forward needs for a time: those that are set aside."""
        return self.activation_bytes

    def available_cache_memory(
        self,
        pipeline_config: Any,
        free_memory: int | Sequence[int],
        device_memory_utilization: float = DEVICE_MEMORY_UTILIZATION,
        huggingface_config: Any = None,
    ) -> int:
        """Bytes for the pools on each device: `available_cache_memory` of `load_kv_manager`.

        They are what is free there, times `device_memory_utilization`, less the device's part of weights,
        activations and signal buffers.

        Args:
            pipeline_config: what `estimate_weights_size` takes.
            free_memory: bytes that are free on each device; of several that differ a list, of which the least
                counts: all have as many pages.
            device_memory_utilization: the part of it that may be used at all, above 0 and up to 1.
            huggingface_config: what `estimate_activation_memory` takes.

        Raises:
            CacheTooSmallError: nothing is left.
            ValueError: a number is out of range.
        """
        part = finite_number(device_memory_utilization)
        if not 0 < part <= 1:
            raise ValueError(
                f"device_memory_utilization={shown(device_memory_utilization)}: must be a number above 0 and "
                "up to 1"
            )
        amounts = free_memory if isinstance(free_memory, list | tuple) else [free_memory]
        free = min((whole_number(it, "free_memory", 0, 2**63 - 1) for it in amounts), default=0)
        devices = max(len(self.config.devices), 1)
        parts = {
            "weights": self.estimate_weights_size(pipeline_config),
            "activations": self.estimate_activation_memory(pipeline_config, huggingface_config),
            "signal buffers": self.estimate_signal_buffer_memory(pipeline_config),
        }
        used = -(-sum(parts.values()) // devices)
        left = int(free * part) - used
        if left <= 0:
            told = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
            raise CacheTooSmallError(
                f"free_memory={free}: of {int(free * part)} bytes that may be used on each of {devices} "
                f"devices nothing is left for the cache; on all together there are {told} bytes",
                needed=used + 1,
                available=int(free * part),
            )
        return left
