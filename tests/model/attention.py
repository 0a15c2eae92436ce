"""Requests with random queries, keys and values: dense attention over them, and tables of pages for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from model.windows import Chunked, Everything, Full, Kind, Window, needed_blocks
from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import FlashInferTables, MaxTables, TensorRTTables, VllmTables

KV_HEADS, HEADS, HEAD_DIM = 2, 6, 4
LAYERS, LAYER = 3, 1
"""Layers of a pool, and the one that is computed."""

Rows = list[list[int]]
"""The page of each block, a row a request."""
AnyTables = MaxTables | VllmTables | FlashInferTables | TensorRTTables


def dense_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kind: Kind | Everything
) -> np.ndarray:
    """Attention by the textbook, a query token and a head at a time.

    `query` [query_len, heads, head_dim] is the end of `key` [kv_len, kv_heads, head_dim] and `value`
    [kv_len, kv_heads, value_dim], or asks for everything that they hold.
    """
    heads, kv_heads, kv_len = query.shape[1], key.shape[1], len(key)
    output = np.empty((*query.shape[:2], value.shape[2]))
    for token, position in enumerate(range(kv_len - len(query), kv_len)):
        seen = kind.sees(position, np.arange(kv_len))
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = key[seen, kv_head] @ query[token, head] / np.sqrt(query.shape[2])
            weights = np.exp(scores - scores.max())
            output[token, head] = weights @ value[seen, kv_head] / weights.sum()
    return output


@dataclass
class Batch:
    """Random queries, keys and values of some requests, by request."""

    lengths: Sequence[tuple[int, int]]
    """Tokens that have KV already, and tokens of this forward."""
    kind: Kind
    v_head_dim: int | None
    """Where values are the first elements of keys, how many; there is one KV head then."""
    query: list[np.ndarray]
    key: list[np.ndarray]
    value: list[np.ndarray]

    @classmethod
    def random(
        cls,
        lengths: Sequence[tuple[int, int]],
        heads: int = HEADS,
        *,
        kind: Kind | None = None,
        v_head_dim: int | None = None,
    ) -> Batch:
        rng = np.random.default_rng(7)
        kv_heads = KV_HEADS if v_head_dim is None else 1
        shapes = [(past + active, kv_heads, HEAD_DIM) for past, active in lengths]
        query = [rng.standard_normal((active, heads, HEAD_DIM)) for _, active in lengths]
        key = [rng.standard_normal(shape) for shape in shapes]
        if v_head_dim is None:
            value = [rng.standard_normal(shape) for shape in shapes]
        else:
            value = [each[..., :v_head_dim] for each in key]
        return cls(lengths, kind or Full(), v_head_dim, query, key, value)

    def rounded(self, dtype: torch.dtype) -> Batch:
        """The same with numbers that `dtype` holds."""
        query, key, value = (
            [torch.from_numpy(tensor).to(dtype).double().numpy() for tensor in part]
            for part in (self.query, self.key, self.value)
        )
        return replace(self, query=query, key=key, value=value)

    @property
    def fields(self) -> int:
        """Of a page: keys and values, or keys alone."""
        return 2 if self.v_head_dim is None else 1

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *accumulate(active for _, active in self.lengths)]

    @property
    def seq_lens(self) -> list[int]:
        return [past + active for past, active in self.lengths]

    @property
    def max_query_len(self) -> int:
        return max(active for _, active in self.lengths)

    @property
    def dense(self) -> np.ndarray:
        return np.concatenate(
            [dense_attention(*qkv, self.kind) for qkv in zip(self.query, self.key, self.value, strict=True)]
        )

    def new(self, tensors: list[np.ndarray]) -> torch.Tensor:
        """The tokens of this forward, flat."""
        pairs = zip(tensors, self.lengths, strict=True)
        return torch.from_numpy(
            np.concatenate([tensor[len(tensor) - active :] for tensor, (_, active) in pairs])
        )

    def write(self, layer_kv: torch.Tensor, tables: Any) -> None:
        """Writes this forward's KV through the tables."""
        key, value = (self.new(part).to(layer_kv.device) for part in (self.key, self.value))
        write_kv(
            layer_kv,
            key,
            value if self.fields == 2 else None,
            tables,
            query_start_loc=self.query_start_loc,
        )

    def read(self, layer_kv: torch.Tensor, tables: Any, dtype: torch.dtype = torch.float64) -> np.ndarray:
        """Attends through the tables."""
        output = paged_attention(
            self.new(self.query).to(layer_kv.device, dtype),
            layer_kv,
            tables,
            query_start_loc=self.query_start_loc,
            v_head_dim=self.v_head_dim,
            **mask_arguments(self.kind),
        )
        assert output.dtype == dtype
        return output.cpu().numpy()

    def attention(self, layer_kv: torch.Tensor, tables: Any) -> np.ndarray:
        """Writes this forward's KV and attends, both through the tables."""
        self.write(layer_kv, tables)
        return self.read(layer_kv, tables)


def mask_arguments(kind: Kind) -> dict[str, int]:
    """How `paged_attention` is told of a kind."""
    match kind:
        case Window(tokens, sinks):
            return {"sliding_window": tokens, "sinks": sinks}
        case Chunked(tokens):
            return {"chunk": tokens}
    return {}


def unwritten(
    pages: int,
    page_size: int,
    *,
    keys_only: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> torch.Tensor:
    """A layer of a block-first pool whose every cell is NaN: who reads one that was not written shows it."""
    block = (page_size, 1, HEAD_DIM) if keys_only else (2, page_size, KV_HEADS, HEAD_DIM)
    return torch.full((pages, LAYERS, *block), torch.nan, dtype=dtype, device=device)[:, LAYER]


def place(batch: Batch, layer_kv: torch.Tensor, rows: Rows) -> None:
    """Puts the KV of tokens before this forward in their cells, as far as they have pages."""
    page_size = layer_kv.shape[-3]
    for row, (past, _) in enumerate(batch.lengths):
        for block, start in enumerate(range(0, past, page_size)):
            page, tokens = rows[row][block], slice(start, min(start + page_size, past))
            cells = slice(tokens.stop - tokens.start)
            if page and batch.fields == 1:
                layer_kv[page, cells] = torch.from_numpy(batch.key[row][tokens])
            elif page:
                layer_kv[page, 0, cells] = torch.from_numpy(batch.key[row][tokens])
                layer_kv[page, 1, cells] = torch.from_numpy(batch.value[row][tokens])


def shuffled_rows(batch: Batch, page_size: int) -> tuple[Rows, int]:
    """Page ids of each request in no order, and the pages in the pool; page 0 is the null page."""
    counts = [-(-length // page_size) for length in batch.seq_lens]
    ids = np.random.default_rng(3).permutation(np.arange(1, sum(counts) + 1)).tolist()
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 1


def without_unseen(batch: Batch, rows: Rows, page_size: int) -> Rows:
    """The rows with the null page for each block that no token of this forward sees."""
    kept = []
    for row, (past, active) in zip(rows, batch.lengths, strict=True):
        seen = set().union(*(needed_blocks(batch.kind, past + n, page_size) for n in range(active)))
        kept.append([page if block in seen else 0 for block, page in enumerate(row)])
    return kept


def max_tables(batch: Batch, rows: Rows, page_size: int) -> MaxTables:
    table = np.zeros((len(rows), max(map(len, rows)) + 16), dtype=np.uint32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    past = np.array([past for past, _ in batch.lengths], dtype=np.uint32)
    return MaxTables(table, past, batch.max_query_len, max(batch.seq_lens))


def vllm_tables(batch: Batch, rows: Rows, page_size: int) -> VllmTables:
    return VllmTables(
        block_table=max_tables(batch, rows, page_size).lookup_table.astype(np.int32),
        seq_lens=np.array(batch.seq_lens, dtype=np.int32),
        slot_mapping=np.array(
            [
                rows[row][position // page_size] * page_size + position % page_size
                for row, (past, active) in enumerate(batch.lengths)
                for position in range(past, past + active)
            ],
            dtype=np.int64,
        ),
        query_start_loc=np.array(batch.query_start_loc, dtype=np.int32),
        max_query_len=batch.max_query_len,
        max_seq_len=max(batch.seq_lens),
    )


def flashinfer_tables(batch: Batch, rows: Rows, page_size: int) -> FlashInferTables:
    return FlashInferTables(
        kv_indptr=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        kv_indices=np.array([page for row in rows for page in row], dtype=np.int32),
        kv_last_page_len=np.array(
            [(length - 1) % page_size + 1 for length in batch.seq_lens], dtype=np.int32
        ),
        qo_indptr=np.array(batch.query_start_loc, dtype=np.int32),
        max_query_len=batch.max_query_len,
        max_seq_len=max(batch.seq_lens),
    )


def tensorrt_tables(
    batch: Batch, rows: Rows, page_size: int, entries_per_page: int | None = None
) -> TensorRTTables:
    """Of a block-first pool of `LAYERS` layers, or of one whose pages are so many entries apart."""
    apart = entries_per_page or LAYERS * batch.fields
    offsets = np.full((len(rows), 2, max(map(len, rows)) + 3), -1, dtype=np.int32)
    for row, pages in enumerate(rows):
        for block, page in enumerate(pages):
            for field in range(batch.fields if page else 0):
                offsets[row, field, block] = page * apart + field
    lengths, starts = np.array(batch.seq_lens, np.int32), np.array(batch.query_start_loc, np.int32)
    return TensorRTTables((offsets,), lengths, starts, batch.max_query_len, max(batch.seq_lens))


TABLES: dict[str, Callable[[Batch, Rows, int], AnyTables]] = {
    "max": max_tables,
    "vllm": vllm_tables,
    "flashinfer": flashinfer_tables,
    "tensorrt": tensorrt_tables,
}
