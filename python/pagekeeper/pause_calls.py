"""The manager's calls that set things aside: requests in host memory, and the whole cache without a pool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, overload

from pagekeeper._native import Ledger, TieredConnector
from pagekeeper.calls import Batch, Request, Requests, is_one
from pagekeeper.connectors import KVConnector
from pagekeeper.errors import shown
from pagekeeper.groups import Buffers, Groups
from pagekeeper.native_tiers import NativeTiers
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.pools import Pool
from pagekeeper.slabs import GroupMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagekeeper.transfers import KVConnectorTransfer

__all__ = ["PauseCalls"]


class PauseCalls:
    """The part of `PagedKVCacheManager` that is about what rests."""

    _groups: Groups
    _memory: GroupMemory
    _core: Ledger
    _connector: KVConnector | None
    _tiers: OuterTiers | None
    _pools: tuple[Pool, ...]
    _pool_is_adopted: bool
    """Whether the pool is memory that was given."""
    _has_pool: bool
    """Whether there is a pool while the cache is awake."""

    @overload
    def suspend(self, batch: Request) -> KVConnectorTransfer: ...

    @overload
    def suspend(self, batch: Requests) -> list[KVConnectorTransfer]: ...

    def suspend(self, batch: Batch) -> KVConnectorTransfer | list[KVConnectorTransfer]:
        """Takes all pages from requests and keeps their KV in host memory, for all of `batch` or for none.

        A suspended request stays claimed. Its KV lies under no key: nothing evicts, finds or announces it,
        and `reset_prefix_cache` leaves it alone. What the request shared stays cached like other blocks.
        Its pages are free once the copy has been settled by `poll_transfers`; then `resume` brings it back.
        Until then tokens may be appended to it, and it may be released or preempted, nothing else.

        If the copy fails or is cancelled the KV is lost: `poll_transfers` names the request, which then
        computes all its tokens again, as after `preempt`.

        Args:
            batch: the requests, with results of all forwards delivered, and with tokens that have KV.

        Returns:
            A transfer of the copy, with its `id`: one for a context or a slot, one for each request of a
            list or an array.

        Raises:
            InsufficientBlocksError: no room in host memory now; names the first request that did not fit, and
                counts units there, each as large as a page, instead of pages.
            ValueError: unknown or doubled requests, requests that have no KV, wait, have a forward out or are
                suspended; there is no tier of the type 'rust_tiered', or it was shut down.
        """
        transfers = self._native_tiers("suspend").suspend(batch)
        return transfers[0] if is_one(batch) else transfers

    @overload
    def resume(self, batch: Request) -> KVConnectorTransfer: ...

    @overload
    def resume(self, batch: Requests) -> list[KVConnectorTransfer]: ...

    def resume(self, batch: Batch) -> KVConnectorTransfer | list[KVConnectorTransfer]:
        """Brings suspended requests back, for all of `batch` or for none.

        A request takes the blocks of it that are stored on the device at once, and pages for the others, into
        which they are copied; unless `on_duplicate` is "private", or the request stores nothing. It waits
        until `poll_transfers` names it. It then stands where it stood when it was suspended, or further if
        more of its prompt is stored than it had computed, with the same KV; its full blocks are shared again,
        and `alloc` plans its next forward. If the cache was reset meanwhile it goes on alone, as requests do
        that hold pages through a reset.

        If the copy fails or is cancelled the KV is lost: the request is named too, and computes all its
        tokens again, as after `preempt`.

        Args:
            batch: the requests. The copies that suspended them have been settled by `poll_transfers`.

        Returns:
            A transfer of the copy, with its `id`: one for a context or a slot, one for each request of a
            list or an array. It may have no pages. It raises `KVLoadFailed` if the KV is lost.

        Raises:
            InsufficientBlocksError: no room now; names the first request that did not fit.
            ValueError: unknown or doubled requests, requests that are not suspended or still leave; the tier
                was shut down (`preempt` the requests to have them computed again).
        """
        transfers = self._native_tiers("resume").resume(batch)
        return transfers[0] if is_one(batch) else transfers

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until each block offered to the tiers would be found after a restart, or was dropped.

        Args:
            timeout: most seconds to wait.

        Returns:
            Whether that is so; False if the time was over first. True at once where nothing survives.

        Raises:
            ValueError: a timeout that is no time.
            RuntimeError: the manager was made before this process was forked.
        """
        deadline = time.monotonic() + _seconds(timeout, "timeout")
        while self._tiers is not None:
            left = max(deadline - time.monotonic(), 0.0)
            if self._tiers.flush(min(left, 0.1)):  # Ctrl-C is heard in between
                break
            if left == 0.0:
                return False
        return True

    def sleep(self, timeout: float = 5.0) -> None:
        """Gives up the pool's memory, and forgets what is cached in it.

        Nobody may hold pages; suspended requests do not, and are as good as before after `wake`. Blocks in
        other tiers stay. Until `wake` nothing is planned or resumed, and there is no `get_buffers`. The
        memory is free once nobody else holds a view of it. A cache without a pool only forgets.

        Args:
            timeout: seconds to wait for copies in flight, which are settled as by `poll_transfers`.

        Raises:
            TimeoutError: copies are still in flight after that time.
            ValueError: requests or pins hold pages, or the cache is asleep; a connector of the caller's has
                the memory of the pool, and cannot be told to let it go.
        """
        timeout = _seconds(timeout, "timeout")
        if self._pools and self._tiers is not None and not isinstance(self._tiers, NativeTiers):
            raise ValueError("sleep: the connector copies from the pool's memory and cannot be told of other")
        self._core.check_unused()
        deadline = time.monotonic() + timeout
        while self._core.metrics()["copies_in_flight"]:
            self._settle()
            if time.monotonic() > deadline:
                copies = self._core.metrics()["copies_in_flight"]
                raise TimeoutError(f"sleep: {copies} copies are still in flight after {timeout} s")
            time.sleep(0.001)
        if isinstance(self._connector, TieredConnector):
            self._connector.release_pages()
        self._core.sleep()
        self._pools = ()

    def wake(self, buffers: Buffers | Mapping[str, Buffers] | None = None) -> None:
        """Ends `sleep`: there is a pool again, in which nothing is cached.

        Blocks that other tiers have are hits at once.

        Args:
            buffers: a pool to adopt, as when the manager was made; needed if one was given then. None: a
                new pool.

        Raises:
            ValueError: the cache is awake; buffers that are missing, do not fit, or belong to no pool.
        """
        if not self._core.is_asleep:
            self._core.wake()  # says so
        if self._has_pool:
            if buffers is None and self._pool_is_adopted:
                raise ValueError("buffers: missing; the pool was given when the manager was made")
            pools = self._groups.make_pools(self._memory, buffers)
            if isinstance(self._connector, TieredConnector):
                self._connector.adopt_pages([pool.byte_arrays() for pool in pools])
            self._pools, self._pool_is_adopted = pools, buffers is not None
        elif buffers is not None:
            raise ValueError("buffers: the manager was made with allocate_pools=False, or is shut down")
        self._core.wake()

    def _native_tiers(self, call: str) -> NativeTiers:
        self._core.check()
        if not isinstance(self._tiers, NativeTiers):
            raise ValueError(f"{call}: needs a host tier, kv_connector_config of the type 'rust_tiered'")
        return self._tiers

    def _settle(self) -> None:
        """Ends copies that are complete here, and remembers whom `poll_transfers` is to name."""
        if self._tiers is not None:
            ends = self._tiers.ends(None)
            self._tiers.settle(ends, self._core.end_copies(ends))


def _seconds(given: object, name: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e9:
        raise ValueError(f"{name}={shown(given)}: must be seconds, 0 or more, and finite")
    return given
