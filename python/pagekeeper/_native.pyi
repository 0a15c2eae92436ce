"""The native module: requests, the ledger, hashing. Use `pagekeeper`'s names, not this module."""

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagekeeper.context import TokenBuffer

__all__ = [
    "Ledger",
    "RowMemory",
    "TextContext",
    "hash_blocks",
    "hash_blocks_batch",
    "hash_cpu_path",
    "normalize_tokens",
]

@final
class TextContext:
    """One request: a handle on its token log.

    Args:
        request_id: names the request; a `RequestID`, or anything hashable.
        tokens: the prompt: a `TokenBuffer`, a 1-D integer array, or a list of ints; at least one token.
        max_length: most tokens of prompt and output. None: no limit of its own.
        cache_salt: requests with different salts share nothing; "" is no salt.
        lora_id: the adapter whose KV this is, by name or number; None is the base model.
        lora_generation: tells apart adapters that were loaded under one id.
        mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
        prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
        extra_ids: one unsigned 64-bit number a token, 0 for none.
        token_overrides: (token index, value): content values that stand for placeholder tokens in block
            hashes, -2**63 to 2**64 - 1, at most one a token.
        no_read: do not reuse cached blocks.
        no_store: do not share blocks of this request.
        max_new_tokens: for the caller; not enforced.

    Raises:
        ValueError: what is out of range, and where.
    """

    def __new__(
        cls,
        request_id: object,
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
        no_read: bool = False,
        no_store: bool = False,
        max_new_tokens: int | None = None,
    ) -> TextContext: ...
    @property
    def request_id(self) -> Any:
        """The id that the request was made with."""
    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output."""
    @property
    def max_new_tokens(self) -> int | None:
        """As given."""
    @property
    def no_read(self) -> bool:
        """Whether cached blocks are left alone."""
    @property
    def no_store(self) -> bool:
        """Whether the request's blocks are kept private."""
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
    def update(self, token: int) -> None:
        """Appends one generated token, or fills the oldest placeholder.

        A token of a forward that was dropped meanwhile (`preempt`, `truncate`) is dropped.

        Raises:
            ValueError: no token id, or one token more than `max_length`.
        """
    def truncate(self, length: int) -> None:
        """Drops the tokens after the first `length`, with their KV and their steps out.

        Raises:
            ValueError: a negative length, or more than the known tokens.
        """
    def token_array(self) -> NDArray[np.int32]:
        """The known tokens, a copy; int32 [len]."""
    def __len__(self) -> int: ...

@final
class RowMemory:
    """What the ledger wrote into one table buffer last."""

    def __new__(cls) -> RowMemory: ...

@final
class Ledger:
    """The ledger of one replica; `PagedKVCacheManager` documents its verbs."""

    def __new__(
        cls,
        *,
        page_size: int,
        pages: int,
        max_batch_size: int,
        prefix_caching: bool,
        algo: str,
        seed: str | bytes | None,
        on_duplicate: str,
        reserve: str,
        priority: int,
        max_seq_len: int | None,
        max_num_input_tokens: int | None,
    ) -> Ledger: ...
    def claim(self, context: TextContext) -> int: ...
    def alloc(self, batch: Any, num_tokens: Any) -> int: ...
    def alloc_dummy(self, context: TextContext) -> None: ...
    def step(self, batch: Any, new_tokens: Any = None, counts: Any = None) -> None: ...
    def preempt(self, batch: Any) -> None: ...
    def release(self, batch: Any) -> None: ...
    def contains(self, request_id: object) -> bool: ...
    def begin_step(self, now: float | None, completions: Sequence[int]) -> int: ...
    def finish_copies(self, completions: Sequence[int]) -> None: ...
    def start_copy(self, context: TextContext, first: int, count: int) -> tuple[int, list[int], int]: ...
    def commit(self, context: TextContext) -> list[bytes]: ...
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
    ) -> tuple[int, int, bytes | None]: ...
    def write_max(
        self, batch: Any, memory: RowMemory, table: NDArray[np.uint32], cache_lengths: NDArray[np.uint32]
    ) -> tuple[int, int, int, int, int]: ...
    def write_vllm(
        self,
        batch: Any,
        memory: RowMemory,
        table: NDArray[np.uint32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
        query_start_loc: NDArray[np.int32],
    ) -> tuple[int, int, int, int, int]: ...
    def write_flashinfer(
        self,
        batch: Any,
        indptr: NDArray[np.int32],
        indices: NDArray[np.int32],
        last_page_len: NDArray[np.int32],
        query_indptr: NDArray[np.int32],
    ) -> tuple[int, int, int, int, int]: ...
    def pages(self, batch: Any) -> list[NDArray[np.int32]]: ...
    def slot_mapping(self, context: TextContext, positions: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def reset_prefix_cache(self) -> None: ...
    def verify(self) -> None: ...
    def fingerprint(self) -> int: ...
    def debug_dump(self) -> str: ...
    def block_count(self) -> tuple[int, int]: ...
    def metrics(self) -> dict[str, int]: ...

def normalize_tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as a new int32 array, checked."""

def hash_blocks(
    tokens: ArrayLike,
    page_size: int,
    *,
    algo: str = "ahash64",
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
    """The hash of each full block of a sequence; a partial last block has none.

    Args:
        tokens: a 1-D integer array (strided and byte-swapped ones too) or a list of ints, each an int32.
        page_size: tokens in a block.
        algo: "ahash64" (8 bytes, fast), "sha256" (32 bytes) or "sha256_64" (its first 8 bytes).
        parent: hash of the block before the first: 8 bytes for "ahash64", 32 for the SHA family, where it
            replaces seed and salt.
        seed: 32 bytes or 64 hexadecimal characters.
        salt: isolates those who give different ones; "" is none.
        lora_id: an adapter, by name or number.
        lora_generation: tells apart adapters loaded under one id.
        mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
        prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
        extra_ids: one unsigned 64-bit number a token, 0 for none.
        overrides: (token index, value): -2**63 to 2**64 - 1, at most one a token; indices out of range are
            ignored.

    Raises:
        ValueError: what is out of range, and where.

    Values equal those of MAX 26.7 bit for bit when there is neither adapter nor extra key.
    """

def hash_blocks_batch(
    sequences: Iterable[ArrayLike],
    page_size: int,
    *,
    algo: str = "ahash64",
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
    """`hash_blocks` of many sequences at once.

    Returns:
        The hashes, uint8 [blocks, 8 or 32], and where each sequence's begin, int64 [sequences + 1].
    """

def hash_cpu_path() -> str:
    """The instructions that hash here; PAGEKEEPER_CPU=portable in the environment avoids special ones."""
