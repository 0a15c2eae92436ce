"""The cache of one model: which request's KV lies where, what is shared, and what goes when room is short."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pagekeeper._native import Ledger, TextContext
from pagekeeper.context import read_request
from pagekeeper.counts import BlockCount, PrefixReuseSummary
from pagekeeper.hashing import resolve_seed
from pagekeeper.params import KVCacheParams
from pagekeeper.staging import staging_for
from pagekeeper.tables import Form, KVCacheInputs, TableWriter
from pagekeeper.transfers import CompletedTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import ArrayLike, NDArray

    from pagekeeper.pools import DevicePool, Layout

__all__ = ["Batch", "PagedKVCacheManager"]

_log = logging.getLogger("pagekeeper")
_COMPLETED = CompletedTransfer()

Batch: TypeAlias = "TextContext | Sequence[TextContext] | NDArray[np.int32]"
"""One request, a list of requests, or their slots as a 1-D int32 array."""


class PagedKVCacheManager:
    """A paged KV cache with prefix sharing.

    A request lives through five calls::

        kv.claim(ctx)                          # a slot, no memory yet
        kv.alloc(ctx)                          # prefix hits, and pages for the next forward
        inputs = kv.runtime_inputs([[ctx]])    # what the kernels read
        ctx.update(token)                      # after the forward: the token that it gave
        kv.step(ctx)                           # the KV is computed: share the blocks that are full
        kv.release(ctx)                        # give the pages back

    `alloc` to `step` repeat for every forward. Every call takes a batch: one context, a list of contexts, or
    an int32 array of the slots that `claim` returned. A call that raises has changed nothing.

    Args:
        params: geometry and behaviour of the cache.
        session: accepted for code written for other engines; not used.
        total_num_pages: usable pages; the pools hold one more, the null page 0.
        max_batch_size: most requests of one replica in `runtime_inputs`.
        available_bytes: instead of `total_num_pages`: bytes for the pools, null page included.
        max_seq_len: most tokens of one request, prompt and output. None: as many as the pool holds.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit.
        reserve: "chunk" takes pages for the chunk to compute, "prompt" for the whole prompt at once.
        allocate_pools: False gives the ledger and tables without memory of our own; torch is not imported.
        buffers: a pool to adopt, as a list of one tensor [pages + 1, layers, 2, page_size, heads, head_dim].
        model_name: for logs and, later, for the identity of stored blocks.
        weights_revision: for the identity of stored blocks.

    Raises:
        ValueError: sizes that are missing, doubled, not positive, or too small.
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
    ) -> None:
        if not isinstance(params, KVCacheParams):
            raise TypeError(f"params: got {type(params).__name__}, must be a KVCacheParams")
        pages = _usable_pages(params, total_num_pages, available_bytes)
        if max_batch_size is None:
            raise ValueError("max_batch_size: missing; most requests of one replica in runtime_inputs")
        _check_positive("max_batch_size", max_batch_size)
        _check_positive("max_seq_len", max_seq_len)
        _check_positive("max_num_input_tokens", max_num_input_tokens)
        self.params = params
        self.total_num_pages = pages
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_input_tokens = max_num_input_tokens
        self.model_name = model_name
        self.weights_revision = weights_revision
        self._hash_seed = resolve_seed(params)
        self._core = Ledger(
            page_size=params.page_size,
            pages=pages,
            max_batch_size=max_batch_size,
            prefix_caching=params.enable_prefix_caching,
            algo=params.kv_hash_algo,
            seed=self._hash_seed,
            on_duplicate=params.on_duplicate,
            reserve=reserve,
            priority=params.default_retention_priority,
            max_seq_len=max_seq_len,
            max_num_input_tokens=max_num_input_tokens,
        )
        most_pages = pages if max_seq_len is None else min(pages, -(-max_seq_len // params.page_size))
        self._tables = TableWriter(
            self._core,
            max_batch_size,
            most_pages,
            max_tokens=pages * params.page_size + max_batch_size,
            new_staging=partial(staging_for, params.devices[0]),
        )
        self._pool: DevicePool | None = None
        if allocate_pools or buffers is not None:
            from pagekeeper.pools import DevicePool

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

    def claim(self, ctx: Any, replica_idx: int = 0) -> int:
        """Reserves a slot for a request; no page is taken.

        Args:
            ctx: a `TextContext`, or an engine's own request with `request_id`, `tokens` and, where it has
                them, the other arguments of `TextContext` as attributes. Such a request is read once, here,
                and fed by its slot afterwards.
            replica_idx: the data-parallel replica; 0.

        Returns:
            The slot, an int32 number for arrays of slots. Its low 20 bits are a dense index, the bits above
            a generation: the slot of a released request is an error, never another request.

        Raises:
            ValueError: the request or its id is claimed already, there is no such replica, or the prompt is
                over a length limit.
        """
        self._check_replica(replica_idx)
        return self._core.claim(ctx if isinstance(ctx, TextContext) else read_request(ctx))

    def alloc(self, batch: Batch, num_tokens: int | Sequence[int] | None = None) -> Any:
        """Takes prefix hits and reserves pages for the next forward, for all of `batch` or for none.

        Reuse is tried until a prompt is computed: the position moves to the end of the longest stored prefix,
        at most to the token before the last. A forward then computes `ctx.active_length` tokens.
        It may be called for the next step before the results of the last one are known.

        Args:
            batch: the requests.
            num_tokens: most tokens to compute, one number or one a request.

        Returns:
            A transfer that is complete when the pages may be read: one, or a list of them for a batch.

        Raises:
            InsufficientBlocksError: no room now; names the first request that did not fit.
            RequestTooLargeError: never enough room.
            ValueError: unknown, doubled or already planned requests, or nothing left to compute.
        """
        count = self._core.alloc(batch, num_tokens)
        return _COMPLETED if isinstance(batch, TextContext) else [_COMPLETED] * count

    def alloc_dummy(self, ctx: TextContext, replica_idx: int = 0) -> CompletedTransfer:
        """Plans a padding request: its table row is all null pages, it takes no page and stores nothing.

        Claims it if it is not claimed. `step` and `release` work as for any request.

        Raises:
            ValueError: the request was planned before.
        """
        claimed_here = ctx.slot is None
        if claimed_here:
            self.claim(ctx, replica_idx)
        try:
            self._core.alloc_dummy(ctx)
        except BaseException:
            if claimed_here:
                self._core.release(ctx)
            raise
        return _COMPLETED

    def runtime_inputs(self, batches: Sequence[Batch], form: Form = "max") -> KVCacheInputs:
        """What the kernels read for the forward that `alloc` planned.

        Args:
            batches: one batch a data-parallel replica.
            form: "max", "vllm" (also FlashAttention) or "flashinfer".

        Returns:
            One entry a replica, rows in the order of its batch. Arrays are numpy's for a cache on the CPU,
            otherwise tensors on its device, whose copies are queued on the current stream. They are views of
            memory that is used again, valid until the second next call in the same form.

        Raises:
            ValueError: a wrong number of batches, a batch over `max_batch_size`, requests not planned.
        """
        if len(batches) != 1:
            raise ValueError(f"batches: {len(batches)} given, must be 1, one batch a data-parallel replica")
        return KVCacheInputs(form, (self._tables.write(batches[0], form),))

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
                drafts. None: one each.

        Raises:
            ValueError: unknown requests, requests without a step out, counts that do not match.
        """
        self._core.step(batch, new_tokens, counts)

    def preempt(self, batch: Batch) -> None:
        """Takes all pages from requests, which stay claimed.

        The next `alloc` starts them over, from what is still cached then. The results of a forward that was
        launched with them are still due: deliver them with `step`, which drops them.
        """
        self._core.preempt(batch)

    def release(self, batch: Batch) -> None:
        """Ends requests and gives their pages back. What was shared stays cached until it is evicted.

        Legal at any time, also while a forward is out.

        Raises:
            ValueError: a request is not claimed (released already, or never claimed).
        """
        self._core.release(batch)

    def contains(self, ctx: Any) -> bool:
        """Whether a request with this id is claimed."""
        return self._core.contains(ctx.request_id)

    # Steps and transfers.

    def begin_step(self, now: float | None = None, completions: Sequence[int] | None = None) -> int:
        """Opens the next step if the newest is closed or planned; gives its number.

        `alloc` does this by itself. Engines that build their own tables, and so never call `runtime_inputs`,
        call it when a forward is launched before the last one's results are known.

        Args:
            now: seconds of a clock that never goes back.
            completions: transfers that have ended.
        """
        return self._core.begin_step(now, list(completions or ()))

    def poll_transfers(self, completions: Sequence[int] | None = None) -> list[Any]:
        """Ends transfers; gives the requests that became ready or failed (none without a connector)."""
        if completions:
            self._core.finish_copies(list(completions))
        return []

    # What is there.

    def block_count(self, replica_idx: int = 0, group: str | None = None) -> BlockCount:
        """Free and total pages of a replica's pool. Cached pages that nobody uses are free."""
        self._check_replica(replica_idx)
        self._check_group(group)
        free, total = self._core.block_count()
        return BlockCount(free, total)

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
            replica_idx: the data-parallel replica.
        """
        self._check_replica(replica_idx)
        held, present, first_new = self._core.probe(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
        )
        return PrefixReuseSummary(held, present, first_new, device_blocks=present)

    def probe_prefix_match_length(self, tokens: ArrayLike, **what: Any) -> int:
        """Tokens that a prompt would reuse now, for routers. May be called from any thread.

        Takes the arguments of `analyze_prefix_reuse`.
        """
        return self.analyze_prefix_reuse(tokens, **what).reusable_blocks_all * self.params.page_size

    def commit_and_get_block_hashes(self, ctx: TextContext, group: str | None = None) -> list[bytes]:
        """Shares what is computed and full, and gives the hashes of the request's full blocks in order.

        Calling it again changes nothing. Without prefix caching there are no hashes.
        """
        self._check_group(group)
        return self._core.commit(ctx)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block, as after a change of weights.

        Requests that hold pages go on, and neither reuse nor share from now on, until they are preempted.
        The cost does not grow with the cache.
        """
        self._core.reset_prefix_cache()

    def metrics(self) -> dict[str, int]:
        """Counters since the start and gauges of now, by name."""
        return self._core.metrics()

    @property
    def hash_seed(self) -> str | None:
        """The seed of the block hashes, 64 hexadecimal characters; None is no seed."""
        return self._hash_seed

    # Tables beside `runtime_inputs`, and memory.

    def get_cache_indices(self, ctx: TextContext, group: str | None = None) -> list[list[int]]:
        """The page of each block, as [beam][block]."""
        self._check_group(group)
        return [self._core.pages(ctx)[0].tolist()]

    def get_batch_cache_indices(self, batch: Batch, group: str | None = None) -> list[list[list[int]]]:
        """The page of each block, as [request][beam][block]."""
        self._check_group(group)
        return [[pages.tolist()] for pages in self._core.pages(batch)]

    def slot_mapping(self, ctx: TextContext, positions: ArrayLike) -> NDArray[np.int64]:
        """Where the KV of tokens goes: page * page_size + offset of each position; int64 [positions].

        Raises:
            ValueError: a position that the request has no page for.
        """
        import numpy as np

        return self._core.slot_mapping(ctx, np.ascontiguousarray(positions, np.int64))

    def copy_block_offsets(self, out: NDArray[np.int32], slot: int, ctx: TextContext) -> int:
        """Writes a request's row of a TensorRT-LLM block-offset table.

        The entry of a page is `page * layers * 2 + field` (0 keys, 1 values), as in block-first pools; the
        kernels add the layer. Cells without a page are all ones.

        Args:
            out: int32 [1 pool, rows, 2, blocks].
            slot: the row to write.
            ctx: the request.

        Returns:
            The number of blocks.

        Raises:
            ValueError: a page size that is 1 or no power of two, or a table that is too small.
        """
        import numpy as np

        size = self.params.page_size
        if size < 2 or size & (size - 1):
            raise ValueError(f"page_size={size}: TensorRT-LLM tables need a power of two above 1")
        pages = self._core.pages(ctx)[0]
        if out.dtype != np.int32 or out.ndim != 4 or out.shape[0] != 1 or out.shape[2] != 2:
            raise ValueError(f"out: {out.dtype} {list(out.shape)}, must be int32 [1, rows, 2, blocks]")
        if not 0 <= slot < out.shape[1] or len(pages) > out.shape[3]:
            raise ValueError(f"out: {list(out.shape)} has no row {slot} of {len(pages)} blocks")
        out[0, slot] = -1
        first = pages * (self.params.num_layers * 2)
        out[0, slot, 0, : len(pages)] = np.where(pages > 0, first, -1)
        out[0, slot, 1, : len(pages)] = np.where(pages > 0, first + 1, -1)
        return len(pages)

    def get_buffers(self, layer: int, layout: Layout = "NHD") -> torch.Tensor:
        """One layer's keys and values: a view [pages + 1, 2, page_size, heads, head_dim] of the pool.

        Page 0 is the null page. With layout "HND" tokens and heads change places; nothing is copied.
        """
        return self._require_pool().layer(layer, layout)

    def pages_view(self) -> torch.Tensor:
        """Every page as bytes: uint8 [pages + 1, bytes_per_page], a view of the pool."""
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
        """Drops the pool's memory. Calling it again does nothing."""
        self._pool = None

    def _require_pool(self) -> DevicePool:
        if self._pool is None:
            raise ValueError("there is no pool: allocate_pools=False was given, or the manager is shut down")
        return self._pool

    def _check_replica(self, replica_idx: int) -> None:
        if replica_idx != 0:
            raise ValueError(f"replica_idx={replica_idx}: must be 0, there is one replica")

    def _check_group(self, group: str | None) -> None:
        if group is not None:
            raise ValueError(f"group={group!r}: must be None, the cache has one group")


def _usable_pages(params: KVCacheParams, total_num_pages: int | None, available_bytes: int | None) -> int:
    if (total_num_pages is None) == (available_bytes is None):
        raise ValueError("give total_num_pages or available_bytes, one of them")
    if total_num_pages is not None:
        _check_positive("total_num_pages", total_num_pages)
        return total_num_pages
    _check_positive("available_bytes", available_bytes)
    assert available_bytes is not None
    pages = available_bytes // params.bytes_per_page - 1
    if pages < 1:
        raise ValueError(
            f"available_bytes={available_bytes}: must be at least {2 * params.bytes_per_page}, "
            "one page and the null page"
        )
    return pages


def _check_positive(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r}: must be an int")
    if not 1 <= value < 2**31:
        raise ValueError(f"{name}={value}: must be 1 to 2**31 - 1")
