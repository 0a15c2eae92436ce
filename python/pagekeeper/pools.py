"""Device pools: the torch tensors whose pages the manager hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagekeeper.params import KVCacheParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["DevicePool", "Layout"]

Layout = Literal["NHD", "HND"]


class DevicePool:
    """The pages of one cache on one device, page first: [pages + 1, layers, 2, page_size, heads, head_dim].

    Page 0 is the null page. A page is one run of bytes. New pools are zero-filled, so that the tail of a
    page that is not written yet never holds a NaN.

    Args:
        params: geometry and dtype.
        num_pages: usable pages.
        buffers: an existing tensor of that shape, dtype and device to adopt, as a list of one.

    Raises:
        ModuleNotFoundError: torch is not installed.
        ValueError: adopted buffers that do not fit.
    """

    def __init__(
        self, params: KVCacheParams, num_pages: int, buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        dtype = params.dtype.to_torch()
        shape = (num_pages + 1, *params.page_shape)
        if buffers is None:
            import torch

            self._tensor = torch.zeros(shape, dtype=dtype, device=params.devices[0])
            return
        if len(buffers) != 1:
            raise ValueError(f"buffers: {len(buffers)} given, must be 1 (one pool on one device)")
        (tensor,) = buffers
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"buffers[0]: {list(tensor.shape)} of {tensor.dtype}, "
                f"must be contiguous {list(shape)} of {dtype} (one page more than total_num_pages)"
            )
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The whole pool: [pages + 1, layers, 2, page_size, heads, head_dim]."""
        return self._tensor

    def layer(self, layer: int, layout: Layout = "NHD") -> torch.Tensor:
        """One layer's keys and values, a view without a copy.

        Args:
            layer: 0 to the number of layers - 1.
            layout: "NHD" gives [pages + 1, 2, page_size, heads, head_dim], "HND" swaps tokens and heads.

        Raises:
            ValueError: no such layer, or an unknown layout.
        """
        layers = self._tensor.shape[1]
        if not 0 <= layer < layers:
            raise ValueError(f"layer={layer}: must be 0 to {layers - 1}")
        view = self._tensor[:, layer]
        if layout == "NHD":
            return view
        if layout == "HND":
            return view.transpose(2, 3)
        raise ValueError(f"layout={layout!r}: must be 'NHD' or 'HND'")

    def pages(self) -> torch.Tensor:
        """Every page as bytes, for transfers: uint8 [pages + 1, bytes_per_page], a view."""
        import torch

        return self._tensor.view(self._tensor.shape[0], -1).view(torch.uint8)
