"""A cache that holds nothing, for tests and for engines that run without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pagekeeper._native import TextContext
from pagekeeper.calls import Batch, Request, is_one
from pagekeeper.context import RequestID
from pagekeeper.counts import BlockCount, ByteCount, PrefixReuseSummary
from pagekeeper.events import Event, EventSnapshot
from pagekeeper.groups import Buffers
from pagekeeper.manager import PagedKVCacheManager
from pagekeeper.params import MHAKVCacheParams, MultiKVCacheParams, Priority
from pagekeeper.scheduler_calls import Demand, Summary
from pagekeeper.tables import (
    NO_COPIES,
    NO_FILLS,
    FlashInferTables,
    Form,
    KVCacheInputs,
    MaxTables,
    Tables,
    TensorRTTables,
    VllmTables,
    check_form,
    table_columns,
)
from pagekeeper.transfers import CompletedTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import ArrayLike, NDArray

    from pagekeeper.connectors import KVConnector
    from pagekeeper.context import EngineRequest
    from pagekeeper.params import KVCacheParams
    from pagekeeper.pools import Layout, PoolPointers

__all__ = ["DummyKVCache"]


class DummyKVCache(PagedKVCacheManager):
    """A `PagedKVCacheManager` whose calls do nothing: every request is there, every transfer is complete.

    It has one page, which is free, and no memory behind it: `get_buffers`, `pages_view` and `pool_pointers`
    raise a ValueError, as in a manager without pools.

    Args:
        params: kept; None describes the smallest cache.
        session: not used.
        total_num_pages: kept, of several groups their sum; None is 1. `block_count` is 1 of 1 whatever is
            given.
        max_batch_size: kept; None is 1.

    The other arguments of `PagedKVCacheManager` are taken; sizes and names are kept, and nothing is checked.
    """

    def __init__(
        self,
        params: KVCacheParams | MultiKVCacheParams | None = None,
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
        if params is None:
            params = MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1, page_size=1)
        self.params = params
        if isinstance(total_num_pages, Mapping):
            total_num_pages = sum(total_num_pages.values())
        self.total_num_pages = 1 if total_num_pages is None else total_num_pages
        self.max_batch_size = 1 if max_batch_size is None else max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_input_tokens = max_num_input_tokens
        self.model_name = model_name
        self.weights_revision = weights_revision

    def claim(self, ctx: TextContext | EngineRequest, replica_idx: int = 0) -> int:
        return 0

    def fork(self, ctx: Request, request_id: str | int | None = None) -> TextContext:
        """A request with the tokens of a context; one token for a slot."""
        tokens = ctx.tokens if isinstance(ctx, TextContext) else [0]
        return TextContext(RequestID() if request_id is None else request_id, tokens)

    def alloc(self, batch: Batch, num_tokens: int | ArrayLike | None = None) -> Any:
        return CompletedTransfer() if is_one(batch) else [CompletedTransfer()] * _requests(batch)

    def alloc_dummy(self, ctx: Request, replica_idx: int = 0) -> CompletedTransfer:
        return CompletedTransfer()

    def runtime_inputs(self, batches: Sequence[Batch], form: Form = "max") -> KVCacheInputs[Any]:
        """Tables of the right batch size, all zeros."""
        check_form(form)
        sizes = [_requests(batch) for batch in batches]
        if not isinstance(self.params, MultiKVCacheParams):
            return KVCacheInputs(form, tuple(_empty_tables(form, size) for size in sizes))
        groups = {
            name: KVCacheInputs(form, tuple(_empty_tables(form, size) for size in sizes))
            for name in self.params
        }
        return KVCacheInputs(form, groups=groups)

    def step(
        self,
        batch: Batch,
        new_tokens: int | ArrayLike | None = None,
        counts: int | ArrayLike | None = None,
    ) -> None:
        pass

    def take_page_copies(self, group: str | None = None) -> NDArray[np.int32]:
        return NO_COPIES

    def take_page_fills(self, group: str | None = None) -> NDArray[np.int32]:
        return NO_FILLS

    def truncate(self, ctx: Request, length: int) -> None:
        pass

    def preempt(self, batch: Batch) -> None:
        pass

    def suspend(self, batch: Batch) -> Any:
        return CompletedTransfer() if is_one(batch) else [CompletedTransfer()] * _requests(batch)

    def resume(self, batch: Batch) -> Any:
        return CompletedTransfer() if is_one(batch) else [CompletedTransfer()] * _requests(batch)

    def sleep(self, timeout: float = 5.0) -> None:
        pass

    def wake(self, buffers: Buffers | Mapping[str, Buffers] | None = None) -> None:
        pass

    def release(self, batch: Batch) -> Any:
        return None if is_one(batch) else [None] * _requests(batch)

    def contains(self, ctx: TextContext | EngineRequest) -> bool:
        return True

    def begin_step(self, now: float | None = None, completions: Sequence[int] | None = None) -> int:
        return 0

    def poll_transfers(self, completions: Sequence[int] | None = None) -> list[object]:
        return []

    def block_count(self, replica_idx: int = 0, group: str | None = None) -> BlockCount:
        return BlockCount(free=1, total=1)

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
    ) -> CompletedTransfer:
        return CompletedTransfer()

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        return ByteCount(free=1, total=1)

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        return ByteCount(free=1, total=1)

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
        return PrefixReuseSummary(0, 0, None, 0)

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
        return 0

    def pin(self, ctx: Request) -> int:
        return 0

    def unpin(self, pin: int) -> None:
        pass

    def session_hint(
        self,
        batch: Batch,
        hint: Literal["resume_soon", "done"],
        *,
        priority: Priority = "high",
        duration_ms: float | None = 600_000.0,
    ) -> None:
        pass

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
        return 0

    def commit_and_get_block_hashes(self, ctx: Request, group: str | None = None) -> list[bytes]:
        return []

    def reset_prefix_cache(self, weights_revision: str | None = None) -> None:
        pass

    def metrics(self) -> dict[str, int]:
        return {}

    def histograms(self) -> dict[str, tuple[int, ...]]:
        return {}

    def get_latest_events(self, timeout: float = 0.0) -> list[Event]:
        return []

    def event_snapshot(self) -> EventSnapshot:
        return EventSnapshot(-1, ())

    @property
    def hash_seed(self) -> str | None:
        return None

    def get_cache_indices(self, ctx: Request, group: str | None = None) -> list[list[int]]:
        """One beam without blocks."""
        return [[]]

    def get_batch_cache_indices(self, batch: Batch, group: str | None = None) -> list[list[list[int]]]:
        """One beam without blocks for each request."""
        return [[[]] for _ in range(_requests(batch))]

    def slot_mapping(self, ctx: Request, positions: ArrayLike, group: str | None = None) -> NDArray[np.int64]:
        """Zeros, in the null page."""
        return np.zeros(len(np.atleast_1d(positions)), np.int64)

    def copy_block_offsets(
        self, out: NDArray[np.int32], slot: int, ctx: Request, group: str | None = None
    ) -> int:
        return 0

    def get_buffers(
        self, layer: int, layout: Layout = "NHD", name: str = "kv", group: str | None = None
    ) -> torch.Tensor:
        raise ValueError("there is no pool: a DummyKVCache has none")

    def pool_pointers(self, group: str | None = None) -> tuple[PoolPointers, ...]:
        raise ValueError("there is no pool: a DummyKVCache has none")

    def pages_view(self, group: str | None = None) -> torch.Tensor:
        raise ValueError("there is no pool: a DummyKVCache has none")

    def get_needed_blocks_one_step(
        self,
        batch: Batch,
        two_step_lookahead: bool = False,
        group: str | None = None,
        summary: Summary = None,
        *,
        num_tokens: int | ArrayLike | None = None,
    ) -> Any:
        """None."""
        return 0 if is_one(batch) else np.zeros(_requests(batch), np.int32)

    def get_remaining_blocks_to_completion(
        self,
        batch: Batch,
        group: str | None = None,
        summary: Summary = None,
        *,
        two_step_lookahead: bool = False,
        num_tokens: int | ArrayLike | None = None,
    ) -> Any:
        """None."""
        return 0 if is_one(batch) else np.zeros(_requests(batch), np.int32)

    def can_alloc(self, batch: Batch, num_tokens: int | ArrayLike | None = None) -> bool:
        return True

    def can_satisfy(self, blocks: Demand, at_capacity: bool = False) -> bool:
        return True

    def reuse_adjusted_compute(self, batch: Batch, num_tokens: int | ArrayLike | None = None) -> Any:
        """Nothing."""
        return 0 if is_one(batch) else np.zeros(_requests(batch), np.int32)

    @property
    def chunk_alignment_tokens(self) -> int:
        """0: a chunk may end anywhere."""
        return 0

    def chunk_tokens(self, batch: Batch, num_tokens: int | ArrayLike | None = None) -> Any:
        """What is asked for; without a number as much as there may be."""
        most = np.iinfo(np.int32).max if num_tokens is None else num_tokens
        if is_one(batch):
            return int(np.ravel(most)[0])
        return np.full(_requests(batch), most, np.int32)

    def get_request_kv_block_budget(self, ctx: Request) -> tuple[int, int] | None:
        return None

    def shorten(self, batch: Batch, num_tokens: int | ArrayLike) -> None:
        pass

    def start_scheduling(self, now: float | None = None) -> None:
        pass

    def scheduling_reserve(self, ctx: Request, blocks: Demand, group: str | None = None) -> bool:
        return True

    def scheduling_remove(self, ctx: Request) -> None:
        pass

    def scheduling_has_free_blocks(self, blocks: Demand, group: str | None = None) -> bool:
        return True

    def verify(self) -> None:
        pass

    def fingerprint(self) -> int:
        return 0

    def debug_dump(self) -> str:
        return "DummyKVCache"

    def shutdown(self) -> None:
        pass


def _requests(batch: Batch) -> int:
    return 1 if is_one(batch) else len(batch)  # type: ignore[arg-type]


def _empty_tables(form: Form, batch: int) -> Tables:
    lengths, offsets = np.zeros(batch, np.int32), np.zeros(batch + 1, np.int32)
    if form == "max":
        table = np.zeros((batch, table_columns(0)), np.uint32)
        return MaxTables(table, lengths.view(np.uint32), 0, 0)
    if form == "vllm":
        return VllmTables(np.zeros((batch, 0), np.int32), lengths, np.zeros(0, np.int64), offsets, 0, 0)
    if form == "tensorrt":
        return TensorRTTables((np.full((batch, 2, 0), -1, np.int32),), lengths, offsets, 0, 0)
    return FlashInferTables(offsets, np.zeros(0, np.int32), lengths, offsets.copy(), 0, 0)
