"""The cache of one model: which request's KV lies where, what is shared, and what goes when room is short."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np

from pagekeeper._native import Ledger, TextContext
from pagekeeper.connectors import KVConnector
from pagekeeper.context import EngineRequest, RequestID, TokenBuffer, read_request
from pagekeeper.counts import BlockCount, ByteCount, PrefixReuseSummary
from pagekeeper.errors import shown
from pagekeeper.events import Event, EventSnapshot, from_native
from pagekeeper.hashing import resolve_seed
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.params import KVCacheParams, Priority, whole_number
from pagekeeper.pools import DevicePool, Layout, usable_pages
from pagekeeper.retention import TokenRangeRetention
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
    write_block_offsets,
)
from pagekeeper.transfers import CompletedTransfer, KVConnectorTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import ArrayLike, NDArray

__all__ = ["Batch", "PagedKVCacheManager", "Request"]

_log = logging.getLogger("pagekeeper")
_COMPLETED = CompletedTransfer()

Request: TypeAlias = "TextContext | int | np.integer"
"""A claimed request: its context, or the slot that `claim` returned."""

Requests: TypeAlias = "Sequence[TextContext] | NDArray[np.int32]"
"""Claimed requests: a list of contexts, or their slots as a 1-D int32 array."""

Batch: TypeAlias = "Request | Requests"
"""One claimed request, or several."""


class PagedKVCacheManager:
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
        buffers: a pool to adopt, as a list of one tensor [pages + 1, layers, 2, page_size, heads, head_dim].
        model_name: for log messages.
        weights_revision: kept; nothing uses it yet.
        connector: keeps blocks beyond the device. None: blocks live on the device alone.

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
        buffers: Sequence[torch.Tensor] | None = None,
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
        self.model_name = _text(model_name, "model_name")
        self.weights_revision = _text(weights_revision, "weights_revision")
        if not isinstance(allocate_pools, bool):
            raise TypeError(f"allocate_pools: got {shown(allocate_pools)}, must be True or False")
        if connector is not None:
            if not isinstance(connector, KVConnector):
                raise TypeError(f"connector: got {type(connector).__name__}, must be a KVConnector")
            if not params.enable_prefix_caching:
                raise ValueError("connector: needs enable_prefix_caching=True")
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
            guard_secret=None if connector is None else secrets.token_bytes(32),
            event_buffer_max_size=params.event_buffer_max_size,
        )
        self._connector = connector
        self._tiers = None if connector is None else OuterTiers(self._core, connector)
        self._tables = self._new_tables(num_draft_tokens=0)
        self._pool: DevicePool | None = None
        if allocate_pools or buffers is not None:
            self._pool = DevicePool(params, pages, buffers)
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
        self._check_replica(replica_idx)
        context = ctx if isinstance(ctx, TextContext) else read_request(ctx)
        slot = self._core.claim(context)
        if context.num_draft_tokens > self._tables.num_draft_tokens:
            self._tables = self._new_tables(context.num_draft_tokens)
        return slot

    def fork(self, ctx: Request, request_id: str | int | None = None) -> TextContext:
        """Claims a request that goes on from where another one stands, for parallel sampling.

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
        return _COMPLETED if is_one(batch) else [_COMPLETED] * count

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
        self._check_replica(replica_idx)
        claimed_here = isinstance(ctx, TextContext) and ctx.slot is None
        if isinstance(ctx, TextContext) and claimed_here:
            if len(ctx) > self.params.page_size:
                raise ValueError(
                    f"request {ctx.request_id!r}: {len(ctx)} tokens: over the limit of "
                    f"{self.params.page_size} (one page: padding goes to the null page)"
                )
            self.claim(ctx, replica_idx)
        try:
            self._core.alloc_dummy(ctx)
        except BaseException:
            if isinstance(ctx, TextContext) and claimed_here:
                self._core.unclaim(ctx)
            raise
        return _COMPLETED

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
            counts: how many tokens each request gets: 0 for an unfinished prompt, more than 1 for accepted
                drafts. None: one each. Of what a decode step of a request with `num_draft_tokens` brings,
                all but the last token are drafts that it accepted, which have KV; the rest of its drafts
                were rejected, and are written over.

        Raises:
            ValueError: unknown requests, requests without a step out, counts that do not match, more tokens
                than a step's drafts and one, or more than a length limit allows.
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
            now: seconds of a clock that never goes back; None leaves it as it was.
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
        blocks are computed, and the request loads no more. Without a connector there are none.

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

    def prefetch(
        self,
        tokens: TextContext | ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        hint: object = None,
        replica_idx: int = 0,
    ) -> KVConnectorTransfer:
        """Brings stored blocks to the device before they are needed.

        Args:
            tokens: a claimed request as its context, which then waits as after `alloc`; or tokens, whose
                stored full blocks are cached on the device when the transfer has been settled by
                `poll_transfers` or `begin_step`.
            salt: with tokens, as in `analyze_prefix_reuse`; so are the next ones.
            lora_id: as there.
            lora_generation: as there.
            mm_items: as there.
            prompt_embeds: as there.
            extra_ids: as there.
            overrides: as there.
            hint: with tokens: what connectors get as `hint`.
            replica_idx: the data-parallel replica; 0.

        Returns:
            A transfer, complete at once when there is nothing to load.

        Raises:
            InsufficientBlocksError: no room for the blocks now.
            ValueError: as in `alloc` and `analyze_prefix_reuse`.
        """
        self._check_replica(replica_idx)
        if isinstance(tokens, TextContext):
            if self._tiers is None:
                self._core.slots(tokens)
                return _COMPLETED
            return self._tiers.alloc(tokens, None, plan=False)[0]
        *_, missing = self._core.probe(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
            other_namespaces=False,
        )
        if self._tiers is None or not missing:
            return _COMPLETED
        known = TokenBuffer(tokens).all
        # The block with a request's last token is never loaded: one token more, if one may have so many.
        most = self.total_num_pages * self.params.page_size
        more = int(len(known) < min(most, self.max_seq_len or most))
        ctx = TextContext(
            request_id=RequestID(),
            tokens=np.append(known, known[:more]),
            cache_salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=None
            if extra_ids is None
            else np.append(np.asarray(extra_ids, np.uint64), np.zeros(more, np.uint64)),
            token_overrides=overrides,
            dkv_cache_hint=hint,
        )
        self._core.claim(ctx)
        return self._tiers.prefetch(ctx)

    # What is there.

    def block_count(self, replica_idx: int = 0, group: str | None = None) -> BlockCount:
        """Free and total pages of a replica's pool. Cached pages that nobody uses are free.

        Args:
            replica_idx: the data-parallel replica; 0.
            group: None, the only group of layers.

        Raises:
            ValueError: there is no such replica or group.
        """
        self._check_replica(replica_idx)
        self._check_group(group)
        free, total = self._core.block_count()
        return BlockCount(free, total)

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of the connector's host memory; none without a connector.

        Args:
            replica_idx: the data-parallel replica; 0.

        Raises:
            ValueError: there is no such replica.
        """
        self._check_replica(replica_idx)
        return ByteCount(0, 0) if self._connector is None else self._connector.host_byte_count(replica_idx)

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        """Bytes of the connector's disk; none without a connector.

        Args:
            replica_idx: the data-parallel replica; 0.

        Raises:
            ValueError: there is no such replica.
        """
        self._check_replica(replica_idx)
        return ByteCount(0, 0) if self._connector is None else self._connector.disk_byte_count(replica_idx)

    def analyze_prefix_reuse(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
        other_namespaces: bool = False,
    ) -> PrefixReuseSummary:
        """What a prompt would reuse now. Changes nothing.

        Args:
            tokens: the prompt.
            salt: isolates those who give different ones.
            lora_id: the adapter, by name or number.
            lora_generation: tells apart adapters loaded under one id.
            mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
            prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
            extra_ids: one unsigned number a token, 0 for none.
            overrides: (token index, value): content values in place of placeholder tokens.
            replica_idx: the data-parallel replica; 0.
            other_namespaces: whether to look for a block that was never stored under other salts and adapters
                too, at most 64 of them. The answer is whether, never which. For operators: it tells of one
                tenant's prompts what salts keep from the others. Slower, and the cache waits meanwhile.

        Raises:
            ValueError: what is out of range, and where; there is no such replica.
        """
        self._check_replica(replica_idx)
        held, present, first_new, miss_reason, evicted_at, rest = self._core.probe(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
            other_namespaces=other_namespaces,
        )
        if self._tiers is None or not rest:
            return PrefixReuseSummary(
                held, present, first_new, present, miss_reason=miss_reason, evicted_at_step=evicted_at
            )
        host, disk = self._tiers.count_cached_prefix(rest)
        found = host + disk
        return PrefixReuseSummary(
            held,
            min(present + found, (len(TokenBuffer(tokens)) - 1) // self.params.page_size),
            rest[found][0] if found < len(rest) else None,
            device_blocks=present,
            host_blocks=host,
            disk_blocks=disk,
            miss_reason=miss_reason if found < len(rest) else None,
            evicted_at_step=evicted_at if found < len(rest) else None,
        )

    def probe_prefix_match_length(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
    ) -> int:
        """Tokens that a prompt would reuse now, for routers. May be called from any thread.

        The arguments and errors are those of `analyze_prefix_reuse`, which also says why there are no more.
        """
        found = self.analyze_prefix_reuse(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
            replica_idx=replica_idx,
        )
        return found.reusable_blocks_all * self.params.page_size

    def commit_and_get_block_hashes(self, ctx: Request, group: str | None = None) -> list[bytes]:
        """Shares what is computed and full, and gives the hashes of the request's full blocks in order.

        Calling it again changes nothing. Without prefix caching there are no hashes. They are those of
        `hash_blocks` with the cache's `page_size`, `kv_hash_algo` and `hash_seed`.

        Args:
            ctx: the request.
            group: None, the only group of layers.

        Returns:
            8 bytes a block, or 32 for "sha256".

        Raises:
            ValueError: the request is not claimed, or there is no such group.
        """
        self._check_group(group)
        hashes = self._core.commit(ctx)
        if self._tiers is not None:
            self._tiers.offload()
        return hashes

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block, as after a change of weights.

        Requests that hold pages go on, and neither reuse nor share from now on, until they are preempted.
        The cost does not grow with the cache.
        """
        if self._connector is not None:
            self._connector.reset_prefix_cache()
        self._core.reset_prefix_cache()

    # What is kept, and what is forgotten on purpose.

    def pin(self, ctx: Request) -> int:
        """Keeps a request's stored blocks, also after its release, until `unpin`.

        Blocks that are not full, or not computed, are not stored yet and not pinned.

        Args:
            ctx: the request.

        Returns:
            A number for `unpin`.

        Raises:
            ValueError: the request is not claimed, or is padding.
        """
        return self._core.pin(ctx)

    def unpin(self, pin: int) -> None:
        """Ends a pin: its blocks are cached like others from now on.

        Args:
            pin: what `pin` returned.

        Raises:
            ValueError: it ended before, or never was.
        """
        self._core.unpin(whole_number(pin, "pin", least=0, most=2**64 - 1))

    def session_hint(
        self,
        batch: Batch,
        hint: Literal["resume_soon", "done"],
        *,
        priority: Priority = "high",
        duration_ms: float | None = 600_000.0,
    ) -> None:
        """Says what comes of the sessions of these requests, usually just before their release.

        "resume_soon": their stored blocks get `priority`, for `duration_ms` after the release, but for those
        that have a higher one, or the same for longer. "done": blocks that no other session shares are the
        first to be evicted; what is pinned stays as it is. Both end with the next use of a block by a request
        that has a retention of its own.

        Args:
            batch: the requests.
            hint: "resume_soon" or "done".
            priority: with "resume_soon": 0 to 100, or "low" (20), "medium" (35), "high" (80).
            duration_ms: with "resume_soon": milliseconds by the clock of `begin_step(now=...)`. None: no end.

        Raises:
            ValueError: a request that is not claimed or is given twice, or what is out of range.
        """
        kept = TokenRangeRetention(0, priority=priority, duration_ms=duration_ms)
        if hint == "done":
            self._core.session_done(batch)
        elif hint == "resume_soon":
            self._core.resume_soon(batch, *kept.native())
        else:
            raise ValueError(f"hint={shown(hint)}: must be 'resume_soon' or 'done'")

    def truncate_prefix(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
    ) -> int:
        """Forgets the stored blocks on the device that follow a prefix and that nobody uses.

        The prefix's own blocks stay. Without a full block, such as with no tokens, every unused block of that
        salt and adapter is forgotten.

        Args:
            tokens: the prefix; its full blocks count.
            salt: as in `analyze_prefix_reuse`, like the other arguments.
            lora_id: as there.
            lora_generation: as there.
            mm_items: as there.
            prompt_embeds: as there.
            extra_ids: as there.
            overrides: as there.
            replica_idx: the data-parallel replica; 0.

        Returns:
            How many blocks were forgotten.

        Raises:
            ValueError: what is out of range, and where; there is no such replica.
        """
        self._check_replica(replica_idx)
        return self._core.truncate_prefix(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
        )

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

    # Events, for indexes elsewhere.

    def get_latest_events(self, timeout: float = 0.0) -> list[Event]:
        """Takes the events recorded since the last call, oldest first. May be called from any thread.

        There are none unless `params.event_buffer_max_size` is set; then it does not wait either.
        `pagekeeper.events` says what they are.

        Args:
            timeout: seconds to wait for an event when there is none. Other threads run meanwhile.

        Raises:
            ValueError: a timeout below 0.
        """
        return from_native(self._core.take_events(timeout))

    def event_snapshot(self) -> EventSnapshot:
        """What is cached now, as events, for whoever missed some. May be called from any thread.

        It takes no event: those up to `last_event_id` are included, later ones go on from there. The cost
        grows with the cache, which waits meanwhile.
        """
        last_event_id, rows = self._core.event_snapshot()
        return EventSnapshot(last_event_id, tuple(from_native(rows)))

    @property
    def hash_seed(self) -> str | None:
        """The seed of the block hashes, 64 hexadecimal characters; None is no seed.

        It is what `hash_blocks` needs to give this cache's hashes. Who knows it can make hashes collide.
        """
        return self._hash_seed

    # Tables beside `runtime_inputs`, and memory.

    def get_cache_indices(self, ctx: Request, group: str | None = None) -> list[list[int]]:
        """The page of each block of one request, as [beam][block]; there is one beam.

        Raises:
            ValueError: the request is not claimed, or there is no such group.
        """
        self._check_group(group)
        return [self._core.pages_of(ctx).tolist()]

    def get_batch_cache_indices(self, batch: Batch, group: str | None = None) -> list[list[list[int]]]:
        """The page of each block, as [request][beam][block]; there is one beam.

        Raises:
            ValueError: a request is not claimed, or there is no such group.
        """
        self._check_group(group)
        return [[pages.tolist()] for pages in self._core.pages(batch)]

    def slot_mapping(self, ctx: Request, positions: ArrayLike) -> NDArray[np.int64]:
        """Where the KV of a request's tokens goes: page * page_size + offset.

        Args:
            ctx: the request.
            positions: token positions from 0, whole numbers, [positions].

        Returns:
            int64 [positions].

        Raises:
            ValueError: a position that the request has no page for, or a request that is not claimed.
        """
        return self._core.slot_mapping(ctx, positions)

    def copy_block_offsets(self, out: NDArray[np.int32], slot: int, ctx: Request) -> int:
        """Writes a request's row of a TensorRT-LLM block-offset table.

        The entry of a page is `page * layers * 2 + field` (0 keys, 1 values), as in block-first pools; the
        kernels add the layer. Cells without a page are all ones.

        Args:
            out: int32 [1 pool, rows, 2 fields, blocks].
            slot: the row to write, 0 to rows - 1.
            ctx: the request.

        Returns:
            The number of blocks.

        Raises:
            ValueError: a page size that is 1 or no power of two, a table that is too small, or an entry over
                2**31 - 1.
        """
        return write_block_offsets(out, slot, self._core.pages_of(ctx), self.params)

    def get_buffers(self, layer: int, layout: Layout = "NHD") -> torch.Tensor:
        """One layer's keys and values: a view [pages + 1, 2, page_size, heads, head_dim] of the pool.

        Page 0 is the null page. With layout "HND" tokens and heads change places; nothing is copied.

        Args:
            layer: 0 to layers - 1.
            layout: "NHD" or "HND".

        Raises:
            ValueError: no such layer or layout, or there is no pool.
        """
        return self._require_pool().layer(layer, layout)

    def pages_view(self) -> torch.Tensor:
        """Every page as bytes: uint8 [pages + 1, bytes_per_page], a view of the pool.

        Raises:
            ValueError: there is no pool.
        """
        return self._require_pool().pages()

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
        """Lets go of the pool, whose memory is free once nobody holds a view of it.

        The connector is shut down too. Only `get_buffers` and `pages_view` end with it: requests may still be
        stepped and released, and `verify` and `metrics` answer. Calling it again does nothing.
        """
        self._pool = None
        if self._connector is not None:
            self._connector.shutdown()

    def _require_pool(self) -> DevicePool:
        if self._pool is None:
            raise ValueError("there is no pool: allocate_pools=False was given, or the manager is shut down")
        return self._pool

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

    def _check_replica(self, replica_idx: int) -> None:
        if isinstance(replica_idx, bool | float) or replica_idx != 0:
            raise ValueError(f"replica_idx={shown(replica_idx)}: must be 0, there is one replica")

    def _check_group(self, group: str | None) -> None:
        if group is not None:
            raise ValueError(f"group={shown(group)}: must be None, the cache has one group")


def is_one(batch: Batch) -> bool:
    """Whether `batch` is one request, which is answered by one value instead of a list."""
    return isinstance(batch, TextContext) or (hasattr(batch, "__index__") and not hasattr(batch, "__len__"))


def _text(given: str | None, name: str) -> str | None:
    if given is not None and not isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}, must be a str")
    return given


def _limit(given: int | None, name: str) -> int | None:
    return None if given is None else whole_number(given, name)
