"""The cache of one model: which request's KV lies where, what is shared, and what goes when room is short."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pagekeeper._native import Ledger
from pagekeeper.calls import check_replica, text
from pagekeeper.connectors import KVConnector, NullConnector
from pagekeeper.counts import BlockCount, ByteCount
from pagekeeper.disk_tier import disk_directories
from pagekeeper.errors import shown
from pagekeeper.groups import Buffers, Groups
from pagekeeper.hashing import resolve_seed
from pagekeeper.native_tiers import NativeTiers, tiered_connector
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.page_calls import PageCalls
from pagekeeper.params import KVCacheParams, MultiKVCacheParams, whole_number
from pagekeeper.pause_calls import PauseCalls
from pagekeeper.prefix_calls import PrefixCalls
from pagekeeper.request_calls import RequestCalls
from pagekeeper.scheduler_calls import SchedulerCalls

if TYPE_CHECKING:
    pass

__all__ = ["PagedKVCacheManager"]

_log = logging.getLogger("pagekeeper")


class PagedKVCacheManager(RequestCalls, PrefixCalls, PageCalls, PauseCalls, SchedulerCalls):
    """A paged KV cache with prefix sharing.

    A request lives through five calls::

        kv.claim(ctx)                          # a slot, no memory yet
        kv.alloc(ctx)                          # prefix hits, and pages for the next forward
        inputs = kv.runtime_inputs([[ctx]])    # what the kernels read
        ctx.update(token)                      # after the forward: the token that it gave
        kv.step(ctx)                           # the KV is computed: share the blocks that are full
        kv.release(ctx)                        # give the pages back

    `alloc` to `step` repeat for every forward. A batch is one context or slot, a list of contexts, or an
    int32 array of slots; where one request is meant, it is a context or a slot. The slot is what `claim`
    returned. A call that raises has changed nothing.

    Args:
        params: geometry and behaviour of the cache; `MultiKVCacheParams` for several groups of layers, which
            calls then name.
        session: accepted for code written for other engines; not used.
        total_num_pages: usable pages; the pools hold one more, the null page 0. With several groups a mapping
            of their names to pages, of which each has memory of its own.
        max_batch_size: most requests of one replica in `runtime_inputs`, up to 2**20.
        available_bytes: instead of `total_num_pages`: bytes for the pools, null pages included. Several
            groups share them: what one does not use another can; with `layout="paged"` they divide them, as
            `window_size_shares` says.
        max_seq_len: most tokens of one request, prompt and output. None: as many as the pool holds.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit.
        request_pages: of the requests that memory was planned for, pages of each group, by name, that one
            holds at most: `plan_cache(...).pages(tokens)`. Memory that groups share is cut so that most of
            these fit, and they do not spread their pages so far that fewer fit than were planned, up to
            `max_batch_size`. None: that is so for requests that are claimed, and no others.
        reserve: "chunk" takes pages for the chunk to compute, "prompt" for the whole prompt at once.
        allocate_pools: False gives the ledger and tables without memory of our own; torch is not imported.
        buffers: a pool to adopt, as a list of one tensor [pages + 1, layers, 2, page_size, heads, head_dim]
            (of one for each region of `params.page_layout`, [pages + 1, *shape]), or of numpy arrays, uint8
            [pages + 1, ...] of any strides, which need no torch. A page is its bytes in all arrays; of pools
            that are layer first give views whose first axis is the page. With several groups a mapping of
            their names to such lists, each of memory of its own; none can be given where they share memory.
        model_name: whose KV it is: for a disk tier with a directory, which needs it, and for log messages.
        weights_revision: which weights' KV it is, likewise; `reset_prefix_cache` may change it.
        connector: keeps blocks beyond the device. None: what `params.kv_connector_config` says.

    Raises:
        ValueError: sizes that are missing, doubled, out of range, or too small; buffers that do not fit.
        ModuleNotFoundError: pools are wanted and torch is not installed.
    """

    def __init__(
        self,
        params: KVCacheParams | MultiKVCacheParams,
        session: object = None,
        total_num_pages: int | Mapping[str, int] | None = None,
        max_batch_size: int | None = None,
        *,
        available_bytes: int | None = None,
        max_seq_len: int | None = None,
        max_num_input_tokens: int | None = None,
        request_pages: Mapping[str, int] | None = None,
        reserve: Literal["chunk", "prompt"] = "chunk",
        allocate_pools: bool = True,
        buffers: Buffers | Mapping[str, Buffers] | None = None,
        model_name: str | None = None,
        weights_revision: str | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        self._groups = Groups(params)
        if max_batch_size is None:
            raise ValueError("max_batch_size: missing; most requests of one replica in runtime_inputs")
        self.max_batch_size = whole_number(max_batch_size, "max_batch_size", most=2**20)
        held = self._groups.pages_of_each(request_pages, "request_pages")
        self._memory = memory = self._groups.memory(
            total_num_pages, available_bytes, self.max_batch_size, held
        )
        self.params = params
        self.total_num_pages = sum(memory.usable_pages)
        self.max_seq_len = _limit(max_seq_len, "max_seq_len")
        self.max_num_input_tokens = _limit(max_num_input_tokens, "max_num_input_tokens")
        self.model_name = text(model_name, "model_name")
        self.weights_revision = text(weights_revision, "weights_revision")
        if not isinstance(allocate_pools, bool):
            raise TypeError(f"allocate_pools: got {shown(allocate_pools)}, must be True or False")
        if connector is not None:
            if not isinstance(connector, KVConnector):
                raise TypeError(f"connector: got {type(connector).__name__}, must be a KVConnector")
            if not params.enable_prefix_caching:
                raise ValueError("connector: needs enable_prefix_caching=True")
            if params.kv_connector_config is not None and params.kv_connector_config.type != "null":
                raise ValueError("connector, params.kv_connector_config: both are given, must be one")
        config = params.kv_connector_config
        self._pools = ()
        if allocate_pools or buffers is not None:
            self._pools = self._groups.make_pools(memory, buffers)
        self._has_pool, self._pool_is_adopted = bool(self._pools), buffers is not None
        self._disk = disk = disk_directories(self._groups, self.model_name, self.weights_revision)
        try:
            own_tier = tiered_connector(config, self._pools, params.eviction_policy, disk)
        except BaseException:
            for directory in disk:
                directory.close()
            raise
        self._connector: KVConnector | None = connector or own_tier
        self._hash_seed = (disk[0].seed if disk else None) or resolve_seed(params)
        self._core = Ledger(
            page_size=params.page_size,
            groups=self._groups.native(memory),
            huge_pages=memory.huge_pages,
            request_pages=held,
            max_batch_size=self.max_batch_size,
            prefix_caching=params.enable_prefix_caching,
            partial_reuse=params.enable_partial_reuse,
            copy_on_partial_reuse=params.copy_on_partial_reuse,
            store_partial_tails=params.store_partial_tails,
            algo=params.kv_hash_algo,
            seed=self._hash_seed,
            on_duplicate=params.on_duplicate,
            reserve=reserve,
            policy=params.eviction_policy.value,
            priority=params.default_retention_priority,
            max_seq_len=self.max_seq_len,
            max_num_input_tokens=self.max_num_input_tokens,
            guard_secret=(
                None
                if self._connector is None
                else secrets.token_bytes(32)
                if not disk
                else bytes.fromhex(disk[0].secret)
            ),
            tier=own_tier,
            write_policy=params.write_policy,
            min_hits=params.selective_min_hits,
            min_priority=(
                params.secondary_offload_min_priority
                if params.write_policy == "on_evict"
                else params.selective_min_priority
            ),
            event_buffer_max_size=params.event_buffer_max_size,
        )
        most = min(self.total_num_pages * params.page_size, self.max_seq_len or 2**31)
        self._tiers: OuterTiers | None = None
        if own_tier is not None:
            self._tiers = NativeTiers(self._core, own_tier, self._groups, params.page_size, most)
        elif connector is not None:
            self._tiers = OuterTiers(self._core, connector, self._groups, params.page_size, most)
        self._tables = self._new_tables(num_draft_tokens=0)
        _log.info(
            "cache of %s: %s pages of %d tokens, %s bytes a page; prefix caching %s",
            model_name or "a model",
            " + ".join(map(str, memory.usable_pages)),
            params.page_size,
            ", ".join(str(group.bytes_per_page) for group in self._groups.params),
            f"with {params.kv_hash_algo}" if params.enable_prefix_caching else "off",
        )

    # Steps and transfers.

    def begin_step(self, now: float | None = None, completions: Sequence[int] | None = None) -> int:
        """Opens the next step if the newest is closed or planned; gives its number.

        `alloc` does this by itself. Engines that build their own tables, and so never call `runtime_inputs`,
        call it when a forward is launched before the last one's results are known.

        Args:
            now: seconds of a clock that never goes back; None leaves it as it was. Where blocks are kept for
                a time, tell it once a step, from the start: `now=time.monotonic()`. While no time is told
                no duration ends; those that began before the first one count from it.
            completions: as in `poll_transfers`, which then names the requests that became ready here.

        Raises:
            ValueError: `now` is before an earlier one, or a copy is unknown, in flight or ended before.
        """
        ends = self._ends(completions)
        step, waited = self._core.begin_step(now, ends)
        if self._tiers is not None:
            self._tiers.settle(ends, waited)
            self._tiers.offload()
        return step

    def poll_transfers(self, completions: Sequence[int] | None = None) -> list[object]:
        """Ends copies, and gives the requests whose transfers became ready or failed.

        A request that is named was waiting for a load: `alloc` plans its forward now. If the load failed, its
        blocks are computed, and the request loads no more. Likewise requests that `resume` has brought back,
        and those whose KV was lost in `suspend` or `resume`. Without a connector there are none.

        Args:
            completions: ids of copies that have ended, so that all ranks see the same ends at the same time:
                list those that are complete on every rank. None: those that are complete here.

        Raises:
            ValueError: a copy is unknown, still in flight here, or ended before.
        """
        ends = self._ends(completions)
        waited = self._core.end_copies(ends)
        if self._tiers is None:
            return []
        self._tiers.settle(ends, waited)
        self._tiers.offload()
        return self._tiers.take_ready()

    def _ends(self, completions: Sequence[int] | None) -> list[tuple[int, str]]:
        if completions is None:
            return [] if self._tiers is None else self._tiers.ends(None)
        copies = self._core.copy_ids(completions)
        return [(copy, "done") for copy in copies] if self._tiers is None else self._tiers.ends(copies)

    # What is there.

    def block_count(self, replica_idx: int = 0, group: str | None = None) -> BlockCount:
        """Free and total pages of a replica's pool. Cached pages that nobody uses are free.

        Args:
            replica_idx: the data-parallel replica; 0.
            group: one of several groups of layers. None is the only one; of several it counts the huge pages
                of the memory that they share, or the pages of that which has the least to give.

        Raises:
            ValueError: there is no such replica or group.
        """
        check_replica(replica_idx)
        counts = [BlockCount(free, total) for free, total in self._core.block_count()]
        if group is None:
            huge = self._core.huge_page_count()
            if huge is not None:
                return BlockCount(*huge)
            return min(counts, key=lambda count: count.free)
        return counts[self._groups.index(group)]

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of the connector's host memory; none without a connector.

        Args:
            replica_idx: the data-parallel replica; 0.

        Raises:
            ValueError: there is no such replica.
        """
        check_replica(replica_idx)
        return ByteCount(0, 0) if self._connector is None else self._connector.host_byte_count(replica_idx)

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of the connector's disk; none without a connector.

        Args:
            replica_idx: the data-parallel replica; 0.

        Raises:
            ValueError: there is no such replica.
        """
        check_replica(replica_idx)
        return ByteCount(0, 0) if self._connector is None else self._connector.disk_byte_count(replica_idx)

    def metrics(self) -> dict[str, int]:
        """Counters since the start and gauges of now, by name; docs/operations.md says what each counts.

        All are whole numbers of requests, calls, pages, blocks, tokens or bytes.
        """
        own = self._core.metrics()
        return own if self._tiers is None else {**own, **self._tiers.metrics()}

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Times in steps, counted since the start, by name; docs/operations.md says what each is.

        Each has 16 counts: of times of 0 steps, then of 2**(i - 1) to 2**i - 1 steps, the last of all longer.
        """
        return self._core.histograms()

    # The books.

    def verify(self) -> None:
        """Checks the books.

        Raises:
            LedgerCorruptError: names the first page, block or request that breaks them.
        """
        self._core.verify()

    def fingerprint(self) -> int:
        """A hash of the whole state, eviction order included: equal before and after a call that fails."""
        return self._core.fingerprint()

    def debug_dump(self) -> str:
        """The state as text, for people."""
        return self._core.debug_dump()

    def shutdown(self) -> None:
        """Shuts the connector down, then lets go of the pool: its memory is free once nobody holds a view.

        `get_buffers` and `pages_view` end with it, and nothing is looked for or kept beyond the device any
        more. Requests may still be stepped and released, and `verify` and `metrics` answer. Calling it again
        does nothing.
        """
        try:
            if self._tiers is not None:
                self._connector = NullConnector()
                self._tiers.shutdown()  # its copies end while their pages are there
        finally:
            self._pools, self._has_pool, self._disk = (), False, []


def _limit(given: int | None, name: str) -> int | None:
    return None if given is None else whole_number(given, name)
