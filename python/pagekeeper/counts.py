"""Snapshots of what the cache holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from pagekeeper._native import PrefixWalk

__all__ = ["BlockCount", "ByteCount", "MissReason", "PrefixReuseSummary"]

MissReason: TypeAlias = Literal[
    "never_stored", "evicted", "collision", "other_namespace", "window", "no_snapshot"
]
"""Why a block was not found; `PrefixReuseSummary` says what each means."""


@dataclass(frozen=True, slots=True)
class _Count:
    """How much of something is free."""

    free: int
    total: int

    @property
    def used(self) -> int:
        """What is not free."""
        return self.total - self.free

    @property
    def used_pct(self) -> float:
        """The used part in percent, 0 to 100; 0.0 when there is nothing."""
        return 100.0 * self.used / self.total if self.total else 0.0

    @property
    def free_pct(self) -> float:
        """The free part in percent, 0 to 100; 0.0 when there is nothing."""
        return 100.0 * self.free / self.total if self.total else 0.0


class BlockCount(_Count):
    """Pages of a device pool at one moment.

    `free` counts pages never used and pages that can be evicted: cached blocks that nobody uses are free.

    >>> count = BlockCount(free=6, total=8)
    >>> count.used, count.used_pct, count.free_pct
    (2, 25.0, 75.0)
    """

    __slots__ = ()


class ByteCount(_Count):
    """Bytes of an outer tier at one moment: tiers are sized in bytes, and their units may differ from pages.

    >>> ByteCount(free=256, total=1024).used
    768
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PrefixReuseSummary:
    """What a prompt would reuse now.

    Attributes:
        reusable_blocks_allocated: reusable blocks that a request or transfer holds: they cost no free page.
            Of several groups, in the first with full attention, or the first without.
        reusable_blocks_all: reusable blocks. The block with the prompt's last token is never reusable.
        first_new_block: hash of the first full block that is new; None when none is, or there is none. It may
            be stored, and not be of use, as `miss_reason` says.
        device_blocks: of the reusable blocks, those on the device.
        host_blocks: of the reusable blocks, those that would be loaded from host memory.
        disk_blocks: of the reusable blocks, those that would be loaded from disk.
        miss_reason: why that first full block is new, None when none is. "never_stored": nobody stored
            it, or nothing is known of it any more. "evicted": it had to make room; about as many evictions as
            the pool has pages are remembered, and none from before a reset. "collision": another block owns
            its hash. "other_namespace": it is stored under another salt or adapter (only when asked for).
            "window": it is stored, but a group lacks a block that its window or chunk reads at the end of it.
            "no_snapshot": it is stored, but a group has no state at the end of it.
        evicted_at_step: the step whose `alloc` evicted it; None when that is not known.
        allocated_by_group: of each group, in the order of the parameters: blocks that it needs to go on
            behind the reusable ones on the device, and that a request or transfer holds.
        walk: where the blocks were found on the device, for calls that take a summary. It means something to
            the cache that gave it alone, and is None in a copy that was pickled.
    """

    reusable_blocks_allocated: int
    reusable_blocks_all: int
    first_new_block: bytes | None
    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    miss_reason: MissReason | None = None
    evicted_at_step: int | None = None
    allocated_by_group: tuple[int, ...] = ()
    walk: PrefixWalk | None = field(default=None, repr=False, compare=False)
