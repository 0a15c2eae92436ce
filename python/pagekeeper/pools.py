"""Device pools: how many pages a cache has, and the memory that holds them.

Torch is needed for tensors only.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np

from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.params import KVCacheParams, PageRegion, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

__all__ = [
    "DevicePool",
    "Layout",
    "PlainPool",
    "Pool",
    "PoolPointers",
    "check_apart",
    "pool_for",
    "usable_pages",
]

Layout = Literal["NHD", "HND"]


class PoolPointers(NamedTuple):
    """Addresses of null pages, with which pools begin; of a CUDA device on the device."""

    data: int
    """Of keys and values."""
    scales: int
    """Of their scales; 0 where there are none."""
    indexer_k: int
    """Of an indexer's keys; 0 where there are none."""


class DevicePool:
    """The pages of one cache on one device: a tensor a region of the page, [pages + 1, layers, ...].

    Page 0 is the null page. A page is one run of bytes in each tensor. New pools are zero-filled, so that the
    tail of a page that is not written yet never holds a NaN.

    Args:
        params: geometry and dtype.
        num_pages: usable pages.
        buffers: existing tensors of those shapes, dtypes and device to adopt, in the order of
            `params.page_layout.regions`; of most caches it is one.

    Raises:
        ImportError: torch is not installed.
        TypeError: an adopted buffer is no tensor.
        ValueError: adopted buffers that do not fit, or have bytes in common.
    """

    def __init__(
        self, params: KVCacheParams, num_pages: int, buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        self._layout, self._num_layers = params.page_layout, params.num_layers
        regions, device = self._layout.regions, params.devices[0]
        if buffers is None:
            self._tensors = [_zeros(region, num_pages, device) for region in regions]
            return
        if not isinstance(buffers, list | tuple):
            raise TypeError(f"buffers: got {type(buffers).__name__}, must be a list of one tensor")
        if len(buffers) != len(regions):
            names = ", ".join(region.name for region in regions)
            raise ValueError(f"buffers: {len(buffers)} given, must be {len(regions)} ({names})")
        for number, (given, region) in enumerate(zip(buffers, regions, strict=True)):
            _check_adopted(given, region, num_pages, device, number)
        _check_disjoint([([tensor], f"buffers[{number}]") for number, tensor in enumerate(buffers)])
        self._tensors = list(buffers)

    @classmethod
    def of_slab(cls, params: KVCacheParams, slab: torch.Tensor, page_stride: int) -> DevicePool:
        """The pages of one of the groups that share a slab.

        Args:
            params: geometry and dtype of the group.
            slab: uint8 [bytes], all of it, from the null page on.
            page_stride: bytes from one page to the next.
        """
        pool = cls.__new__(cls)
        pool._layout, pool._num_layers = params.page_layout, params.num_layers
        pages = slab.view(-1, page_stride)
        pool._tensors = [
            pages[:, region.offset : region.offset + region.nbytes]
            .view(region.dtype.to_torch())
            .unflatten(1, region.shape)
            for region in pool._layout.regions
        ]
        return pool

    def layer(self, layer: int, layout: Layout = "NHD", name: str = "kv") -> torch.Tensor:
        """One layer's part of a region, a view without a copy.

        Args:
            layer: 0 to the number of layers - 1.
            layout: "NHD" gives [pages + 1, 2, page_size, heads, head_dim], without the second axis where
                pages hold no values. "HND" swaps tokens and heads.
            name: the region.

        Raises:
            ValueError: no such layer or region, or a layout that is unknown or is none of this region.
        """
        layer = whole_number(layer, "layer", 0, self._num_layers - 1)
        place = self._layout.find(name, layer)
        if place is None:
            names = dict.fromkeys(region.name for region in self._layout.regions if layer in region.layers)
            raise ValueError(f"name={shown(name)}: layer {layer} has {', '.join(map(repr, names))}")
        region, index = place
        layouts = get_args(Layout) if name in ("kv", "kv_scales") else ("NHD",)
        if layout not in layouts:
            allowed = " or ".join(map(repr, layouts))
            raise ValueError(f"layout={shown(layout)}: must be {allowed} of name={name!r}")
        view = self._tensors[region][:, index]
        return view if layout == "NHD" else view.transpose(-3, -2)

    def copy_pages(self, copies: NDArray[np.int32]) -> None:
        """Copies whole pages one after the other, queued on the current stream of the pool's device.

        It takes no memory: the ledger has given the copies away, and none may be lost for want of it.

        Args:
            copies: int32 [copies, 2], source and destination.
        """
        for source, destination in copies.tolist():
            for tensor in self._tensors:
                tensor[destination].copy_(tensor[source])

    def fill_pages(self, pages: NDArray[np.int32]) -> None:
        """Zeroes whole pages, queued on the current stream of the pool's device.

        Args:
            pages: their ids, int32 [pages].
        """
        for page in pages.tolist():
            for tensor in self._tensors:
                tensor[page].zero_()

    def pointers(self) -> tuple[PoolPointers, ...]:
        """Addresses of the "kv" regions and their companions.

        Raises:
            ValueError: pages of states.
        """
        regions = self._layout.regions
        pools = [region for region in regions if region.name == "kv"]
        if not pools:
            raise ValueError("the group's pages hold states: there are pointers to keys and values alone")
        return tuple(
            PoolPointers(*(self._pointer(name, pool) for name in ("kv", "kv_scales", "indexer_k")))
            for pool in pools
        )

    def _pointer(self, name: str, pool: PageRegion) -> int:
        """Where the region of a kind begins that has layers of a pool; 0 if there is none."""
        for region, tensor in zip(self._layout.regions, self._tensors, strict=True):
            if region.name == name and not set(region.layers).isdisjoint(pool.layers):
                return tensor.data_ptr()
        return 0

    def pages(self) -> torch.Tensor:
        """Every page as bytes, for transfers: uint8 [pages + 1, bytes_per_page], a view.

        Raises:
            ValueError: the page has several regions, whose bytes are not one run.
        """
        if len(self._tensors) > 1:
            raise ValueError(f"a page has its bytes in {len(self._tensors)} tensors, no view has them all")
        return _bytes(self._tensors[0])

    @property
    def memory(self) -> Sequence[Memory]:
        """Where the pages are."""
        return self._tensors

    def byte_arrays(self) -> list[NDArray[np.uint8]]:
        """Every page as bytes, for copies in host memory: uint8 [pages + 1, bytes of the region] each, views.

        Raises:
            ValueError: the pool is not in the processor's memory.
        """
        device = self._tensors[0].device
        if device.type != "cpu":
            raise ValueError(f"the pool is on {device}: only pools on the CPU have host tiers for now")
        return [_bytes(tensor).numpy() for tensor in self._tensors]


class PlainPool:
    """The pages of one cache in plain memory of the caller's, without torch.

    A page is its bytes in all arrays. They may lie anywhere: of a pool that is layer first,
    [layers, pages + 1, ...], `np.moveaxis(pool, 1, 0)` is a view whose first axis is the page.

    Args:
        params: geometry and dtype.
        num_pages: usable pages.
        memory: writable uint8 arrays [pages + 1, ...] of any strides, `bytes_per_page` bytes a page in all.
            Page 0 is the null page.

    Raises:
        TypeError: something else than an array.
        ValueError: memory that does not fit or is given twice, or a cache that is not on the CPU.
    """

    def __init__(
        self, params: KVCacheParams, num_pages: int, memory: Sequence[torch.Tensor | NDArray[np.uint8]]
    ) -> None:
        if params.devices[0] != "cpu":
            raise ValueError(f"buffers[0]: a numpy array is on the CPU, the cache on {params.devices[0]}")
        self._memory: list[NDArray[np.uint8]] = []
        for number, array in enumerate(memory):
            if not isinstance(array, np.ndarray):
                kind = type(array).__name__
                raise TypeError(f"buffers[{number}]: got {kind}, must be a numpy array like buffers[0]")
            if array.shape[:1] != (num_pages + 1,) or array.dtype != np.uint8 or not array.flags.writeable:
                raise ValueError(
                    f"buffers[{number}]: {list(array.shape)} of {array.dtype}, "
                    f"{'writable' if array.flags.writeable else 'read-only'}; must be [{num_pages + 1}, ...] "
                    "of uint8, writable (the first axis is the page, one more than total_num_pages)"
                )
            self._memory.append(array)
        given = sum(array.nbytes for array in self._memory) // (num_pages + 1)
        if given != params.bytes_per_page:
            raise ValueError(f"buffers: {given} bytes a page, must be {params.bytes_per_page} in all arrays")
        _check_disjoint([([array], f"buffers[{number}]") for number, array in enumerate(self._memory)])

    def layer(self, layer: int, layout: Layout = "NHD", name: str = "kv") -> torch.Tensor:
        """Raises `ValueError`: there are no tensors."""
        raise ValueError("the pool is plain memory: it has no tensors")

    def pointers(self) -> tuple[PoolPointers, ...]:
        """Raises `ValueError`: the memory is the caller's."""
        raise ValueError("the pool is plain memory: its pointers are the caller's")

    def copy_pages(self, copies: NDArray[np.int32]) -> None:
        """Copies whole pages one after the other.

        Args:
            copies: int32 [copies, 2], source and destination.
        """
        for source, destination in copies.tolist():
            for memory in self._memory:
                memory[destination] = memory[source]

    def fill_pages(self, pages: NDArray[np.int32]) -> None:
        """Zeroes whole pages.

        Args:
            pages: their ids, int32 [pages].
        """
        for memory in self._memory:
            memory[pages] = 0

    def pages(self) -> torch.Tensor:
        """Raises `ValueError`: there are no tensors."""
        raise ValueError("the pool is plain memory: it has no tensors")

    @property
    def memory(self) -> Sequence[Memory]:
        """Where the pages are."""
        return self._memory

    def byte_arrays(self) -> list[NDArray[np.uint8]]:
        """Every page as bytes, for copies in host memory: uint8 [pages + 1, ...] each."""
        return self._memory


def _zeros(region: PageRegion, num_pages: int, device: str) -> torch.Tensor:
    dtype = region.dtype.to_torch()
    import torch

    return torch.zeros((num_pages + 1, *region.shape), dtype=dtype, device=device)


def _check_adopted(given: object, region: PageRegion, num_pages: int, device: str, number: int) -> None:
    dtype = region.dtype.to_torch()
    import torch

    if not isinstance(given, torch.Tensor):
        raise TypeError(f"buffers[{number}]: got {type(given).__name__}, must be a torch.Tensor")
    shape, there = (num_pages + 1, *region.shape), torch.device(device)
    fits = (
        tuple(given.shape) == shape
        and given.dtype == dtype
        and given.is_contiguous()
        and (given.device.type, given.device.index or 0) == (there.type, there.index or 0)
    )
    if not fits:
        kind = "contiguous" if given.is_contiguous() else "not contiguous"
        raise ValueError(
            f"buffers[{number}]: {list(given.shape)} of {given.dtype} on {given.device}, {kind}; must be "
            f"{list(shape)} of {dtype} on {device}, contiguous (one page more than total_num_pages)"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


Pool: TypeAlias = DevicePool | PlainPool
Memory: TypeAlias = "torch.Tensor | NDArray[np.uint8]"


def check_apart(pools: Sequence[Pool], names: Sequence[str]) -> None:
    """Checks that pools of adopted memory are different memory.

    Args:
        pools: their memory is contiguous where it is tensors.
        names: what the message calls each.

    Raises:
        ValueError: two have bytes in common.
    """
    _check_disjoint([(pool.memory, name) for pool, name in zip(pools, names, strict=True)])


def _check_disjoint(named: Sequence[tuple[Sequence[Memory], str]]) -> None:
    for (one, first), (other, second) in combinations(named, 2):
        if any(_overlap(a, b) for a, b in product(one, other)):
            raise ValueError(f"{first}, {second}: have bytes in common")


def _overlap(one: Memory, other: Memory) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        first, second = (it if isinstance(it, np.ndarray) else _bytes(it).numpy() for it in (one, other))
        return np.shares_memory(first, second)
    if one.device != other.device:
        return False
    return max(one.data_ptr(), other.data_ptr()) < min(it.data_ptr() + it.nbytes for it in (one, other))


def pool_for(
    params: KVCacheParams, num_pages: int, buffers: Sequence[torch.Tensor | NDArray[np.uint8]] | None
) -> Pool:
    """A new pool, or one that adopts `buffers`: a list of tensors, or of numpy arrays.

    Raises:
        ImportError: torch is needed and not installed.
        TypeError: what is given is neither, or both.
        ValueError: buffers that do not fit.
    """
    if isinstance(buffers, list | tuple) and buffers and isinstance(buffers[0], np.ndarray):
        return PlainPool(params, num_pages, buffers)
    return DevicePool(params, num_pages, cast("Sequence[torch.Tensor] | None", buffers))


def usable_pages(params: KVCacheParams, total_num_pages: int | None, available_bytes: int | None) -> int:
    """Pages that a pool can hand out: as many as asked for, or as fit beside the null page.

    Raises:
        CacheTooSmallError: not one page fits.
        ValueError: neither or both are given, one is out of range, or more pages fit than have ids.
    """
    if (total_num_pages is None) == (available_bytes is None):
        raise ValueError("give total_num_pages or available_bytes, one of them")
    if available_bytes is None:
        return whole_number(total_num_pages, "total_num_pages")
    available_bytes = whole_number(available_bytes, "available_bytes", 0, 2**63 - 1)
    pages = available_bytes // params.bytes_per_page - 1
    told = (
        f"available_bytes={available_bytes}: makes {max(pages, 0)} pages of {params.bytes_per_page} bytes "
        "beside the null page, must make 1 to 2**31 - 1"
    )
    if pages >= 2**31:
        raise ValueError(told)
    if pages < 1:
        raise CacheTooSmallError(told, needed=2 * params.bytes_per_page, available=available_bytes)
    return pages
