"""A cache that holds nothing, for tests and for engines that run without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagekeeper.counts import BlockCount, PrefixReuseSummary
from pagekeeper.manager import Batch, PagedKVCacheManager
from pagekeeper.tables import FlashInferTables, Form, KVCacheInputs, MaxTables, VllmTables, check_form
from pagekeeper.transfers import CompletedTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DummyKVCache"]


class DummyKVCache(PagedKVCacheManager):
    """A `PagedKVCacheManager` whose calls do nothing: every request is there, every transfer is complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes and ignores the arguments of `PagedKVCacheManager`."""

    def claim(self, ctx: Any, replica_idx: int = 0) -> int:
        return 0

    def alloc(self, batch: Batch, num_tokens: Any = None) -> Any:
        if isinstance(batch, list | tuple | np.ndarray):
            return [CompletedTransfer()] * len(batch)
        return CompletedTransfer()

    def alloc_dummy(self, ctx: Any, replica_idx: int = 0) -> CompletedTransfer:
        return CompletedTransfer()

    def runtime_inputs(self, batches: Sequence[Batch], form: Form = "max") -> KVCacheInputs:
        """Tables of the right batch size, all zeros."""
        check_form(form)
        return KVCacheInputs(form, tuple(_empty_tables(form, len(batch)) for batch in batches))

    def step(self, batch: Batch, new_tokens: Any = None, counts: Any = None) -> None:
        pass

    def preempt(self, batch: Batch) -> None:
        pass

    def release(self, batch: Batch) -> None:
        pass

    def contains(self, ctx: Any) -> bool:
        return True

    def poll_transfers(self, completions: Sequence[int] | None = None) -> list[Any]:
        return []

    def begin_step(self, now: float | None = None, completions: Sequence[int] | None = None) -> int:
        return 0

    def block_count(self, replica_idx: int = 0, group: str | None = None) -> BlockCount:
        return BlockCount(free=1, total=1)

    def metrics(self) -> dict[str, int]:
        return {}

    def commit_and_get_block_hashes(self, ctx: Any, group: str | None = None) -> list[bytes]:
        return []

    def analyze_prefix_reuse(self, tokens: Any, **what: Any) -> PrefixReuseSummary:
        return PrefixReuseSummary(0, 0, None, 0)

    def probe_prefix_match_length(self, tokens: Any, **what: Any) -> int:
        return 0

    def reset_prefix_cache(self) -> None:
        pass

    def verify(self) -> None:
        pass

    def fingerprint(self) -> int:
        return 0

    def debug_dump(self) -> str:
        return "DummyKVCache"

    def shutdown(self) -> None:
        pass

    @property
    def hash_seed(self) -> str | None:
        return None


def _empty_tables(form: Form, batch: int) -> MaxTables | VllmTables | FlashInferTables:
    lengths, offsets = np.zeros(batch, np.int32), np.zeros(batch + 1, np.int32)
    if form == "max":
        return MaxTables(np.zeros((batch, 16), np.uint32), lengths.view(np.uint32), 0, 0)
    if form == "vllm":
        return VllmTables(np.zeros((batch, 0), np.int32), lengths, np.zeros(0, np.int64), offsets, 0, 0)
    return FlashInferTables(offsets, np.zeros(0, np.int32), lengths, offsets.copy(), 0, 0)
