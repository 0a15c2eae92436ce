"""Reference attention on torch that reads and writes pages through the tables that kernels read.

It is the proof that a table is right: whatever form the table has, attention over pages must equal dense
attention over the same keys and values. It is written to be read, sequence by sequence, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pagekeeper.tables import FlashInferTables, MaxTables, Tables, VllmTables

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pagekeeper.reference needs torch: pip install 'pagekeeper[torch]'", name="torch"
    ) from error

__all__ = ["paged_attention", "write_kv"]

Indices: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int]"


def paged_attention(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: Tables,
    *,
    scale: float | None = None,
    query_start_loc: Indices | None = None,
) -> torch.Tensor:
    """Causal attention of every request's new tokens over all of its tokens, read from pages.

    The KV of the new tokens must be in the pages already (see `write_kv`). Requests may have any number
    of new tokens each: one call serves prefill chunks and decodes together. Each request is computed alone.

    Args:
        query: `[total_q, n_heads, head_dim]`, floating; the new tokens of all requests in batch order.
        layer_kv: `[pages, 2, page_size, n_kv_heads, head_dim]`, a layer's `get_buffers(layer)` view.
        inputs: one replica's tables, such as `kv.runtime_inputs([batch], form="vllm")[0]`.
        scale: factor of the scores; `1 / sqrt(head_dim)` by default.
        query_start_loc: int `[batch + 1]`, where each request starts in `query`. Only the `"max"` form
            needs it, because that table does not say it, and only when a request has more than one new token.

    Returns:
        `[total_q, n_heads, head_dim]` in the dtype of `query`. Half precision is computed in float32.

    Raises:
        ValueError: shapes disagree, `n_heads` is no multiple of `n_kv_heads`, a page id is outside the
            pool, or a request has more new tokens than the table covers.
    """
    _check_pages(layer_kv, query, "query")
    heads, kv_heads, head_dim = query.shape[1], layer_kv.shape[3], layer_kv.shape[4]
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads: must be a multiple of the {kv_heads} KV heads of the pages"
        )
    scale = head_dim**-0.5 if scale is None else scale
    compute = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32

    output = torch.empty_like(query)
    for sequence in _sequences(inputs, layer_kv, len(query), query_start_loc):
        # Each is [kv_heads, kv_len, head_dim]; cells after kv_len are never used.
        key, value = (
            layer_kv[sequence.pages, field].flatten(0, 1)[: sequence.kv_len].to(compute).transpose(0, 1)
            for field in (0, 1)
        )
        rows = slice(sequence.first_query, sequence.first_query + sequence.query_len)
        # Query heads that share a KV head are computed together: [kv_heads, group * query_len, head_dim].
        together = (kv_heads, heads // kv_heads * sequence.query_len)
        grouped = (query[rows].to(compute) * scale).transpose(0, 1).reshape(*together, head_dim)
        scores = (grouped @ key.transpose(1, 2)).view(heads, sequence.query_len, sequence.kv_len)
        weights = scores.masked_fill_(_future(sequence, query.device), float("-inf")).softmax(-1)
        mixed = weights.view(*together, sequence.kv_len) @ value
        output[rows] = mixed.view(heads, sequence.query_len, head_dim).transpose(0, 1).to(query.dtype)
    return output


def write_kv(
    layer_kv: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: Tables,
    *,
    query_start_loc: Indices | None = None,
) -> None:
    """Write the keys and values of this forward's tokens to their cells in the pages.

    Args:
        layer_kv: `[pages, 2, page_size, n_kv_heads, head_dim]`, a layer's `get_buffers(layer)`; written.
        key: `[total_q, n_kv_heads, head_dim]`, the new tokens of all requests in batch order.
        value: like `key`.
        inputs: one replica's tables. The `"vllm"` form names the cells itself (`slot_mapping`); with the
            others they are the last ones of each request.
        query_start_loc: as for `paged_attention`.

    Raises:
        ValueError: shapes disagree, or a cell is outside the pool; nothing is written.
    """
    for name, tensor in (("key", key), ("value", value)):
        _check_pages(layer_kv, tensor, name)
        if tensor.shape != key.shape or tensor.shape[1] != layer_kv.shape[3]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: must be [total_q, {layer_kv.shape[3]}, "
                f"{layer_kv.shape[4]}], the same for key and value"
            )
    pages, _, page_size = layer_kv.shape[:3]
    if isinstance(inputs, VllmTables):
        slots = _int64(inputs.slot_mapping, layer_kv.device)
        if len(slots) != len(key):
            raise ValueError(f"slot_mapping has {len(slots)} cells for {len(key)} tokens of key")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < pages * page_size:
            raise ValueError(f"slot_mapping has a cell outside 0..{pages * page_size - 1}")
        page, offset = slots // page_size, slots % page_size
    else:
        cells = []
        for sequence in _sequences(inputs, layer_kv, len(key), query_start_loc):
            position = torch.arange(sequence.past, sequence.kv_len, device=layer_kv.device)
            cells.append(torch.stack((sequence.pages[position // page_size], position % page_size)))
        page, offset = torch.cat(cells, dim=1) if cells else torch.empty((2, 0), dtype=torch.int64)
    layer_kv[page, 0, offset] = key.to(layer_kv.dtype)
    layer_kv[page, 1, offset] = value.to(layer_kv.dtype)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One request of a batch, whatever form its table had."""

    pages: torch.Tensor
    """int64 `[ceil(kv_len / page_size)]`."""
    first_query: int
    query_len: int
    kv_len: int

    @property
    def past(self) -> int:
        """Tokens that had KV before this forward."""
        return self.kv_len - self.query_len


def _sequences(
    inputs: Tables, layer_kv: torch.Tensor, total_q: int, query_start_loc: Indices | None
) -> list[_Sequence]:
    """Reads any table form into sequences, checked against the pool and the query."""
    pool_pages, _, page_size = layer_kv.shape[:3]
    starts, kv_lens, rows = _read(inputs, page_size, layer_kv.device, total_q, query_start_loc)
    if not len(starts) == len(rows) + 1 == len(kv_lens) + 1 or starts[0] != 0 or starts[-1] != total_q:
        raise ValueError(
            f"{total_q} tokens were given for {len(rows)} requests, but the query starts are {starts}"
        )
    sequences = []
    for row, (pages, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
        first, last = starts[row], starts[row + 1]
        used = -(-kv_len // page_size)
        if not 0 <= last - first <= kv_len or used > len(pages):
            raise ValueError(
                f"row {row}: {last - first} new tokens of {kv_len} in all do not fit {len(pages)} pages "
                f"of {page_size} tokens"
            )
        pages = pages[:used]
        if used and not 0 <= int(pages.min()) <= int(pages.max()) < pool_pages:
            raise ValueError(f"row {row}: page ids {pages.tolist()} are not all in 0..{pool_pages - 1}")
        sequences.append(_Sequence(pages, first, last - first, kv_len))
    return sequences


def _read(
    inputs: Tables, page_size: int, device: torch.device, total_q: int, query_start_loc: Indices | None
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Any table form as query starts `[batch + 1]`, tokens with KV `[batch]` and page ids of each row."""
    if isinstance(inputs, VllmTables):
        rows = list(_int64(inputs.block_table, device))
        return _ints(inputs.query_start_loc), _ints(inputs.seq_lens), rows
    if isinstance(inputs, FlashInferTables):
        bounds, indices = _ints(inputs.kv_indptr), _int64(inputs.kv_indices, device)
        rows = [indices[first:last] for first, last in pairwise(bounds)]
        kv_lens = [
            max(len(row) - 1, 0) * page_size + last
            for row, last in zip(rows, _ints(inputs.kv_last_page_len), strict=True)
        ]
        return _ints(inputs.qo_indptr), kv_lens, rows
    if isinstance(inputs, MaxTables):
        past = _ints(inputs.cache_lengths)
        rows = list(_int64(inputs.lookup_table, device))
        if query_start_loc is None:
            if total_q != len(past):
                raise ValueError(
                    f"the max table does not say how {len(past)} requests share the {total_q} tokens: "
                    "give query_start_loc"
                )
            query_start_loc = range(total_q + 1)
        starts = _ints(query_start_loc)
        kv_lens = [n + last - first for n, first, last in zip(past, starts, starts[1:], strict=False)]
        return starts, kv_lens, rows
    raise ValueError(
        f"inputs is a {type(inputs).__name__}: must be one replica's max, vllm or flashinfer tables"
    )


def _future(sequence: _Sequence, device: torch.device) -> torch.Tensor:
    """Bool `[query_len, kv_len]`: the tokens that come after each query token."""
    query_at = torch.arange(sequence.past, sequence.kv_len, device=device).unsqueeze(1)
    return torch.arange(sequence.kv_len, device=device) > query_at


def _check_pages(layer_kv: torch.Tensor, tokens: torch.Tensor, name: str) -> None:
    if layer_kv.ndim != 5 or layer_kv.shape[1] != 2:
        raise ValueError(
            f"layer_kv has shape {tuple(layer_kv.shape)}: must be [pages, 2, page_size, n_kv_heads, head_dim]"
        )
    if tokens.ndim != 3 or tokens.shape[2] != layer_kv.shape[4]:
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}: must be [total_q, heads, {layer_kv.shape[4]}]"
        )


def _ints(values: Indices) -> list[int]:
    return [
        int(value) for value in (values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else values)
    ]


def _int64(values: Indices, device: torch.device) -> torch.Tensor:
    """Indices as torch wants them; uint32 goes by way of int32, as torch does little with unsigned ones."""
    if isinstance(values, torch.Tensor):
        signed = values.view(torch.int32) if values.dtype == torch.uint32 else values
        return signed.to(device, torch.int64)
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
