"""The manager's calls in the life of a request, from its claim to its release."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

from pagekeeper._native import Ledger, TextContext
from pagekeeper.calls import Batch, Request, Requests, check_replica, is_one
from pagekeeper.connectors import KVConnector
from pagekeeper.context import EngineRequest, RequestID, read_request
from pagekeeper.groups import Groups
from pagekeeper.offsets import OffsetLayout
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.params import CrossAttention, KVCacheParams, MultiKVCacheParams, Recurrent, Scratch
from pagekeeper.pools import Pool
from pagekeeper.slabs import GroupMemory
from pagekeeper.staging import staging_for
from pagekeeper.tables import (
    NO_COPIES,
    NO_FILLS,
    AnyTables,
    CrossTables,
    FlashInferTables,
    Form,
    KVCacheInputs,
    MaxTables,
    StateTables,
    Tables,
    TableWriter,
    TensorRTTables,
    VllmTables,
)
from pagekeeper.transfers import COMPLETED, CompletedTransfer, KVConnectorTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from pagekeeper._native import BatchShape

__all__ = ["RequestCalls"]


class RequestCalls:
    """The part of `PagedKVCacheManager` that every request goes through."""

    params: KVCacheParams | MultiKVCacheParams
    total_num_pages: int
    max_batch_size: int
    max_num_input_tokens: int | None
    _core: Ledger
    _memory: GroupMemory
    _connector: KVConnector | None
    _tiers: OuterTiers | None
    _groups: Groups
    _pools: tuple[Pool, ...]
    _tables: tuple[TableWriter, ...]

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
        if context.num_draft_tokens > self._tables[0].num_draft_tokens:
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
            InsufficientBlocksError: no room now; names the first request that did not fit. One that is alone
                fits once it is preempted.
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

    @overload
    def runtime_inputs(
        self, batches: Sequence[Batch], form: Literal["tensorrt"]
    ) -> KVCacheInputs[TensorRTTables]: ...

    def runtime_inputs(self, batches: Sequence[Batch], form: Form = "max") -> KVCacheInputs[Tables]:
        """What the kernels read for the forward that `alloc` planned.

        Pages that a request must have to itself to write to are copied now, in the manager's pool; without a
        pool the engine copies them first, as `KVCacheInputs.page_copies` says. A copy in the pool that fails
        raises its error and changes nothing: the next call makes all of them.

        Args:
            batches: one batch a data-parallel replica.
            form: "max", "vllm" (also FlashAttention), "flashinfer" or "tensorrt" (TensorRT-LLM).

        Returns:
            One entry a replica, rows in the order of its batch; of several groups each has its own, under its
            name, as `inputs["full"][0]`. An entry is a `MaxTables`, `VllmTables`, `FlashInferTables` or
            `TensorRTTables` of `pagekeeper.tables`, which say shapes and dtypes; groups of states have
            `StateTables` instead, as `inputs["mamba"].states[0]`, and groups of cross attention
            `CrossTables`, as `inputs["cross"].cross[0]`. Arrays are numpy's for a cache on the CPU,
            otherwise tensors on its device, whose copies are queued on the current stream.
            They are views of memory that is used again, valid until the second next call in the same form,
            and not to be written.

        Raises:
            ValueError: a wrong number of batches, a batch over `max_batch_size`, requests not planned. In
                the form "tensorrt" also what `copy_block_offsets` cannot write.
        """
        if not isinstance(batches, (list, tuple)):
            raise TypeError(f"batches: got {type(batches).__name__}; give a list, one batch a replica")
        if len(batches) != 1:
            raise ValueError(f"batches: {len(batches)} given, must be 1, one batch a data-parallel replica")
        if self._connector is not None:
            self._connector.wait_for_loads()
        if self._groups.is_plain and not self._groups.names:
            tables, shape = self._tables[0].write(batches[0], form)
            if not shape.page_copies:
                return _inputs(form, tables)
            only = _inputs(form, tables, self._copy_pages(0, shape))
            self._core.page_work_done(launches=shape.requests > 0)
            return only
        for writer in self._tables:
            writer.check(form)
        written = [writer.write(batches[0], form) for writer in self._tables]
        shapes = [shape for _, shape in written]
        fills = [self._fill_pages(group, shape) for group, shape in enumerate(shapes)]
        copies = [self._copy_pages(group, shape) for group, shape in enumerate(shapes)]
        inputs = [
            _inputs(form, tables, copies[group], fills[group]) for group, (tables, _) in enumerate(written)
        ]
        if any(shape.page_fills or shape.page_copies for shape in shapes):
            # Not before all is done: a call that failed leaves all of it to the next one.
            self._core.page_work_done(launches=shapes[0].requests > 0)
        if not self._groups.names:
            return inputs[0]
        return KVCacheInputs(form, groups=self._groups.by_name(inputs))

    def _fill_pages(self, group: int, shape: BatchShape) -> NDArray[np.int32]:
        """Zeroes a group's pages, if there is a pool; gives those that are left to the engine."""
        fills = self._core.planned_page_fills(group) if shape.page_fills else NO_FILLS
        if len(fills) and self._pools:
            self._pools[group].fill_pages(fills)
            return NO_FILLS
        return fills

    def _copy_pages(self, group: int, shape: BatchShape) -> NDArray[np.int32]:
        """Copies a group's pages, if there is a pool; gives the copies that are left to the engine."""
        copies = self._core.planned_page_copies(group) if shape.page_copies else NO_COPIES
        if len(copies) and self._pools:
            self._pools[group].copy_pages(copies)
            return NO_COPIES
        return copies

    def take_page_copies(self, group: str | None = None) -> NDArray[np.int32]:
        """Pages to copy before the next forward, for engines that build their own tables.

        `runtime_inputs` does this itself. Their pages stay in use until the copies are taken, so that an
        engine takes them for every step, after `alloc` and before its forward.

        Args:
            group: the group of layers, where there are several. Each has copies of its own.

        Returns:
            int32 [copies, 2], source and destination, to be carried out in this order. Mostly empty: a page
            is copied when a request writes behind tokens that another request, a transfer or the cache has.
            Each copy is given once. If one fails, carry out the whole list again before any forward.
        """
        return self._core.take_page_copies(self._groups.index(group))

    def take_page_fills(self, group: str | None = None) -> NDArray[np.int32]:
        """Pages to zero before the next forward and before page copies, for engines with tables of their own.

        Where groups share memory a page may hold what another group left there. `runtime_inputs` does this
        itself. Each page is given once.

        Args:
            group: the group of layers, where there are several.

        Returns:
            int32 [pages].

        Raises:
            ValueError: there is no such group.
        """
        return self._core.take_page_fills(self._groups.index(group))

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
            ValueError: unknown requests, requests without a step out, a forward that ran before its page
                copies (see `take_page_copies`), counts that do not match, more tokens than a step's drafts
                and one, or more than a length limit allows: cut accepted drafts to what `max_length` leaves,
                and release a request that has reached it instead of planning it.
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

    @overload
    def release(self, batch: Request) -> int | None: ...

    @overload
    def release(self, batch: Requests) -> list[int | None]: ...

    def release(self, batch: Batch) -> int | list[int | None] | None:
        """Ends requests and gives their pages back. What was shared stays cached until it is evicted.

        Legal at any time, also while a forward is out. With `store_partial_tails` the computed part of a
        block that is not full stays cached as well, unless something that begins with it is.

        Returns:
            The page of that block (in the first group of layers), or None where it is not kept: one for a
            context or a slot, one for each request of a list or an array.

        Raises:
            ValueError: a request is not claimed (released already, or never claimed), or is given twice.
        """
        tails = self._core.release(batch)
        return tails[0] if is_one(batch) else tails

    def contains(self, ctx: TextContext | EngineRequest) -> bool:
        """Whether a request with the `request_id` of `ctx` is claimed.

        Args:
            ctx: a `TextContext`, or an engine's own request.
        """
        if not hasattr(ctx, "request_id"):
            given = type(ctx).__name__
            raise TypeError(f"ctx: got {given}; give a TextContext, or an object with request_id")
        return self._core.contains(ctx.request_id)

    def _new_tables(self, num_draft_tokens: int) -> tuple[TableWriter, ...]:
        """Tables of each group that have room for requests with so many drafts."""
        return tuple(
            TableWriter(
                self._core,
                self.max_batch_size,
                max_tokens=self._most_computed_tokens(num_draft_tokens),
                new_staging=partial(staging_for, params.devices[0]),
                num_draft_tokens=num_draft_tokens,
                group=group,
                of_states=isinstance(params.kind, Recurrent | Scratch),
                encoder_pages=pages if isinstance(params.kind, CrossAttention) else None,
                offset_layout=partial(
                    OffsetLayout.of, params, self._memory.last_page(group), self._memory.stride(group)
                ),
            )
            for group, (params, pages) in enumerate(
                zip(self._groups.params, self._memory.usable_pages, strict=True)
            )
        )

    def _most_computed_tokens(self, num_draft_tokens: int) -> int:
        """Most tokens that one forward may compute.

        Each has a cell of a page to itself, but for those of padding requests, which have up to a page each.
        """
        most = (self.total_num_pages + self.max_batch_size) * self.params.page_size
        if self.max_num_input_tokens is None:
            return most
        return min(most, self.max_batch_size * (self.max_num_input_tokens + num_draft_tokens))


def _inputs(
    form: Form,
    tables: AnyTables,
    copies: NDArray[np.int32] = NO_COPIES,
    fills: NDArray[np.int32] = NO_FILLS,
) -> KVCacheInputs[Tables]:
    """The inputs of one group."""
    if isinstance(tables, StateTables):
        return KVCacheInputs(form, (), copies, fills, states=(tables,))
    if isinstance(tables, CrossTables):
        return KVCacheInputs(form, (), copies, fills, cross=(tables,))
    return KVCacheInputs(form, (tables,), copies, fills)
