"""What attention kernels read, in the form of each kernel family.

Tables live in staging memory whose addresses never change: two buffers a form, used in turn, so that the
tables of one step stay as they are while the next step is planned. A step writes only what changed since
its buffer was used last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from pagekeeper._native import RowMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pagekeeper._native import Ledger

__all__ = ["FlashInferTables", "Form", "KVCacheInputs", "MaxTables", "TableWriter", "VllmTables"]

Form = Literal["max", "vllm", "flashinfer"]


def check_form(form: str) -> None:
    """Raises a ValueError unless `form` names a table form."""
    if form not in get_args(Form):
        raise ValueError(f"form={form!r}: must be one of {', '.join(map(repr, get_args(Form)))}")


@dataclass(frozen=True, slots=True)
class MaxTables:
    """The lookup table of MAX kernels.

    Attributes:
        lookup_table: page of each block; uint32 [batch, columns]. Unused cells hold the null page, and there
            are 16 of them or more at the end of a row: a 16-wide load from any valid cell is in bounds.
        cache_lengths: tokens with KV before this forward; uint32 [batch].
        max_prompt_length: most tokens that this forward computes for one request.
        max_cache_length: most tokens of one request after this forward.
    """

    lookup_table: NDArray[np.uint32]
    cache_lengths: NDArray[np.uint32]
    max_prompt_length: int
    max_cache_length: int


@dataclass(frozen=True, slots=True)
class VllmTables:
    """The tables of vLLM and FlashAttention kernels.

    Attributes:
        block_table: page of each block; int32 [batch, columns]. Unused cells hold the null page.
        seq_lens: tokens after this forward; int32 [batch].
        slot_mapping: where the KV of each computed token goes, page * page_size + offset; int64 [tokens].
        query_start_loc: where each request's computed tokens begin; int32 [batch + 1].
        max_query_len: most tokens that this forward computes for one request.
        max_seq_len: most tokens of one request after this forward.
    """

    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class FlashInferTables:
    """The arrays of FlashInfer kernels.

    Attributes:
        kv_indptr: where each request's pages begin in `kv_indices`; int32 [batch + 1].
        kv_indices: page ids of all requests; int32 [pages].
        kv_last_page_len: tokens in each request's last page after this forward, from 1; int32 [batch].
        qo_indptr: where each request's computed tokens begin; int32 [batch + 1].
        max_query_len: most tokens that this forward computes for one request.
        max_seq_len: most tokens of one request after this forward.
    """

    kv_indptr: NDArray[np.int32]
    kv_indices: NDArray[np.int32]
    kv_last_page_len: NDArray[np.int32]
    qo_indptr: NDArray[np.int32]
    max_query_len: int
    max_seq_len: int


Tables: TypeAlias = MaxTables | VllmTables | FlashInferTables


class KVCacheInputs:
    """The tables of one step, one entry a data-parallel replica.

    The arrays are views of memory that the manager reuses: they are valid until the second next call of
    `runtime_inputs` in the same form.
    """

    __slots__ = ("form", "replicas")

    def __init__(self, form: Form, replicas: tuple[Tables, ...]) -> None:
        self.form = form
        self.replicas = replicas

    def __len__(self) -> int:
        return len(self.replicas)

    def __getitem__(self, replica: int) -> Any:
        return self.replicas[replica]

    def __iter__(self) -> Iterator[Tables]:
        return iter(self.replicas)

    def __repr__(self) -> str:
        return f"KVCacheInputs(form={self.form!r}, replicas={self.replicas!r})"


class TableWriter:
    """Writes the tables of one replica into its two buffers a form.

    Args:
        ledger: the replica's ledger.
        max_batch_size: most requests of one call, and rows of a table.
        max_pages_per_request: most pages that one request may hold.
        max_tokens: most tokens that one forward may compute over all requests.
    """

    def __init__(
        self, ledger: Ledger, max_batch_size: int, max_pages_per_request: int, max_tokens: int
    ) -> None:
        self._ledger = ledger
        self._rows = max_batch_size
        self._pages = max_pages_per_request
        self._tokens = max_tokens
        self._buffers: dict[Form, tuple[Any, Any]] = {}
        self._turn: dict[Form, int] = {}

    def write(self, batch: Any, form: Form) -> Tables:
        """The tables of `batch`; see `PagedKVCacheManager.runtime_inputs`."""
        buffers = self._buffers.get(form)
        if buffers is None:
            check_form(form)
            make = _BUFFERS[form]
            size = (self._rows, self._pages, self._tokens)
            buffers = self._buffers[form] = (make(*size), make(*size))
        turn = self._turn.get(form, 0)
        tables: Tables = buffers[turn].write(self._ledger, batch)
        self._turn[form] = 1 - turn  # only now: a call that failed has not used its buffer
        return tables


def _table_columns(max_pages: int) -> int:
    """Cells of a row: the pages rounded up to 8, and 16 more for wide loads."""
    return -(-max_pages // 8) * 8 + 16


class _MaxBuffer:
    def __init__(self, rows: int, pages: int, tokens: int) -> None:
        self._memory = RowMemory()
        self._table = np.zeros((rows, _table_columns(pages)), np.uint32)
        self._lengths = np.zeros(rows, np.uint32)

    def write(self, ledger: Ledger, batch: Any) -> MaxTables:
        n, _, longest, most, _ = ledger.write_max(batch, self._memory, self._table, self._lengths)
        return MaxTables(self._table[:n], self._lengths[:n], longest, most)


class _VllmBuffer:
    def __init__(self, rows: int, pages: int, tokens: int) -> None:
        self._memory = RowMemory()
        self._table = np.zeros((rows, _table_columns(pages)), np.uint32)
        self._lengths = np.zeros(rows, np.int32)
        self._slots = np.zeros(tokens, np.int64)
        self._starts = np.zeros(rows + 1, np.int32)
        self._signed = self._table.view(np.int32)

    def write(self, ledger: Ledger, batch: Any) -> VllmTables:
        n, tokens, longest, most, _ = ledger.write_vllm(
            batch, self._memory, self._table, self._lengths, self._slots, self._starts
        )
        starts = self._starts[: n + 1]
        return VllmTables(self._signed[:n], self._lengths[:n], self._slots[:tokens], starts, longest, most)


class _FlashInferBuffer:
    def __init__(self, rows: int, pages: int, tokens: int) -> None:
        self._starts = np.zeros(rows + 1, np.int32)
        self._indices = np.zeros(rows * pages, np.int32)
        self._last = np.zeros(rows, np.int32)
        self._queries = np.zeros(rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Any) -> FlashInferTables:
        n, _, longest, most, pages = ledger.write_flashinfer(
            batch, self._starts, self._indices, self._last, self._queries
        )
        starts, queries = self._starts[: n + 1], self._queries[: n + 1]
        return FlashInferTables(starts, self._indices[:pages], self._last[:n], queries, longest, most)


_BUFFERS: dict[Form, Any] = {"max": _MaxBuffer, "vllm": _VllmBuffer, "flashinfer": _FlashInferBuffer}
