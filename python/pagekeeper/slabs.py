"""The memory of several groups: pools of their own, or one slab that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagekeeper.params import KVCacheParams
from pagekeeper.pools import DevicePool

__all__ = ["MAX_HUGE_BYTES", "MAX_PADDING", "MAX_RATIO", "GroupMemory", "slab_pools"]

MAX_PADDING = 0.05
"""Part of a page of a shared slab that may be padding."""
MAX_HUGE_BYTES = 128 << 20
"""Bytes of the largest huge page of a shared slab."""
MAX_RATIO = 256
"""Most pages of one group in a huge page."""


@dataclass(frozen=True)
class GroupMemory:
    """How much memory the groups of a cache have.

    A shared slab is cut into huge pages. Each is used by one group at a time, and holds `pages` pages of it.

    Attributes:
        pages: usable pages of each group, or its pages in a huge page.
        huge_pages: usable huge pages of the slab that all groups share. None: each has pages of its own.
        huge_bytes: bytes of a huge page.
        strides: bytes from one page of each group to the next, padding included.
    """

    pages: tuple[int, ...]
    huge_pages: int | None = None
    huge_bytes: int = 0
    strides: tuple[int, ...] = ()

    @property
    def usable_pages(self) -> tuple[int, ...]:
        """Pages that each group can have if no other has any; those of the null huge page are not counted."""
        return self.pages if self.huge_pages is None else tuple(n * self.huge_pages for n in self.pages)

    def last_page(self, group: int) -> int:
        """The greatest page id of a group."""
        return self.usable_pages[group] + (0 if self.huge_pages is None else self.pages[group] - 1)

    def stride(self, group: int) -> int | None:
        """Bytes from one page of a group to the next in a shared slab; None without one."""
        return self.strides[group] if self.strides else None


def slab_pools(params: Sequence[KVCacheParams], memory: GroupMemory) -> tuple[DevicePool, ...]:
    """Pools that lie in one new slab of zeros. Page `n` of a group begins `n * stride` bytes into it.

    Raises:
        ImportError: torch is not installed.
    """
    params[0].page_layout.regions[0].dtype.to_torch()  # says so
    import torch

    size = ((memory.huge_pages or 0) + 1) * memory.huge_bytes
    slab = torch.zeros(size, dtype=torch.uint8, device=params[0].devices[0])
    groups = zip(params, memory.strides, strict=True)
    return tuple(DevicePool.of_slab(group, slab, stride) for group, stride in groups)
