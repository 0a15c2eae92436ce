"""Entries of TensorRT-LLM's block-offset tables.

An entry is a distance from the beginning of a pool, counted in blocks: one field (keys, or values) of one
layer of one page. In pools that are block first, the keys of a page's first layer are entry `page * layers *
fields`, and its values the next one; kernels add the layer. Where groups share memory, pages are farther
apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagekeeper.params import MHAKVCacheParams, whole_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagekeeper.params import KVCacheParams

__all__ = ["OffsetLayout", "write_block_offsets"]


@dataclass(frozen=True, slots=True)
class OffsetLayout:
    """How page ids become entries.

    Attributes:
        apart: entries from one page to the next, for each pool: layers that differ have pools of their own,
            as `layer_to_pool` says.
        fields: 2, keys and values, or 1 where pages hold keys alone.
    """

    apart: tuple[int, ...]
    fields: int

    @classmethod
    def of(cls, params: KVCacheParams, last_page: int, stride: int | None) -> OffsetLayout:
        """The layout of a group.

        Bit 31 of an entry is the format's mark of host memory, so entries end at 2**31 - 1.

        Args:
            params: of the group.
            last_page: the greatest page id.
            stride: bytes from page to page in memory that groups share; None in memory of its own.

        Raises:
            ValueError: a page size that is 1 or no power of two, pages of states, an entry over 2**31 - 1,
                or pages whose padding is no multiple of a layer's field.
        """
        size = params.page_size
        if size < 2 or size & (size - 1):
            raise ValueError(f"page_size={size}: TensorRT-LLM tables need a power of two above 1")
        pools = [region for region in params.page_layout.regions if region.name == "kv"]
        if not pools:
            raise ValueError("the group's pages hold states: the table is for keys and values")
        fields = 2 if isinstance(params, MHAKVCacheParams) else 1
        apart = []
        for pool in pools:
            entries = len(pool.layers) * fields
            if stride is not None:
                block = pool.nbytes // entries
                entries, rest = divmod(stride, block)
                if rest:
                    raise ValueError(
                        f"pages are {stride} bytes apart in the memory that groups share, no multiple of the "
                        f"{block} bytes of a layer's keys in a page: the table cannot say that; give "
                        "total_num_pages"
                    )
            last = last_page * entries + fields - 1
            if last >= 2**31:
                raise ValueError(
                    f"page {last_page} of {len(pool.layers)} layers: its entry {last} is over "
                    "2**31 - 1, the most that a TensorRT-LLM table can hold"
                )
            apart.append(entries)
        return cls(tuple(apart), fields)


def write_block_offsets(
    out: NDArray[np.int32],
    row: int,
    pages: NDArray[np.int32],
    params: KVCacheParams,
    stride: int | None = None,
) -> int:
    """Writes a row of a TensorRT-LLM table; see `PagedKVCacheManager.copy_block_offsets`."""
    layout = OffsetLayout.of(params, int(pages.max(initial=0)), stride)
    pools = len(layout.apart)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: got {type(out).__name__}, must be an int32 array [{pools}, rows, 2, blocks]")
    if out.dtype != np.int32 or out.ndim != 4 or out.shape[0] != pools or out.shape[2] != 2:
        raise ValueError(f"out: {out.dtype} {list(out.shape)}, must be int32 [{pools}, rows, 2, blocks]")
    row = whole_number(row, "slot", 0, out.shape[1] - 1)
    if len(pages) > out.shape[3]:
        raise ValueError(f"out: {list(out.shape)} has no room for {len(pages)} blocks")
    for pool, apart in zip(out, layout.apart, strict=True):
        entries = pages * apart + np.arange(layout.fields, dtype=np.int32)[:, None]
        pool[row] = -1
        pool[row, : layout.fields, : len(pages)] = np.where(pages > 0, entries, -1)
    return len(pages)
