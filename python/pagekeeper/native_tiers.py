"""Tiers in Rust: made from a configuration, and driven by the ledger itself.

The ledger asks the tier in `alloc` and hands it what `step` publishes, without Python in between. What is
left here is what Python is told: transfers, and which requests are ready.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagekeeper._native import DiskDirectory, TieredConnector
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.transfers import COMPLETED, KVConnectorTransfer, LoadTransfer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pagekeeper._native import Ledger, Transfer
    from pagekeeper.calls import Batch
    from pagekeeper.connector_config import KVConnectorConfig
    from pagekeeper.groups import Groups
    from pagekeeper.params import EvictionPolicy
    from pagekeeper.pools import Pool

__all__ = ["NativeTiers", "tiered_connector"]

_log = logging.getLogger("pagekeeper")


def tiered_connector(
    config: KVConnectorConfig | None,
    pools: Sequence[Pool],
    policy: EvictionPolicy,
    disk: Sequence[DiskDirectory] = (),
) -> TieredConnector | None:
    """The connector of a configuration; None for `null`.

    Args:
        config: a configuration.
        pools: the device pool of each group.
        policy: which block of a tier goes next.
        disk: where the disk tier of each group is, if there is one.

    Raises:
        ValueError: what is not there yet, a size that does not fit, a NUMA node that is nowhere, or no pool.
    """
    if config is None or config.type == "null":
        return None
    where = "kv_connector_config"
    if config.type != "rust_tiered":
        raise ValueError(
            f"{where}.type={config.type.value!r}: is not there yet; must be 'null' or 'rust_tiered'"
        )
    if not pools:
        raise ValueError(
            f"{where}.type='rust_tiered': needs the pool that it copies from; "
            "leave out allocate_pools=False, or give buffers"
        )
    return TieredConnector(
        pages=[pool.byte_arrays() for pool in pools],
        host_bytes=_bytes(config.host_offload_max_gb),
        policy=policy.value,
        lanes=config.num_copy_lanes,
        pin=config.host_pin_memory,
        numa_node=config.host_numa_node,
        disk=disk or None,
        disk_bytes=_bytes(config.disk_offload_max_gb),
        disk_workers=config.num_disk_workers,
        fsync=config.fsync,
    )


def _bytes(gb: float | None) -> int | None:
    return None if gb is None else int(min(gb * 2**30, 2**62))


class NativeTiers(OuterTiers):
    """What the manager does with a tier that its ledger asks itself.

    Args:
        core: the ledger.
        connector: its tier.
        groups: the groups of layers of the cache.
        page_size: tokens a block.
        most_tokens: most tokens that one request may have.
    """

    def __init__(
        self, core: Ledger, connector: TieredConnector, groups: Groups, page_size: int, most_tokens: int
    ) -> None:
        super().__init__(core, connector, groups, page_size, most_tokens)
        self._native = connector
        self._ended: dict[int, str] = {}
        """How copies ended that the ledger has not been told of."""
        self._warn()

    def _warn(self) -> None:
        """Logs what the tier's threads have to say."""
        for warning in self._native.take_warnings():
            _log.warning("%s", warning)

    def alloc(
        self, batch: Batch, num_tokens: int | ArrayLike | None, *, plan: bool = True
    ) -> list[KVConnectorTransfer]:
        """`PagedKVCacheManager.alloc` of one request or several.

        Without `plan` it only begins loads.
        """
        return self._transfers_of(batch, self._core.alloc_from_tier(batch, num_tokens, not plan))

    def suspend(self, batch: Batch) -> list[KVConnectorTransfer]:
        """`PagedKVCacheManager.suspend` of one request or several."""
        return self._transfers_of(batch, self._core.suspend(batch))

    def resume(self, batch: Batch) -> list[KVConnectorTransfer]:
        """`PagedKVCacheManager.resume` of one request or several."""
        return self._transfers_of(batch, self._core.resume(batch))

    def _transfers_of(
        self, batch: Batch, given: tuple[int, list[tuple[int, int, Transfer]]]
    ) -> list[KVConnectorTransfer]:
        """A transfer for each request, which waits for it if it is a copy that began."""
        count, begun = given
        transfers: list[KVConnectorTransfer] = [COMPLETED] * count
        if begun:
            place = {slot: position for position, slot in enumerate(self._core.slots(batch))}
            for slot, copy, transfer in begun:
                self._wait_for(copy, slot)
                transfers[place[slot]] = LoadTransfer(copy, transfer.block_ids, transfer)
        return transfers

    def flush(self, timeout: float) -> bool:
        """`PagedKVCacheManager.flush`."""
        return self._native.flush(timeout)

    def offload(self) -> None:
        """Does nothing: the ledger has handed over what it published."""

    def ends(self, copies: Iterable[int] | None) -> list[tuple[int, str]]:
        """How each of these copies ended, as the ledger is told; None: all that have ended here.

        Raises:
            ValueError: a copy is still in flight here.
        """
        self._warn()
        self._ended.update(self._core.take_ended())
        if copies is None:
            loads_first = sorted(self._ended.items(), key=lambda end: end[0] not in self._loads)
            return [*super().ends(None), *loads_first]
        copies = list(copies)
        for copy in copies:
            if self._core.is_copying_to_tier(copy):
                raise ValueError(f"completions: transfer {copy} is still in flight")
        rest = dict(super().ends(copy for copy in copies if copy not in self._ended))
        return [(copy, self._ended.get(copy) or rest[copy]) for copy in copies]

    def settle(self, ends: Iterable[tuple[int, str]], slots: Iterable[int]) -> None:
        """The ledger was told of `ends`; the requests under `slots` waited for them."""
        ends = list(ends)
        super().settle(ends, slots)
        for copy, _ in ends:
            self._ended.pop(copy, None)

    def shutdown(self) -> None:
        """As `OuterTiers.shutdown`, once everything is told."""
        self._warn()
        super().shutdown()
