"""Memory for tables: where the ledger writes them, and where kernels read them.

For a cache on the CPU both are the same arrays. For one on a GPU the ledger writes pinned host memory, and
copies are queued on the current stream to device tensors. Addresses never change, so that captured graphs
may hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["DeviceStaging", "HostStaging", "Table", "staging_for"]

Table: TypeAlias = Any
"""A numpy array for a cache on the CPU, a torch tensor on the cache's device otherwise."""


class HostStaging:
    """Arrays that kernels read where the ledger writes them, as read-only views."""

    def __init__(self) -> None:
        self._views: dict[int, NDArray[Any]] = {}

    def array(self, shape: int | tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """A new array of zeros for the ledger to write to."""
        array: NDArray[Any] = np.zeros(shape, dtype)
        view = self._views[id(array)] = array.view()
        view.flags.writeable = False
        return array

    def wait(self) -> None:
        """Returns when the arrays may be written again."""

    def publish(self, array: NDArray[Any], length: int) -> Table:
        """What kernels read of the first `length` rows of `array`."""
        return self._views[id(array)][:length]

    def published(self) -> None:
        """Everything of this step is published."""


class DeviceStaging(HostStaging):
    """Arrays in host memory, each with a tensor on a device that it is copied to.

    Args:
        device: where kernels read. Host memory is pinned and copies do not wait if it is a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def array(self, shape: int | tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """A new array of zeros in host memory, with its tensor on the device."""
        import torch

        kind = torch.from_numpy(np.zeros(0, dtype)).dtype
        host = torch.zeros(shape, dtype=kind, pin_memory=self._on_gpu)
        array: NDArray[Any] = host.numpy()
        self._twins[array.ctypes.data] = host, torch.zeros(shape, dtype=kind, device=self._device)
        return array

    def wait(self) -> None:
        """Returns when the last copies from these arrays have ended."""
        if self._copied is not None:
            self._copied.synchronize()

    def publish(self, array: NDArray[Any], length: int) -> Table:
        """Queues the copy of the first `length` rows; they are in order before later work of the stream."""
        host, twin = self._twins[array.ctypes.data]
        rows = twin[:length]
        rows.copy_(host[:length], non_blocking=self._on_gpu)
        return rows

    def published(self) -> None:
        """Marks the place in the stream that `wait` waits for."""
        if self._on_gpu:
            import torch

            self._copied = torch.cuda.current_stream(self._device).record_event()


def staging_for(device: str) -> HostStaging:
    """Memory for the tables of a cache on `device`."""
    if device == "cpu":
        return HostStaging()
    import torch

    return DeviceStaging(torch.device(device))
