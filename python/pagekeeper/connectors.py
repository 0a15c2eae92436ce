"""Connectors: what keeps blocks beyond the device, and how the manager talks to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from pagekeeper.counts import ByteCount
from pagekeeper.errors import KVLoadRefused
from pagekeeper.transfers import CompletedTransfer, KVConnectorTransfer

__all__ = ["BlockHashes", "BlockIDs", "BlockKey", "KVConnector", "NullConnector"]

BlockHashes: TypeAlias = Sequence[Any]
"""What blocks are, one `BlockKey` each; of several groups one such list a group, in their order."""
BlockIDs: TypeAlias = Sequence[Any]
"""Pages of the device pool, one int each; of several groups one such list a group, in their order."""


class BlockKey(NamedTuple):
    """What a block is, on every tier.

    A connector finds a block by `hash` and serves it only if `guard` is equal too: another guard under the
    same hash is another block, and so a miss.

    Attributes:
        hash: the canonical bytes of the block hash: 8, or 32 for "sha256".
        guard: 16 bytes of a second identity of the whole prefix.
    """

    hash: bytes
    guard: bytes


@runtime_checkable
class KVConnector(Protocol):
    """Outer tiers of one cache: host memory, disks, remote stores.

    The manager calls it from the thread that drives the scheduler, never with a lock held;
    `count_cached_prefix` may be called from any thread. Whatever `lookup`, `load`, `offload`, `touch`,
    `count_cached_prefix` or `metrics` raise but `KVLoadRefused` is logged and counts as a miss or as a failed
    copy: it never breaks the scheduler. The other calls have nothing to fall back on: what they raise reaches
    the caller, whose call has changed nothing but for `shutdown`. docs/connectors.md
    tells the whole story.

    `block_ids` are pages of the device pool, `block_hashes` the blocks that they hold, in the same order.
    With one group of layers both are flat lists. With several they have a list for each group, in the order
    of the groups: of different lengths, and perhaps empty, where a group does not need all blocks.
    `hint` is the request's `dkv_cache_hint`.
    """

    def lookup(self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None) -> Sequence[Any]:
        """Whether each block is here, in lists like those of `block_hashes`. Changes nothing."""
        ...

    def count_cached_prefix(
        self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]:
        """How many leading blocks are here, as (read from host memory, read from disk). Changes nothing.

        Of several groups: how many all have; one of them is read from disk if one group's part of it is.
        """
        ...

    def load(
        self,
        block_ids: BlockIDs,
        block_hashes: BlockHashes,
        replica_idx: int = 0,
        hint: object = None,
    ) -> KVConnectorTransfer:
        """Begins to copy blocks into pages, all or nothing.

        A page may be read by forwards that were launched already: a connector that copies on a stream of its
        own orders the copy after them. The pages belong to the load until the transfer is complete.

        Raises:
            KVLoadRefused: nothing was moved and nothing will be.
        """
        ...

    def offload(
        self, block_ids: BlockIDs, block_hashes: BlockHashes, replica_idx: int = 0
    ) -> KVConnectorTransfer:
        """Begins to copy pages out. They do not change until the transfer is complete."""
        ...

    def touch(self, block_hashes: BlockHashes, replica_idx: int = 0) -> None:
        """These blocks, from the first of their prefix on, count as used: they are on the device or wanted.

        Of several groups each gets the whole prefix, also blocks that it does not keep.
        """
        ...

    def wait_for_loads(self) -> None:
        """Orders loads that were begun before the forward that is launched next."""
        ...

    def wait_for_offloads(self) -> None:
        """Orders offloads that were begun after the forward that has just run."""
        ...

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of host memory, free and in all."""
        ...

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of disk, free and in all."""
        ...

    def metrics(self) -> Mapping[str, int]:
        """Counters and gauges by name."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets every block, those on their way included."""
        ...

    def shutdown(self) -> None:
        """Ends what is in flight and gives memory back. Calling it again does nothing."""
        ...


class NullConnector:
    """No outer tier: nothing is found, nothing is kept. A start for connectors that need only some calls."""

    def lookup(self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None) -> Sequence[Any]:
        """Nothing is here."""
        return [[False] * len(one) if isinstance(one, list) else False for one in block_hashes]

    def count_cached_prefix(
        self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]:
        """No block. Override it together with `lookup`: probes ask it alone, from any thread."""
        return 0, 0

    def load(
        self,
        block_ids: BlockIDs,
        block_hashes: BlockHashes,
        replica_idx: int = 0,
        hint: object = None,
    ) -> KVConnectorTransfer:
        """Declines every load."""
        raise KVLoadRefused("there is no outer tier")

    def offload(
        self, block_ids: BlockIDs, block_hashes: BlockHashes, replica_idx: int = 0
    ) -> KVConnectorTransfer:
        """Drops the blocks."""
        return CompletedTransfer()

    def touch(self, block_hashes: BlockHashes, replica_idx: int = 0) -> None:
        """Does nothing."""

    def wait_for_loads(self) -> None:
        """Does nothing."""

    def wait_for_offloads(self) -> None:
        """Does nothing."""

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """0 of 0."""
        return ByteCount(0, 0)

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """0 of 0."""
        return ByteCount(0, 0)

    def metrics(self) -> Mapping[str, int]:
        """None."""
        return {}

    def reset_prefix_cache(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Does nothing."""
