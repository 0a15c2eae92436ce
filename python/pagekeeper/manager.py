"""The cache of one model: which request's KV lies where, what is shared, and what goes when room is short."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from pagekeeper._native import Ledger, TextContext
from pagekeeper.calls import Batch, Request, Requests, check_group, check_replica, is_one, text
from pagekeeper.connectors import KVConnector, NullConnector
from pagekeeper.context import EngineRequest, RequestID, read_request
from pagekeeper.counts import BlockCount, ByteCount
from pagekeeper.errors import shown
from pagekeeper.hashing import resolve_seed
from pagekeeper.native_tiers import NativeTiers, tiered_connector
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.page_calls import PageCalls
from pagekeeper.params import KVCacheParams, whole_number
from pagekeeper.pause_calls import PauseCalls
from pagekeeper.pools import Pool, pool_for, usable_pages
from pagekeeper.prefix_calls import PrefixCalls
from pagekeeper.staging import staging_for
from pagekeeper.tables import (
    NO_COPIES,
    FlashInferTables,
    Form,
    KVCacheInputs,
    MaxTables,
    Tables,
    TableWriter,
    VllmTables,
)
from pagekeeper.transfers import COMPLETED, CompletedTransfer, KVConnectorTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import ArrayLike, NDArray

__all__ = ["PagedKVCacheManager"]

_log = logging.getLogger("pagekeeper")


class PagedKVCacheManager(PrefixCalls, PageCalls, PauseCalls):
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
        params: geometry and behaviour of the cache.
        session: accepted for code written for other engines; not used.
        total_num_pages: usable pages; the pools hold one more, the null page 0.
        max_batch_size: most requests of one replica in `runtime_inputs`, up to 2**20.
        available_bytes: instead of `total_num_pages`: bytes for the pools, null page included.
        max_seq_len: most tokens of one request, prompt and output. None: as many as the pool holds.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit.
        reserve: "chunk" takes pages for the chunk to compute, "prompt" for the whole prompt at once.
        allocate_pools: False gives the ledger and tables without memory of our own; torch is not imported.
        buffers: a pool to adopt, as a list of one tensor [pages + 1, layers, 2, page_size, heads, head_dim],
            or of numpy arrays, uint8 [pages + 1, ...] of any strides, which need no torch. A page is its
            bytes in all arrays; of pools that are layer first give views whose first axis is the page.
        model_name: for log messages.
        weights_revision: kept; `reset_prefix_cache` may change it.
        connector: keeps blocks beyond the device. None: what `params.kv_connector_config` says.

    Raises:
        ValueError: sizes that are missing, doubled, out of range, or too small; buffers that do not fit.
        ModuleNotFoundError: pools are wanted and torch is not installed.
    """

    def __init__(
        self,
        params: KVCacheParams,
        session: object = None,
        total_num_pages: int | None = None,
        max_batch_size: int | None = None,
        *,
        available_bytes: int | None = None,
        max_seq_len: int | None = None,
        max_num_input_tokens: int | None = None,
        reserve: Literal["chunk", "prompt"] = "chunk",
        allocate_pools: bool = True,
        buffers: Sequence[torch.Tensor | NDArray[np.uint8]] | None = None,
        model_name: str | None = None,
        weights_revision: str | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        if not isinstance(params, KVCacheParams):
            raise TypeError(f"params: got {type(params).__name__}, must be a KVCacheParams")
        pages = usable_pages(params, total_num_pages, available_bytes)
        if max_batch_size is None:
            raise ValueError("max_batch_size: missing; most requests of one replica in runtime_inputs")
        self.params = params
        self.total_num_pages = pages
        self.max_batch_size = whole_number(max_batch_size, "max_batch_size", most=2**20)
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
        self._pool: Pool | None = None
        if allocate_pools or buffers is not None:
            self._pool = pool_for(params, pages, buffers)
        self._has_pool, self._pool_is_adopted = self._pool is not None, buffers is not None
        own_tier = tiered_connector(params.kv_connector_config, self._pool, params.eviction_policy)
        if own_tier is not None and connector is not None:
            raise ValueError("connector, params.kv_connector_config: both are given, must be one")
        self._connector: KVConnector | None = connector or own_tier
        self._hash_seed = resolve_seed(params)
        self._core = Ledger(
            page_size=params.page_size,
            pages=pages,
            max_batch_size=self.max_batch_size,
            prefix_caching=params.enable_prefix_caching,
            algo=params.kv_hash_algo,
            seed=self._hash_seed,
            on_duplicate=params.on_duplicate,
            reserve=reserve,
            policy=params.eviction_policy.value,
            priority=params.default_retention_priority,
            max_seq_len=self.max_seq_len,
            max_num_input_tokens=self.max_num_input_tokens,
            guard_secret=None if self._connector is None else secrets.token_bytes(32),
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
        most = min(pages * params.page_size, self.max_seq_len or 2**31)
        self._tiers: OuterTiers | None = None
        if own_tier is not None:
            self._tiers = NativeTiers(self._core, own_tier, params.page_size, most)
        elif connector is not None:
            self._tiers = OuterTiers(self._core, connector, params.page_size, most)
        self._tables = self._new_tables(num_draft_tokens=0)
        _log.info(
            "cache of %s: %d pages of %d tokens, %d bytes a page; prefix caching %s",
            model_name or "a model",
            pages,
            params.page_size,
            params.bytes_per_page,
            f"with {params.kv_hash_algo}" if params.enable_prefix_caching else "off",
        )

    # The life of a request.

    def claim(self, ctx: TextContext | EngineRequest, replica_idx: int = 0) -> int:
        """Reserves a slot for a request; no page is taken.

        Args:
            ctx: a `TextContext`, or an engine's own request with `request_id`, `tokens` and, where it has
                them, the other arguments of `TextContext` as attributes. Such a request is read once, here,
                and known by its slot afterwards.
            replica_idx: the data-parallel replica; 0.

        Returns:
            The slot, an int32 number for arrays of slots. Its low 20 bits are a dense index, the bits above
            a generation: the slot of a released request is an error, never another request.

        Raises:
            TypeError: an object without `request_id` or `tokens`.
            ValueError: the request or its id is claimed already, there is no such replica, or the prompt is
                over a length limit.
        """
        check_replica(replica_idx)
        context = ctx if isinstance(ctx, TextContext) else read_request(ctx)
        slot = self._core.claim(context)
        if context.num_draft_tokens > self._tables.num_draft_tokens:
            self._tables = self._new_tables(context.num_draft_tokens)
        return slot

    def fork(self, ctx: Request, request_id: str | int | None = None) -> TextContext:
        """Claims a request that goes on from where another one stands, for parallel sampling.

        Each sample has a first token of its own if the fork comes before any::

            kv.step(ctx, counts=0)                 # the prompt has KV; no token yet
            samples = [ctx, kv.fork(ctx), kv.fork(ctx)]
            for sample, token in zip(samples, first_tokens):
                sample.update(token)
            kv.alloc(samples)                      # whoever writes to a shared page gets a copy

        The child has the tokens known so far and all else that its parent was made with. It shares every page
        that has computed tokens, the partial last one too: whoever writes to that one first gets a copy of
        it in `alloc`, and the last one keeps it. Forwards of the parent that are out stay its own; the child
        computes their tokens itself. From then on neither is touched by what happens to the other.

        Args:
            ctx: a claimed request.
            request_id: names the child. None: a new `RequestID`.

        Returns:
            The child's context, claimed.

        Raises:
            ValueError: the request is not claimed, or is a padding request; the id is claimed already.
        """
        return self._core.fork(ctx, RequestID() if request_id is None else request_id)

    @overload
    def alloc(self, batch: Request, num_tokens: int | None = None) -> KVConnectorTransfer: ...

    @overload
    def alloc(
        self, batch: Requests, num_tokens: int | ArrayLike | None = None
    ) -> list[KVConnectorTransfer]: ...

    def alloc(
        self, batch: Batch, num_tokens: int | ArrayLike | None = None
    ) -> KVConnectorTransfer | list[KVConnectorTransfer]:
        """Takes prefix hits and reserves pages for the next forward, for all of `batch` or for none.

        Reuse is tried until a prompt is computed: the position moves to the end of the longest stored prefix,
        at most to the token before the last. A forward then computes `ctx.active_length` tokens.
        It may be called for the next step before the results of the last one are known. Once its prompt is
        done, a request with `num_draft_tokens` computes so many drafts behind its active tokens: tables and
        pages cover them, `num_tokens` does not.

        With a connector, blocks that follow those on the device may come from its tiers. Unless the load is
        complete at once, no forward is planned for such a request: it waits, with the pages of all its
        tokens, until `poll_transfers` names it, and is then planned by another `alloc`. Meanwhile its
        `cached_prefix_length` counts the load already, its `processed_length` does not.

        Args:
            batch: the requests.
            num_tokens: most tokens to compute, one number or one a request.

        Returns:
            A transfer that is complete when the pages may be read: one for a context or a slot, one for each
            request of a list or an array. One in flight is a `LoadTransfer`, with the copy's `id`.

        Raises:
            InsufficientBlocksError: no room now; names the first request that did not fit.
            RequestTooLargeError: never enough room.
            ValueError: unknown, doubled, waiting or already planned requests, or nothing left to compute.
        """
        if self._tiers is not None:
            transfers = self._tiers.alloc(batch, num_tokens)
            return transfers[0] if is_one(batch) else transfers
        count = self._core.alloc(batch, num_tokens)
        return COMPLETED if is_one(batch) else [COMPLETED] * count

    def alloc_dummy(self, ctx: Request, replica_idx: int = 0) -> CompletedTransfer:
        """Plans a padding request: its table row is all null pages, it takes no page and stores nothing.

        A context that is not claimed is claimed. `step` and `release` work as for any request.

        Args:
            ctx: a request that has no pages and was not planned before.
            replica_idx: the data-parallel replica; 0.

        Raises:
            ValueError: the request was planned before, it has more tokens than a page, or there is no such
                replica.
        """
        check_replica(replica_idx)
        claimed_here = isinstance(ctx, TextContext) and ctx.slot is None
        if isinstance(ctx, TextContext) and claimed_here:
            self.claim(ctx, replica_idx)
        try:
            self._core.alloc_dummy(ctx)
        except BaseException:
            if isinstance(ctx, TextContext) and claimed_here:
                self._core.unclaim(ctx)
            raise
        return COMPLETED

    @overload
    def runtime_inputs(
        self, batches: Sequence[Batch], form: Literal["max"] = "max"
    ) -> KVCacheInputs[MaxTables]: ...

    @overload
    def runtime_inputs(
        self, batches: Sequence[Batch], form: Literal["vllm"]
    ) -> KVCacheInputs[VllmTables]: ...

    @overload
    def runtime_inputs(
        self, batches: Sequence[Batch], form: Literal["flashinfer"]
    ) -> KVCacheInputs[FlashInferTables]: ...

    def runtime_inputs(self, batches: Sequence[Batch], form: Form = "max") -> KVCacheInputs[Tables]:
        """What the kernels read for the forward that `alloc` planned.

        Pages that a request must have to itself to write to are copied now, in the manager's pool; without a
        pool the engine copies them first, as `KVCacheInputs.page_copies` says.

        Args:
            batches: one batch a data-parallel replica.
            form: "max", "vllm" (also FlashAttention) or "flashinfer".

        Returns:
            One entry a replica, rows in the order of its batch: `MaxTables`, `VllmTables` or
            `FlashInferTables` of `pagekeeper.tables`, which say shapes and dtypes. Arrays are numpy's for a
            cache on the CPU, otherwise tensors on its device, whose copies are queued on the current stream.
            They are views of memory that is used again, valid until the second next call in the same form,
            and not to be written.

        Raises:
            ValueError: a wrong number of batches, a batch over `max_batch_size`, requests not planned.
        """
        if not isinstance(batches, list | tuple):
            raise TypeError(f"batches: got {type(batches).__name__}; give a list, one batch a replica")
        if len(batches) != 1:
            raise ValueError(f"batches: {len(batches)} given, must be 1, one batch a data-parallel replica")
        if self._connector is not None:
            self._connector.wait_for_loads()
        tables, copies = self._tables.write(batches[0], form)
        if len(copies) and self._pool is not None:
            self._pool.copy_pages(copies)
            copies = NO_COPIES
        return KVCacheInputs(form, (tables,), copies)

    def take_page_copies(self) -> NDArray[np.int32]:
        """Pages to copy before the next forward, for engines that build their own tables.

        `runtime_inputs` does this itself. Their pages stay in use until the copies are taken, so that an
        engine takes them for every step, after `alloc` and before its forward.

        Returns:
            int32 [copies, 2], source and destination, to be carried out in this order. Mostly empty: a page
            is copied when a request writes behind tokens that another request or a transfer reads. Each copy
            is given once.
        """
        return self._core.take_page_copies()

    def step(
        self,
        batch: Batch,
        new_tokens: int | ArrayLike | None = None,
        counts: int | ArrayLike | None = None,
    ) -> None:
        """Delivers a forward: its tokens have KV now, and blocks that became full are shared.

        Each request's oldest step out is delivered. Results for a request that was released, preempted or
        truncated meanwhile are dropped. Those of a request that is still claimed must be delivered all the
        same: each forward that was launched with it is one call, in order.

        Args:
            batch: the requests.
            new_tokens: generated tokens, flat, in the order of the batch. None: `ctx.update` gave them.
            counts: how many tokens each request gets: 0 for an unfinished prompt, or to `fork` before the
                first token; more than 1 for accepted drafts, which are given here and not to `ctx.update`: a
                token given there is computed by the next forward. None: one each. Of what a decode step of a
                request with `num_draft_tokens` brings, all but the last token are drafts that it accepted,
                which have KV; the rest of its drafts were rejected, and are written over.

        Raises:
            ValueError: unknown requests, requests without a step out, counts that do not match, more tokens
                than a step's drafts and one, or more than a length limit allows: cut accepted drafts to what
                `max_length` leaves, and release a request that has reached it instead of planning it.
        """
        if self._connector is not None:
            self._connector.wait_for_offloads()
        self._core.step(batch, new_tokens, counts)
        if self._tiers is not None:
            self._tiers.offload()

    def truncate(self, ctx: Request, length: int) -> None:
        """Drops a request's tokens after the first `length`, with their KV and its steps out.

        `TextContext.truncate` for whoever has the slot.

        Args:
            ctx: the request.
            length: tokens to keep, 0 to those known.

        Raises:
            ValueError: a length out of that range, or a request that is not claimed.
        """
        self._core.truncate(ctx, length)

    def preempt(self, batch: Batch) -> None:
        """Takes all pages from requests, which stay claimed.

        The next `alloc` starts them over, from what is still cached then. The results of a forward that was
        launched with them are still due: deliver them with `step`, which drops them.

        Raises:
            ValueError: a request is not claimed, or is given twice.
        """
        self._core.preempt(batch)

    def release(self, batch: Batch) -> None:
        """Ends requests and gives their pages back. What was shared stays cached until it is evicted.

        Legal at any time, also while a forward is out.

        Raises:
            ValueError: a request is not claimed (released already, or never claimed), or is given twice.
        """
        self._core.release(batch)

    def contains(self, ctx: TextContext | EngineRequest) -> bool:
        """Whether a request with the `request_id` of `ctx` is claimed.

        Args:
            ctx: a `TextContext`, or an engine's own request.
        """
        if not hasattr(ctx, "request_id"):
            given = type(ctx).__name__
            raise TypeError(f"ctx: got {given}; give a TextContext, or an object with request_id")
        return self._core.contains(ctx.request_id)

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
            group: None, the only group of layers.

        Raises:
            ValueError: there is no such replica or group.
        """
        check_replica(replica_idx)
        check_group(group)
        free, total = self._core.block_count()
        return BlockCount(free, total)

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

        All are whole numbers of requests, calls, pages, blocks or tokens.
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
            self._pool, self._has_pool = None, False

    def _new_tables(self, num_draft_tokens: int) -> TableWriter:
        """Tables that have room for requests with so many drafts."""
        return TableWriter(
            self._core,
            self.max_batch_size,
            max_tokens=self._most_computed_tokens(num_draft_tokens),
            new_staging=partial(staging_for, self.params.devices[0]),
            num_draft_tokens=num_draft_tokens,
        )

    def _most_computed_tokens(self, num_draft_tokens: int) -> int:
        """Most tokens that one forward may compute.

        Each has a cell of a page to itself, but for those of padding requests, which have up to a page each.
        """
        most = (self.total_num_pages + self.max_batch_size) * self.params.page_size
        if self.max_num_input_tokens is None:
            return most
        return min(most, self.max_batch_size * (self.max_num_input_tokens + num_draft_tokens))


def _limit(given: int | None, name: str) -> int | None:
    return None if given is None else whole_number(given, name)
