"""What attention kernels read, in the form of each kernel family.

Tables live in memory whose addresses never change (`pagekeeper.staging`): two buffers a form, used in turn,
so that the tables of one step stay as they are while the next step is planned. A step writes only what
changed since its buffer was used last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar, get_args, overload

import numpy as np

from pagekeeper._native import RowMemory
from pagekeeper.errors import shown
from pagekeeper.offsets import OffsetLayout
from pagekeeper.staging import HostStaging, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from pagekeeper._native import BatchShape, Ledger
    from pagekeeper.calls import Batch

__all__ = [
    "CrossTables",
    "FlashInferTables",
    "Form",
    "KVCacheInputs",
    "MaxTables",
    "StateTables",
    "TableWriter",
    "Tables",
    "TensorRTTables",
    "VllmTables",
]

NO_COPIES: NDArray[np.int32] = np.empty((0, 2), np.int32)
NO_FILLS: NDArray[np.int32] = np.empty(0, np.int32)
Form = Literal["max", "vllm", "flashinfer", "tensorrt"]
_FORMS = get_args(Form)


def check_form(form: str) -> None:
    """Raises a ValueError unless `form` names a table form."""
    if form not in _FORMS:
        raise ValueError(f"form={shown(form)}: must be one of {', '.join(map(repr, _FORMS))}")


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


@dataclass(frozen=True, slots=True)
class TensorRTTables:
    """The block offsets of TensorRT-LLM kernels, with entries as `copy_block_offsets` writes them.

    Attributes:
        pools: for each pool an entry for each field, keys first, of each block; int32 [batch, 2, columns]
            each. All ones where there is no page. Pages that hold keys alone have entries for keys alone.
            Layers that differ are in pools of their own, as `layer_to_pool` of the parameters says; else
            there is one.
        seq_lens: tokens after this forward; int32 [batch].
        query_start_loc: where each request's computed tokens begin; int32 [batch + 1].
        max_query_len: most tokens that this forward computes for one request.
        max_seq_len: most tokens of one request after this forward.
    """

    pools: tuple[Table, ...]
    seq_lens: Table
    query_start_loc: Table
    max_query_len: int
    max_seq_len: int

    def of_pool(self, pool: int) -> TensorRTTables:
        """The tables for the layers of one pool."""
        return replace(self, pools=(self.pools[pool],))


@dataclass(frozen=True, slots=True)
class StateTables:
    """What kernels of recurrent layers, and kernels with scratch memory, read.

    Attributes:
        indices: page of each request, from which a forward reads its state and to which it writes the new
            one; int32 [batch]. The null page for padding. A request without a state has a page of zeros.
        query_start_loc: where each request's computed tokens begin; int32 [batch + 1].
        max_query_len: most tokens that this forward computes for one request.
    """

    indices: Table
    query_start_loc: Table
    max_query_len: int


@dataclass(frozen=True, slots=True)
class CrossTables:
    """What kernels of cross attention read, in every form.

    Attributes:
        block_table: page of each block of the encoder's tokens; int32 [batch, columns]. Unused cells hold the
            null page.
        encoder_lens: tokens that the encoder made for each request, which all of its tokens read; int32
            [batch]. 0 without an encoder, and for padding.
        query_start_loc: where each request's computed tokens begin; int32 [batch + 1].
        max_query_len: most tokens that this forward computes for one request.
        max_encoder_len: most tokens of one request's encoder.
    """

    block_table: Table
    encoder_lens: Table
    query_start_loc: Table
    max_query_len: int
    max_encoder_len: int


Tables: TypeAlias = MaxTables | VllmTables | FlashInferTables | TensorRTTables
AnyTables: TypeAlias = Tables | StateTables | CrossTables
_Tables = TypeVar("_Tables", bound=Tables, covariant=True)


class KVCacheInputs(Generic[_Tables]):
    """The tables of one step, one entry a data-parallel replica: `inputs[0].lookup_table`.

    The arrays are views of memory that the manager reuses: they are valid until the second next call of
    `runtime_inputs` in the same form, and must not be written. numpy's cannot be; torch warns of that when it
    wraps one.

    Attributes:
        form: "max", "vllm", "flashinfer" or "tensorrt".
        replicas: one `MaxTables`, `VllmTables`, `FlashInferTables` or `TensorRTTables` of `pagekeeper.tables`
            a replica. Empty for a group whose pages hold states.
        states: one `StateTables` a replica, for such a group: `inputs["mamba"].states[0].indices`.
        cross: one `CrossTables` a replica, for a group of cross attention, which has no `replicas` either.
        page_copies: pages to copy before the forward, in this order; int32 [copies, 2], source and
            destination. Mostly empty, and always when the manager has pools: it copies there itself.
        page_fills: pages to zero before that; int32 [pages]. They are new states, and pages that another
            group had in shared memory. Empty when the manager has pools.
        groups: the inputs of each group of layers by name, where there are several; there are no `replicas`
            then: `inputs["full"][0].lookup_table`.
    """

    __slots__ = ("cross", "form", "groups", "page_copies", "page_fills", "replicas", "states")

    def __init__(
        self,
        form: Form,
        replicas: tuple[_Tables, ...] = (),
        page_copies: NDArray[np.int32] = NO_COPIES,
        page_fills: NDArray[np.int32] = NO_FILLS,
        groups: dict[str, KVCacheInputs[_Tables]] | None = None,
        states: tuple[StateTables, ...] = (),
        cross: tuple[CrossTables, ...] = (),
    ) -> None:
        self.form = form
        self.replicas = replicas
        self.page_copies = page_copies
        self.page_fills = page_fills
        self.groups = groups or {}
        self.states = states
        self.cross = cross

    def __len__(self) -> int:
        return len(self.replicas or self.states or self.cross)

    @overload
    def __getitem__(self, replica: int) -> _Tables: ...

    @overload
    def __getitem__(self, replica: str) -> KVCacheInputs[_Tables]: ...

    def __getitem__(self, replica: int | str) -> _Tables | KVCacheInputs[_Tables]:
        if isinstance(replica, str):
            if replica in self.groups:
                return self.groups[replica]
            groups = ", ".join(map(repr, self.groups))
            allowed = f"must be one of {groups}" if groups else "the cache has one group; give a replica, 0"
            raise KeyError(f"{shown(replica)}: {allowed}")
        if self.groups:
            raise KeyError(f"{replica}: name a group first, one of {', '.join(map(repr, self.groups))}")
        if self.states:
            raise KeyError(f"{replica}: the group's pages hold states, whose tables are `states[{replica}]`")
        if self.cross:
            raise KeyError(f"{replica}: the group is of cross attention, with tables `cross[{replica}]`")
        return self.replicas[replica]

    def __iter__(self) -> Iterator[_Tables]:
        return iter(self.replicas)

    def __repr__(self) -> str:
        if self.groups:
            return f"KVCacheInputs(form={self.form!r}, groups={self.groups!r})"
        name = "states" if self.states else "cross" if self.cross else "replicas"
        tables = f"{name}={getattr(self, name)!r}"
        return f"KVCacheInputs(form={self.form!r}, {tables})"


class TableWriter:
    """Writes the tables of one replica into its two buffers a form.

    Args:
        ledger: the replica's ledger.
        max_batch_size: most requests of one call, and rows of a table.
        max_tokens: most tokens that one forward may compute over all requests.
        new_staging: makes the memory of a buffer.
        num_draft_tokens: most draft tokens of one request.
        group: the number of the group of layers.
        of_states: whether its pages hold states: the tables are `StateTables`, whatever the form.
        encoder_pages: most pages of an encoder's tokens, for a group of cross attention: the tables are
            `CrossTables`, whatever the form. None for others.
        offset_layout: how the group's pages become entries of TensorRT-LLM's tables; raises `ValueError`
            where they cannot.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_batch_size: int,
        max_tokens: int,
        new_staging: Callable[[], HostStaging] = HostStaging,
        num_draft_tokens: int = 0,
        group: int = 0,
        of_states: bool = False,
        encoder_pages: int | None = None,
        *,
        offset_layout: Callable[[], OffsetLayout],
    ) -> None:
        self._offset_layout = offset_layout
        self._special = _StateBuffer if of_states else _CrossBuffer if encoder_pages is not None else None
        self.num_draft_tokens = num_draft_tokens
        self._group = group
        self._ledger = ledger
        pages = encoder_pages or ledger.max_blocks_per_request(num_draft_tokens)
        self._size = _Size(max_batch_size, pages, max_tokens)
        self._new_staging = new_staging
        self._buffers: dict[Form, tuple[_Buffer, _Buffer]] = {}
        self._turn: dict[Form, int] = {}

    def write(self, batch: Batch, form: Form) -> tuple[AnyTables, BatchShape]:
        """The tables of `batch`, and how much they and the forward before them take.

        See `PagedKVCacheManager.runtime_inputs`.
        """
        check_form(form)
        buffers = self._buffers.get(form)
        if buffers is None:
            self.check(form)
            buffers = self._buffers[form] = self._make(form), self._make(form)
        turn = self._turn.get(form, 0)
        buffer = buffers[turn]
        buffer.staging.wait()
        tables, shape = buffer.write(self._ledger, batch, self._group)
        buffer.staging.published()
        self._turn[form] = 1 - turn  # only now: a call that failed has not used its buffer
        return tables, shape

    def check(self, form: Form) -> None:
        """Raises a ValueError unless there are tables of this form."""
        check_form(form)
        if form == "tensorrt" and self._special is None and form not in self._buffers:
            self._offset_layout()

    def _make(self, form: Form) -> _Buffer:
        try:
            if self._special is not None:
                return self._special(self._new_staging(), self._size)
            if form == "tensorrt":
                return _TensorRTBuffer(self._new_staging(), self._size, self._offset_layout())
            return _BUFFERS[form](self._new_staging(), self._size)
        except (MemoryError, ValueError) as error:  # numpy has both for what is too large
            raise MemoryError(f"no memory for tables in the form {form!r}, {self._size}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Size:
    """Most requests, pages of one request, and tokens of all requests that a table must hold."""

    rows: int
    pages: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} requests of up to {self.pages} pages, {self.tokens} tokens in all"

    @property
    def table(self) -> tuple[int, int]:
        """Rows and cells of a table with a row a request."""
        return self.rows, table_columns(self.pages)


class _Buffer(ABC):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        self.staging = staging

    @abstractmethod
    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[AnyTables, BatchShape]: ...


class _MaxBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._memory = RowMemory()
        self._table = staging.array(size.table, np.uint32)
        self._lengths = staging.array(size.rows, np.uint32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[MaxTables, BatchShape]:
        shape = ledger.write_max(batch, self._memory, self._table, self._lengths, group)
        n, publish = shape.requests, self.staging.publish
        table, lengths = publish(self._table, n), publish(self._lengths, n)
        return MaxTables(table, lengths, shape.max_active, shape.max_total), shape


class _VllmBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._memory = RowMemory()
        self._table = staging.array(size.table, np.int32)
        self._cells = self._table.view(np.uint32)
        self._lengths = staging.array(size.rows, np.int32)
        self._slots = staging.array(size.tokens, np.int64)
        self._starts = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[VllmTables, BatchShape]:
        shape = ledger.write_vllm(
            batch, self._memory, self._cells, self._lengths, self._slots, self._starts, group
        )
        n, publish = shape.requests, self.staging.publish
        table, lengths = publish(self._table, n), publish(self._lengths, n)
        slots, starts = publish(self._slots, shape.active), publish(self._starts, n + 1)
        return VllmTables(table, lengths, slots, starts, shape.max_active, shape.max_total), shape


class _FlashInferBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._starts = staging.array(size.rows + 1, np.int32)
        self._indices = staging.array(size.rows * size.pages, np.int32)
        self._last = staging.array(size.rows, np.int32)
        self._queries = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[FlashInferTables, BatchShape]:
        shape = ledger.write_flashinfer(batch, self._starts, self._indices, self._last, self._queries, group)
        n, publish = shape.requests, self.staging.publish
        starts, queries = publish(self._starts, n + 1), publish(self._queries, n + 1)
        indices, last = publish(self._indices, shape.pages), publish(self._last, n)
        tables = FlashInferTables(starts, indices, last, queries, shape.max_active, shape.max_total)
        return tables, shape


class _TensorRTBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size, layout: OffsetLayout) -> None:
        super().__init__(staging, size)
        rows, columns = size.table
        self._memory = RowMemory()
        self._layout = layout
        self._pools = [staging.array((rows, 2, columns), np.int32) for _ in layout.apart]
        for pool in self._pools:
            pool.fill(-1)
        self._lengths = staging.array(size.rows, np.int32)
        self._starts = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[TensorRTTables, BatchShape]:
        layout = self._layout
        shape = ledger.write_tensorrt(
            batch, self._memory, self._pools, layout.apart, layout.fields, self._lengths, self._starts, group
        )
        n, publish = shape.requests, self.staging.publish
        pools = tuple(publish(pool, n) for pool in self._pools)
        lengths, starts = publish(self._lengths, n), publish(self._starts, n + 1)
        return TensorRTTables(pools, lengths, starts, shape.max_active, shape.max_total), shape


class _StateBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._pages = staging.array(size.rows, np.int32)
        self._queries = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[StateTables, BatchShape]:
        shape = ledger.write_states(batch, self._pages, self._queries, group)
        n, publish = shape.requests, self.staging.publish
        pages, queries = publish(self._pages, n), publish(self._queries, n + 1)
        return StateTables(pages, queries, shape.max_active), shape


class _CrossBuffer(_Buffer):
    def __init__(self, staging: HostStaging, size: _Size) -> None:
        super().__init__(staging, size)
        self._memory = RowMemory()
        self._table = staging.array(size.table, np.int32)
        self._cells = self._table.view(np.uint32)
        self._lengths = staging.array(size.rows, np.int32)
        self._queries = staging.array(size.rows + 1, np.int32)

    def write(self, ledger: Ledger, batch: Batch, group: int) -> tuple[CrossTables, BatchShape]:
        shape, most = ledger.write_cross(
            batch, self._memory, self._cells, self._lengths, self._queries, group
        )
        n, publish = shape.requests, self.staging.publish
        table, lengths, queries = (
            publish(self._table, n),
            publish(self._lengths, n),
            publish(self._queries, n + 1),
        )
        return CrossTables(table, lengths, queries, shape.max_active, most), shape


_BUFFERS: dict[Form, type[_Buffer]] = {
    "max": _MaxBuffer,
    "vllm": _VllmBuffer,
    "flashinfer": _FlashInferBuffer,
}


def table_columns(pages: int) -> int:
    """Cells of a row for so many pages: rounded up to 8, and 16 more for wide loads."""
    return -(-pages // 8) * 8 + 16
