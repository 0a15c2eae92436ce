"""The native module: requests, the ledger, hashing. Use `pagekeeper`'s names, not this module.

What the names do is said in the Rust sources, whose comments are the docstrings.
"""

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagekeeper.calls import Batch, Request
from pagekeeper.connectors import BlockHashes, BlockIDs
from pagekeeper.context import TokenBuffer
from pagekeeper.counts import ByteCount, MissReason
from pagekeeper.params import HashAlgorithm
from pagekeeper.retention import RetentionConfig

__all__ = [
    "STORE_FILES",
    "BatchShape",
    "Completer",
    "DiskDirectory",
    "Ledger",
    "PrefixWalk",
    "RowMemory",
    "TextContext",
    "TieredConnector",
    "Transfer",
    "hash_blocks",
    "hash_blocks_batch",
    "hash_cpu_path",
    "inspect_store",
    "normalize_tokens",
    "pending_transfer",
    "slab_geometry",
    "store_bytes",
    "wipe_store",
]

STORE_FILES: tuple[str, ...]
"""The names of all files that a store has in its directory."""

@final
class TextContext:
    """One request: a handle on its token log."""

    def __new__(
        cls,
        request_id: str | int,
        tokens: ArrayLike | TokenBuffer,
        max_length: int | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Iterable[tuple[bytes, int, int]] | None = None,
        prompt_embeds: Iterable[tuple[bytes, int, int]] | None = None,
        extra_ids: ArrayLike | None = None,
        token_overrides: Iterable[tuple[int, int]] | None = None,
        retention: RetentionConfig | None = None,
        no_read: bool = False,
        no_store: bool = False,
        dkv_cache_hint: object = None,
        max_new_tokens: int | None = None,
        num_draft_tokens: int = 0,
        beam_width: int = 1,
        encoder_length: int | None = None,
    ) -> TextContext: ...
    @property
    def request_id(self) -> str | int:
        """The id that the request was made with."""
    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output."""
    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens to generate, as given, or None."""
    @property
    def no_read(self) -> bool:
        """Whether cached blocks are left alone."""
    @property
    def no_store(self) -> bool:
        """Whether the request's blocks are kept private."""
    @property
    def retention(self) -> RetentionConfig | None:
        """How long its blocks are kept, as given, or None."""
    @property
    def dkv_cache_hint(self) -> object:
        """What the request tells connectors, or None."""
    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that each decode step verifies."""
    @property
    def beam_width(self) -> int:
        """Requests that this one is forked into, itself among them, as given."""
    @property
    def encoder_length(self) -> int | None:
        """Tokens that an encoder made for layers of cross attention, or None."""
    @property
    def cache_salt(self) -> str | None:
        """The salt; None when there is none."""
    @property
    def tokens(self) -> TokenBuffer:
        """The known tokens, a copy."""
    @property
    def slot(self) -> int | None:
        """The slot while the request is claimed, else None."""
    @property
    def processed_length(self) -> int:
        """Tokens that have KV."""
    @property
    def active_length(self) -> int:
        """Tokens that the newest planned forward computes; 0 when none is out."""
    @property
    def cached_prefix_length(self) -> int:
        """Tokens of this admission that came from the cache instead of being computed."""
    @property
    def estimated_reusable_tokens(self) -> int:
        """Tokens that the next `alloc` would find on the device instead of computing them."""
    def update(self, token: int) -> None:
        """Appends one generated token, or fills the oldest placeholder."""
    def truncate(self, length: int) -> None:
        """Drops the tokens after the first `length`, with their KV and the request's steps out."""
    def __len__(self) -> int: ...

@final
class PrefixWalk:
    """Where a ledger found the blocks of a prompt. A copy of it is None."""

@final
class RowMemory:
    """What the ledger wrote into one table buffer last."""

    def __new__(cls) -> RowMemory: ...

@final
class BatchShape:
    """How much the tables of a batch hold, and its longest requests."""

    @property
    def requests(self) -> int:
        """Requests of the batch."""
    @property
    def active(self) -> int:
        """Tokens that the forward computes, over all requests."""
    @property
    def max_active(self) -> int:
        """Most tokens that it computes for one request."""
    @property
    def max_total(self) -> int:
        """Most tokens of one request after the forward."""
    @property
    def pages(self) -> int:
        """Page-table entries of all requests."""
    @property
    def page_copies(self) -> int:
        """Page copies that wait to be carried out."""
    @property
    def page_fills(self) -> int:
        """Pages that wait to be zeroed."""

@final
class Ledger:
    """The ledger of one replica; `PagedKVCacheManager` documents its verbs."""

    def __new__(
        cls,
        *,
        page_size: int,
        groups: list[tuple[str, int, int, int]],
        huge_pages: int | None,
        request_pages: list[int],
        max_batch_size: int,
        prefix_caching: bool,
        partial_reuse: bool,
        copy_on_partial_reuse: bool,
        store_partial_tails: bool,
        algo: HashAlgorithm,
        seed: str | bytes | None,
        on_duplicate: str,
        reserve: str,
        policy: str,
        priority: int,
        max_seq_len: int | None,
        max_num_input_tokens: int | None,
        guard_secret: bytes | None,
        tier: TieredConnector | None,
        write_policy: str,
        min_hits: int,
        min_priority: int | None,
        event_buffer_max_size: int,
    ) -> Ledger: ...
    def max_blocks_per_request(self, num_draft_tokens: int) -> int:
        """Most blocks that one request may have whose decode steps verify so many drafts."""
    def claim(self, context: TextContext) -> int: ...
    def unclaim(self, context: TextContext) -> None: ...
    def fork(self, request: Request, request_id: str | int) -> TextContext: ...
    def needed_blocks(
        self,
        batch: Batch,
        num_tokens: int | ArrayLike | None,
        two_steps: bool,
        to_completion: bool,
        walks: Sequence[PrefixWalk | None] | None = None,
    ) -> NDArray[np.int32]: ...
    def can_alloc(self, batch: Batch, num_tokens: int | ArrayLike | None) -> bool: ...
    def can_satisfy(self, blocks: ArrayLike, at_capacity: bool) -> bool: ...
    def reuse_adjusted_compute(
        self, batch: Batch, num_tokens: int | ArrayLike | None
    ) -> NDArray[np.int32]: ...
    def chunk_tokens(self, batch: Batch, num_tokens: int | ArrayLike | None) -> NDArray[np.int32]: ...
    def block_budget(self, request: Request) -> tuple[int, int] | None: ...
    def start_scheduling(self, now: float | None) -> None: ...
    def scheduling_reserve(self, request: Request, blocks: ArrayLike) -> bool: ...
    def scheduling_remove(self, request: Request) -> None: ...
    def scheduling_has_free_blocks(self, blocks: ArrayLike) -> bool: ...
    def shorten(self, batch: Batch, num_tokens: int | ArrayLike) -> None: ...
    def take_page_fills(self, group: int) -> NDArray[np.int32]: ...
    def planned_page_fills(self, group: int) -> NDArray[np.int32]: ...
    def take_page_copies(self, group: int) -> NDArray[np.int32]: ...
    def planned_page_copies(self, group: int) -> NDArray[np.int32]: ...
    def page_work_done(self, launches: bool) -> None: ...
    def alloc(self, batch: Batch, num_tokens: int | ArrayLike | None) -> int: ...
    def alloc_dummy(self, request: Request) -> None: ...
    def truncate(self, request: Request, length: int) -> None: ...
    def step(
        self,
        batch: Batch,
        new_tokens: int | ArrayLike | None = None,
        counts: int | ArrayLike | None = None,
    ) -> None: ...
    def preempt(self, batch: Batch) -> None: ...
    def release(self, batch: Batch) -> list[int | None]: ...
    def contains(self, request_id: object) -> bool: ...
    def slots(self, batch: Batch) -> list[int]: ...
    def request_id(self, slot: int) -> object: ...
    def wanted(self, batch: Batch) -> list[tuple[list[tuple[bytes, bytes]], int, object] | None]: ...
    def alloc_with_loads(
        self, batch: Batch, num_tokens: int | ArrayLike | None, loads: list[int]
    ) -> list[tuple[int, int, list[list[int]], list[list[int]]]]: ...
    def alloc_with_blocks(
        self,
        batch: Batch,
        num_tokens: int | ArrayLike | None,
        there: list[tuple[int, list[list[bool]]]],
        only: bool,
    ) -> list[tuple[int, int, list[list[int]], list[list[int]]]]: ...
    def alloc_from_tier(
        self, batch: Batch, num_tokens: int | ArrayLike | None, only: bool
    ) -> tuple[int, list[tuple[int, int, Transfer]]]: ...
    def suspend(self, batch: Batch) -> tuple[int, list[tuple[int, int, Transfer]]]: ...
    def resume(self, batch: Batch) -> tuple[int, list[tuple[int, int, Transfer]]]: ...
    def check_unused(self) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    @property
    def is_asleep(self) -> bool: ...
    def take_ended(self) -> list[tuple[int, str]]: ...
    def is_copying_to_tier(self, copy: int) -> bool: ...
    @staticmethod
    def copy_ids(completions: Sequence[int]) -> list[int]: ...
    def is_copying(self, copy: int) -> bool: ...
    def end_copies(self, ended: list[tuple[int, str]]) -> list[int]: ...
    def begin_step(self, now: float | None, ended: list[tuple[int, str]]) -> tuple[int, list[int]]: ...
    def take_offloads(self) -> list[tuple[int, list[list[int]], list[list[tuple[bytes, bytes]]]]]: ...
    def start_copy(self, request: Request, first: int, count: int) -> tuple[int, list[int], int]: ...
    def commit(self, request: Request) -> list[bytes]: ...
    def probe(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None,
        lora_id: str | int | None,
        lora_generation: int,
        mm_items: Iterable[tuple[bytes, int, int]] | None,
        prompt_embeds: Iterable[tuple[bytes, int, int]] | None,
        extra_ids: ArrayLike | None,
        overrides: Iterable[tuple[int, int]] | None,
        other_namespaces: bool,
    ) -> tuple[
        int,
        list[int],
        int,
        bytes | None,
        MissReason | None,
        int | None,
        PrefixWalk,
        list[tuple[bytes, bytes]],
    ]: ...
    def probe_with(
        self,
        tokens: ArrayLike,
        there: tuple[int, list[list[bool]]],
        *,
        salt: str | None,
        lora_id: str | int | None,
        lora_generation: int,
        mm_items: Iterable[tuple[bytes, int, int]] | None,
        prompt_embeds: Iterable[tuple[bytes, int, int]] | None,
        extra_ids: ArrayLike | None,
        overrides: Iterable[tuple[int, int]] | None,
    ) -> tuple[int, int]: ...
    def write_max(
        self,
        batch: Batch,
        memory: RowMemory,
        table: NDArray[np.uint32],
        cache_lengths: NDArray[np.uint32],
        group: int,
    ) -> BatchShape: ...
    def write_vllm(
        self,
        batch: Batch,
        memory: RowMemory,
        table: NDArray[np.uint32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
        query_start_loc: NDArray[np.int32],
        group: int,
    ) -> BatchShape: ...
    def write_tensorrt(
        self,
        batch: Batch,
        memory: RowMemory,
        pools: Sequence[NDArray[np.int32]],
        apart: Sequence[int],
        fields: int,
        seq_lens: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        group: int,
    ) -> BatchShape: ...
    def write_flashinfer(
        self,
        batch: Batch,
        indptr: NDArray[np.int32],
        indices: NDArray[np.int32],
        last_page_len: NDArray[np.int32],
        query_indptr: NDArray[np.int32],
        group: int,
    ) -> BatchShape: ...
    def write_states(
        self, batch: Batch, pages: NDArray[np.int32], query_start_loc: NDArray[np.int32], group: int
    ) -> BatchShape: ...
    def write_cross(
        self,
        batch: Batch,
        memory: RowMemory,
        table: NDArray[np.uint32],
        lengths: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        group: int,
    ) -> tuple[BatchShape, int]: ...
    def pages(self, batch: Batch, group: int) -> list[NDArray[np.int32]]: ...
    def pages_of(self, request: Request, group: int) -> NDArray[np.int32]: ...
    def slot_mapping(self, request: Request, positions: ArrayLike, group: int) -> NDArray[np.int64]: ...
    def pin(self, request: Request) -> int: ...
    def unpin(self, pin: int) -> None: ...
    def resume_soon(self, batch: Batch, priority: int, duration: float | None) -> None: ...
    def session_done(self, batch: Batch) -> None: ...
    def truncate_prefix(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None,
        lora_id: str | int | None,
        lora_generation: int,
        mm_items: Iterable[tuple[bytes, int, int]] | None,
        prompt_embeds: Iterable[tuple[bytes, int, int]] | None,
        extra_ids: ArrayLike | None,
        overrides: Iterable[tuple[int, int]] | None,
    ) -> int: ...
    def check(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def verify(self) -> None: ...
    def fingerprint(self) -> int: ...
    def debug_dump(self) -> str: ...
    def block_count(self) -> list[tuple[int, int]]: ...
    def huge_page_count(self) -> tuple[int, int] | None: ...
    def metrics(self) -> dict[str, int]: ...
    def histograms(self) -> dict[str, tuple[int, ...]]: ...
    def take_events(self, timeout: float) -> list[tuple[Any, ...]]: ...
    def event_snapshot(self) -> tuple[int, list[tuple[Any, ...]]]: ...

@final
class Transfer:
    """A copy in flight, to be asked, waited for, or awaited."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The device pages that the copy touches."""
    def is_complete(self) -> bool:
        """Whether the copy has ended, well or not."""
    def result(self) -> None:
        """Waits for the end of the copy."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Waits for the end of the copy, at most `timeout` seconds."""
    def cancel(self) -> bool:
        """Asks that the copy be given up; False when it has ended already."""
    def wake_fd(self) -> int:
        """A file descriptor of the caller's that is readable once the copy has ended."""
    def __await__(self) -> Generator[object]: ...

@final
class DiskDirectory:
    """A directory for the blocks of one cache, locked while it is used."""

    def __new__(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        parent: str | os.PathLike[str],
        fingerprint: dict[str, str],
        page_size: int,
        block_bytes: int,
        seed: str | None,
    ) -> DiskDirectory: ...
    @property
    def seed(self) -> str | None:
        """The seed of the block hashes; None where nothing survives."""
    @property
    def secret(self) -> str:
        """The secret of the blocks' second identities."""
    def revise(self, fingerprint: dict[str, str]) -> None: ...
    def close(self) -> None: ...

@final
class TieredConnector:
    """Blocks in host memory, copied by Rust threads: a `KVConnector`."""

    def __new__(
        cls,
        *,
        pages: Sequence[Sequence[NDArray[np.uint8]]],
        host_bytes: int | None,
        policy: str,
        lanes: int,
        pin: bool = False,
        numa_node: int | None = None,
        disk: Sequence[DiskDirectory] | None = None,
        disk_bytes: int | None = None,
        disk_workers: int = 32,
        fsync: str = "batch",
    ) -> TieredConnector: ...
    def release_pages(self) -> None: ...
    def adopt_pages(self, pages: Sequence[Sequence[NDArray[np.uint8]]]) -> None: ...
    def lookup(
        self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None
    ) -> list[bool] | list[list[bool]]: ...
    def count_cached_prefix(
        self, block_hashes: BlockHashes, replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]: ...
    def load(
        self,
        block_ids: BlockIDs,
        block_hashes: BlockHashes,
        replica_idx: int = 0,
        hint: object = None,
    ) -> Transfer: ...
    def offload(self, block_ids: BlockIDs, block_hashes: BlockHashes, replica_idx: int = 0) -> Transfer: ...
    def touch(self, block_hashes: BlockHashes, replica_idx: int = 0) -> None: ...
    def wait_for_loads(self) -> None: ...
    def wait_for_offloads(self) -> None: ...
    def host_byte_count(self, replica_idx: int = 0) -> ByteCount: ...
    def disk_byte_count(self, replica_idx: int = 0) -> ByteCount: ...
    def metrics(self) -> dict[str, int]: ...
    def take_warnings(self) -> list[str]: ...
    def reset_prefix_cache(self) -> None: ...
    def flush(self, timeout: float) -> bool: ...
    def drain(self, timeout: float) -> bool: ...
    def shutdown(self, timeout: float = 5.0) -> None: ...
    def verify(self) -> None: ...

@final
class Completer:
    """The end of whoever carries a copy out."""

    def finish(self) -> bool:
        """Every byte is where it belongs."""
    def fail(self, message: str) -> bool:
        """The copy failed."""
    def abandon(self) -> bool:
        """The copy was given up and writes nothing more."""
    def is_cancel_requested(self) -> bool:
        """Whether somebody asked that the copy be given up."""

def slab_geometry(
    pages: list[tuple[int, int, int]],
    budget: int,
    *,
    max_padding: float,
    max_huge_bytes: int,
    max_ratio: int,
) -> tuple[int, int, list[tuple[int, int]]]:
    """A slab of at most `budget` bytes for groups with pages of (bytes, bytes of a row, pages in a request).

    Bytes of a huge page, usable huge pages, and (pages in a huge page, bytes of a padded page) of each group.
    """

def pending_transfer(block_ids: ArrayLike) -> tuple[Transfer, Completer]:
    """Two ends of one copy: what is waited for, and what ends it."""

def normalize_tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as a new int32 array, checked."""

def hash_blocks(
    tokens: ArrayLike,
    page_size: int,
    *,
    algo: HashAlgorithm = "ahash64",
    parent: bytes | None = None,
    seed: bytes | str | None = None,
    salt: str | None = None,
    lora_id: str | int | None = None,
    lora_generation: int = 0,
    mm_items: Iterable[tuple[bytes, int, int]] | None = None,
    prompt_embeds: Iterable[tuple[bytes, int, int]] | None = None,
    extra_ids: ArrayLike | None = None,
    overrides: Iterable[tuple[int, int]] | None = None,
) -> list[bytes]:
    """The hash of each full block of a sequence; a partial last block has none."""

def hash_blocks_batch(
    sequences: Iterable[ArrayLike],
    page_size: int,
    *,
    algo: HashAlgorithm = "ahash64",
    parent: bytes | None = None,
    seed: bytes | str | None = None,
    salt: str | None = None,
    lora_id: str | int | None = None,
    lora_generation: int = 0,
    mm_items: Iterable[tuple[bytes, int, int]] | None = None,
    prompt_embeds: Iterable[tuple[bytes, int, int]] | None = None,
    extra_ids: ArrayLike | None = None,
    overrides: Iterable[tuple[int, int]] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """`hash_blocks` of many sequences in one call, into arrays."""

def hash_cpu_path() -> str:
    """The instructions that hash here, such as "sha-ni", or "portable"."""

def inspect_store(
    path: str | os.PathLike[str], deep: bool, on_blocks: Callable[[int, int], object]
) -> dict[str, Any]:
    """What a store on disk holds and what is damaged: the fields of `StoreReport`, and `sound`."""

def wipe_store(path: str | os.PathLike[str]) -> None:
    """Removes the files of the store in a directory."""

def store_bytes(page_size: int, block_bytes: int, blocks: int) -> int:
    """Bytes that a store of so many blocks takes on a disk."""
