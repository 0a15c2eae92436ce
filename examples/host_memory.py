"""A connector in Python: blocks that leave the device are kept in host memory, and come back from there.

It shows the protocol, not speed: each copy is made at once, in the thread of the scheduler. A start for a
connector of your own; docs/connectors.md has one that copies in threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch

from pagekeeper import BlockKey, ByteCount, CompletedTransfer, KVLoadRefused


class HostMemory:
    """Keeps up to `blocks` blocks, the least recently used go first.

    Args:
        pages: gives the device pool as bytes, uint8 [pages + 1, bytes a page], such as
            `PagedKVCacheManager.pages_view`. It is asked at each copy, so a connector can be made first.
        blocks: most blocks to keep.
    """

    def __init__(self, pages: Callable[[], torch.Tensor], blocks: int) -> None:
        self._pages = pages
        self._room = blocks
        self._kept: OrderedDict[bytes, tuple[bytes, torch.Tensor]] = OrderedDict()
        self._bytes_a_block = 0
        self._counts = {"loaded": 0, "kept": 0, "evicted": 0, "guard_mismatches": 0}

    def lookup(
        self, block_hashes: Sequence[BlockKey], replica_idx: int = 0, hint: object = None
    ) -> list[bool]:
        return [self._has(key) for key in block_hashes]

    def count_cached_prefix(
        self, block_hashes: Sequence[BlockKey], replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]:
        present = self.lookup(block_hashes)
        return (present.index(False) if False in present else len(present)), 0

    def load(
        self,
        block_ids: Sequence[int],
        block_hashes: Sequence[BlockKey],
        replica_idx: int = 0,
        hint: object = None,
    ) -> CompletedTransfer:
        if not all(self.lookup(block_hashes)):
            raise KVLoadRefused("a block is not in host memory any more")
        pages = self._pages()
        for page, key in zip(block_ids, block_hashes, strict=True):
            pages[page].copy_(self._kept[key.hash][1])
        self.touch(block_hashes)
        self._counts["loaded"] += len(block_ids)
        return CompletedTransfer()

    def offload(
        self, block_ids: Sequence[int], block_hashes: Sequence[BlockKey], replica_idx: int = 0
    ) -> CompletedTransfer:
        pages = self._pages()
        self._bytes_a_block = pages.shape[1]
        for page, key in zip(block_ids, block_hashes, strict=True):
            self._kept[key.hash] = (key.guard, pages[page].clone())
            self._counts["kept"] += 1
        self.touch(block_hashes)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)
            self._counts["evicted"] += 1
        return CompletedTransfer()

    def touch(self, block_hashes: Sequence[BlockKey], replica_idx: int = 0) -> None:
        # The last block of a prefix goes first: without the ones before it, it cannot be used.
        for key in reversed(block_hashes):
            if key.hash in self._kept:
                self._kept.move_to_end(key.hash)

    def wait_for_loads(self) -> None:
        pass  # each copy was made when it was asked for

    def wait_for_offloads(self) -> None:
        pass

    def host_byte_count(self, replica_idx: int = 0) -> ByteCount:
        free = self._room - len(self._kept)
        return ByteCount(free * self._bytes_a_block, self._room * self._bytes_a_block)

    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount:
        return ByteCount(0, 0)

    def metrics(self) -> Mapping[str, int]:
        return {**self._counts, "blocks": len(self._kept)}

    def reset_prefix_cache(self) -> None:
        self._kept.clear()

    def shutdown(self) -> None:
        self._kept.clear()

    def _has(self, key: BlockKey) -> bool:
        guard, _ = self._kept.get(key.hash, (None, None))
        if guard is not None and guard != key.guard:
            self._counts["guard_mismatches"] += 1
        return guard == key.guard


def main() -> None:
    """Two conversations take turns on a device that holds one of them."""
    import numpy as np

    from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, RequestID, TextContext, TokenBuffer

    params = MHAKVCacheParams(dtype="float32", n_kv_heads=2, head_dim=16, num_layers=2, page_size=16)
    tier = HostMemory(lambda: kv.pages_view(), blocks=64)
    kv = PagedKVCacheManager(params=params, total_num_pages=9, max_batch_size=1, connector=tier)
    for turn in range(3):
        for speaker in (1, 2):
            prompt = TokenBuffer(np.full(128 + 1, speaker))
            ctx = TextContext(request_id=RequestID(), tokens=prompt)
            kv.claim(ctx)
            kv.alloc(ctx)
            print(f"turn {turn} of {speaker}: {ctx.cached_prefix_length} of {len(prompt)} tokens were there")
            kv.runtime_inputs([[ctx]])
            ctx.update(7)
            kv.step(ctx)
            kv.release(ctx)
    print(kv.metrics()["loaded_tokens"], "tokens came from host memory")
    kv.shutdown()


if __name__ == "__main__":
    main()
