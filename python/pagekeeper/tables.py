"""What attention kernels read, in the form of each kernel family.

Tables live in memory whose addresses never change (`pagekeeper.staging`): two buffers a form, used in turn,
so that the tables of one step stay as they are while the next step is planned. A step writes only what
changed since its buffer was used last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from pagekeeper._native import RowMemory
from pagekeeper.staging import HostStaging, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

    lookup_table: Table
    cache_lengths: Table
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

    block_table: Table
    seq_lens: Table
    slot_mapping: Table
    query_start_loc: Table
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

    kv_indptr: Table
    kv_indices: Table
    kv_last_page_len: Table
    qo_indptr: Table
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
        new_staging: makes the memory of a buffer.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_batch_size: int,
        max_pages_per_request: int,
        max_tokens: int,
        new_staging: Callable[[], HostStaging] = HostStaging,
    ) -> None:
        self._ledger = ledger
        self._size = _Size(max_batch_size, max_pages_per_request, max_tokens)
        self._new_staging = new_staging
        self._buffers: dict[Form, tuple[_Buffer, _Buffer]] = {}
        self._turn: dict[Form, int] = {}

    def write(self, batch: Any, form: Form) -> Tables:
        """The tables of `batch`; see `PagedKVCacheManager.runtime_inputs`."""
        buffers = self._buffers.get(form)
        if buffers is None:
            check_form(form)
            make = _BUFFERS[form]
            buffers = make(self._new_staging(), self._size), make(self._new_staging(), self._size)
            self._buffers[form] = buffers
        turn = self._turn.get(form, 0)
        buffer = buffers[turn]
        buffer.staging.wait()
        tables = buffer.write(self._ledger, batch)
        buffer.staging.published()
        self._turn[form] = 1 - turn  # only now: a call that failed has not used its buffer
        return tables


@dataclass(frozen=True, slots=True)
class _Size:
    """Most requests, pages of one request, and tokens of all requests that a table must hold."""

    rows: int
    pages: int
    tokens: int

    @property
    def table(self) -> tuple[int, int]:
        """Rows and cells: the pages rounded up to 8, and 16 more for wide loads."""
        return self.rows, -(-self.pages // 8) * 8 + 16


class _Buffer(ABC):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        self.staging = staging

    @abstractmethod
    def write(self, ledger: Ledger, batch: Any) -> Tables: ...


class _MaxBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._memory = RowMemory()
        self._table = staging.array(size.table, np.uint32)
        self._lengths = staging.array(size.rows, np.uint32)

    def write(self, ledger: Ledger, batch: Any) -> MaxTables:
        n, _, longest, most, _ = ledger.write_max(batch, self._memory, self._table, self._lengths)
        publish = self.staging.publish
        return MaxTables(publish(self._table, n), publish(self._lengths, n), longest, most)


class _VllmBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._memory = RowMemory()
        self._table = staging.array(size.table, np.int32)
        self._cells = self._table.view(np.uint32)
        self._lengths = staging.array(size.rows, np.int32)
        self._slots = staging.array(size.tokens, np.int64)
        self._starts = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Any) -> VllmTables:
        n, tokens, longest, most, _ = ledger.write_vllm(
            batch, self._memory, self._cells, self._lengths, self._slots, self._starts
        )
        publish = self.staging.publish
        table, lengths = publish(self._table, n), publish(self._lengths, n)
        slots, starts = publish(self._slots, tokens), publish(self._starts, n + 1)
        return VllmTables(table, lengths, slots, starts, longest, most)


class _FlashInferBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._starts = staging.array(size.rows + 1, np.int32)
        self._indices = staging.array(size.rows * size.pages, np.int32)
        self._last = staging.array(size.rows, np.int32)
        self._queries = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Any) -> FlashInferTables:
        n, _, longest, most, pages = ledger.write_flashinfer(
            batch, self._starts, self._indices, self._last, self._queries
        )
        publish = self.staging.publish
        starts, queries = publish(self._starts, n + 1), publish(self._queries, n + 1)
        indices, last = publish(self._indices, pages), publish(self._last, n)
        return FlashInferTables(starts, indices, last, queries, longest, most)


_BUFFERS: dict[Form, type[_Buffer]] = {
    "max": _MaxBuffer,
    "vllm": _VllmBuffer,
    "flashinfer": _FlashInferBuffer,
}
