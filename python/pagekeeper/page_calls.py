"""The manager's calls about pages: which a request has, where tokens lie in them, and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagekeeper._native import Ledger
from pagekeeper.calls import Batch, Request, text
from pagekeeper.groups import Groups
from pagekeeper.offsets import write_block_offsets
from pagekeeper.pools import Layout, Pool, PoolPointers
from pagekeeper.slabs import GroupMemory

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import ArrayLike, NDArray

__all__ = ["PageCalls"]


class PageCalls:
    """The part of `PagedKVCacheManager` that is about pages beside `runtime_inputs`."""

    _groups: Groups
    _memory: GroupMemory
    _core: Ledger
    _pools: tuple[Pool, ...]

    def get_cache_indices(self, ctx: Request, group: str | None = None) -> list[list[int]]:
        """The page of each block of one request, as [beam][block]; there is one beam.

        A block that the group does not keep, because no token to come reads it, has page 0.

        Args:
            ctx: the request.
            group: the group of layers, where there are several.

        Raises:
            ValueError: the request is not claimed, or there is no such group.
        """
        return [self._core.pages_of(ctx, self._groups.index(group)).tolist()]

    def get_batch_cache_indices(self, batch: Batch, group: str | None = None) -> list[list[list[int]]]:
        """The page of each block, as [request][beam][block]; as `get_cache_indices`.

        Raises:
            ValueError: a request is not claimed, or there is no such group.
        """
        return [[pages.tolist()] for pages in self._core.pages(batch, self._groups.index(group))]

    def slot_mapping(self, ctx: Request, positions: ArrayLike, group: str | None = None) -> NDArray[np.int64]:
        """Where the KV of a request's tokens goes: page * page_size + offset.

        Args:
            ctx: the request.
            positions: token positions from 0, whole numbers, [positions].
            group: the group of layers, where there are several.

        Returns:
            int64 [positions].

        Raises:
            ValueError: a position that the request has no page for, or none any more; a request that is not
                claimed; there is no such group.
        """
        return self._core.slot_mapping(ctx, positions, self._groups.index(group))

    def copy_block_offsets(
        self, out: NDArray[np.int32], slot: int, ctx: Request, group: str | None = None
    ) -> int:
        """Writes a request's row of a TensorRT-LLM block-offset table.

        The entry of a page is `page * layers * 2 + field` (0 keys, 1 values), as in block-first pools; the
        kernels add the layer. Pages that hold no values (`MLAKVCacheParams`) have one field, `page * layers`.
        Where groups share memory, pages are as far apart as it has them, padding included.
        Cells without a page are all ones.

        Args:
            out: int32 [pools, rows, 2 fields, blocks]. Layers that differ are in pools of their own, as
                `layer_to_pool` of the parameters says, with `layers` of their own; else there is one.
            slot: the row to write, 0 to rows - 1.
            ctx: the request.
            group: the group of layers, where there are several.

        Returns:
            The number of blocks.

        Raises:
            ValueError: a page size that is 1 or no power of two, a table that does not fit or is too
                small, an entry over 2**31 - 1, or pages whose padding is no multiple of a layer's field.
        """
        index = self._groups.index(group)
        pages, stride = self._core.pages_of(ctx, index), self._memory.stride(index)
        return write_block_offsets(out, slot, pages, self._groups.params[index], stride)

    def get_buffers(
        self, layer: int, layout: Layout = "NHD", name: str = "kv", group: str | None = None
    ) -> torch.Tensor:
        """One layer's keys and values: a view [pages + 1, 2, page_size, heads, head_dim] of the pool.

        `MLAKVCacheParams` have no second axis, and one head. Page 0 is the null page. With layout "HND"
        tokens and heads change places; nothing is copied.

        Args:
            layer: 0 to layers - 1.
            layout: "NHD" or "HND".
            name: the region of the page: "kv", or a companion, "kv_scales" or "indexer_k".
            group: the group of layers, where there are several.

        Raises:
            TypeError: a name that is no str.
            ValueError: no such layer, layout or region, or there is no pool.
        """
        text(name, "name")
        return self._require_pool(group).layer(layer, layout, name)

    def pages_view(self, group: str | None = None) -> torch.Tensor:
        """Every page as bytes: uint8 [pages + 1, bytes_per_page], a view of the pool.

        Args:
            group: the group of layers, where there are several.

        Raises:
            ValueError: there is no pool, or its pages have companions, which lie elsewhere.
        """
        return self._require_pool(group).pages()

    def pool_pointers(self, group: str | None = None) -> tuple[PoolPointers, ...]:
        """Where the pools begin in memory, for kernels that take pointers: one entry a pool.

        Layers that differ are in pools of their own, as `layer_to_pool` of the parameters says, (pool, index
        in the pool) of each layer; else there is one. `sleep` and `shutdown` end what they point to.

        Args:
            group: the group of layers, where there are several.

        Raises:
            ValueError: there is no such group, no pool, or one of plain memory, which is the caller's; pages
                of states.
        """
        return self._require_pool(group).pointers()

    def _require_pool(self, group: str | None) -> Pool:
        index = self._groups.index(group)
        if not self._pools:
            why = "asleep" if self._core.is_asleep else "made with allocate_pools=False, or shut down"
            raise ValueError(f"there is no pool: the manager is {why}")
        return self._pools[index]
