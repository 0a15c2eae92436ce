"""Reference attention on torch that reads and writes pages through the tables that kernels read.

It is the proof that a table is right: whatever form the table has, attention over pages must equal dense
attention over the same keys and values. It reads the cells that the mask needs and no others, and refuses a
table that has no page for one of them. It is written to be read, sequence by sequence, not to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pagekeeper.params import whole_number
from pagekeeper.tables import CrossTables, FlashInferTables, MaxTables, Tables, TensorRTTables, VllmTables

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pagekeeper.reference needs torch: pip install 'pagekeeper[torch]'", name="torch"
    ) from error

__all__ = ["paged_attention", "write_kv"]

AnyTables: TypeAlias = Tables | TensorRTTables | CrossTables
Indices: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int]"


def paged_attention(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: AnyTables,
    *,
    scale: float | None = None,
    query_start_loc: Indices | None = None,
    sliding_window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    v_head_dim: int | None = None,
) -> torch.Tensor:
    """Causal attention of every request's new tokens over all of its tokens, read from pages.

    The KV of the new tokens must be in the pages already (see `write_kv`). Requests may have any number
    of new tokens each: one call serves prefill chunks and decodes together. Each request is computed alone.

    With `CrossTables` each token attends to all tokens of its request's encoder; without any the output is 0.

    A block that no new token sees may have the null page, 0 (all ones in TensorRT-LLM's form). A request with
    no other page is padding: it attends to whatever the null page holds.

    Args:
        query: `[total_q, n_heads, head_dim]`, floating; the new tokens of all requests in batch order.
        layer_kv: `[pages, 2, page_size, n_kv_heads, head_dim]`, a layer's `get_buffers(layer)` view. Without
            the second axis the pages hold keys alone, as those of MLA do: values are the keys' first
            `v_head_dim` elements.
        inputs: one replica's tables, such as `kv.runtime_inputs([batch], form="vllm")[0]`.
        scale: factor of the scores; `1 / sqrt(head_dim)` by default.
        query_start_loc: int `[batch + 1]`, where each request starts in `query`. Only the `"max"` form
            needs it, because that table does not say it, and only when a request has more than one new token.
        sliding_window: how many tokens each token sees, itself and those just before it. None is all.
        sinks: how many tokens at the start of a request are seen as well, beyond the sliding window.
        chunk: tokens in a chunk of chunked local attention: each sees the tokens of its own chunk alone.
            None is no chunks.
        v_head_dim: elements of a value, from 1 to `head_dim`, when the pages hold keys alone.

    Returns:
        `[total_q, n_heads, head_dim]`, or `v_head_dim` in place of `head_dim`, in the dtype of `query`. Half
        precision is computed in float32.

    Raises:
        ValueError: shapes disagree, `n_heads` is no multiple of `n_kv_heads`, a page id is outside the
            pool, a request has more new tokens than the table covers, a token that the mask needs has the
            null page, or a mask that does not exist.
    """
    pages = _with_fields(layer_kv)
    _check_tokens(query, pages, "query")
    mask = _Mask.parse(sliding_window, sinks, chunk)
    v_head_dim = _check_v_head_dim(v_head_dim, pages)
    heads, kv_heads, head_dim = query.shape[1], pages.shape[3], pages.shape[4]
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads: must be a multiple of the {kv_heads} KV heads of the pages"
        )
    scale = head_dim**-0.5 if scale is None else scale
    compute = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32

    output = query.new_empty((len(query), heads, v_head_dim))
    for sequence in _sequences(inputs, pages, len(query), query_start_loc):
        seen = mask.seen(sequence, query.device)
        needed = seen.any(0).nonzero().flatten()
        cells = sequence.cells(needed, pages.shape[2])
        # Each is [kv_heads, needed, dim].
        key, value = (part.to(compute).transpose(0, 1) for part in _keys_and_values(pages, cells, v_head_dim))
        rows = slice(sequence.first_query, sequence.first_query + sequence.query_len)
        # Query heads that share a KV head are computed together: [kv_heads, group * query_len, head_dim].
        together = (kv_heads, heads // kv_heads * sequence.query_len)
        grouped = (query[rows].to(compute) * scale).transpose(0, 1).reshape(*together, head_dim)
        scores = (grouped @ key.transpose(1, 2)).view(heads, sequence.query_len, len(needed))
        weights = scores.masked_fill_(~seen[:, needed], float("-inf")).softmax(-1)
        mixed = weights.view(*together, len(needed)) @ value
        output[rows] = mixed.view(heads, sequence.query_len, v_head_dim).transpose(0, 1).to(query.dtype)
    return output


def write_kv(
    layer_kv: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    inputs: AnyTables,
    *,
    query_start_loc: Indices | None = None,
) -> None:
    """Write the keys and values of this forward's tokens to their cells in the pages.

    Args:
        layer_kv: a layer's pages as for `paged_attention`; written.
        key: `[total_q, n_kv_heads, head_dim]`, the new tokens of all requests in batch order.
        value: like `key`; None when the pages hold keys alone.
        inputs: one replica's tables. The `"vllm"` form names the cells itself (`slot_mapping`); with the
            others they are the last ones of each request. Of `CrossTables` they are those of the encoders'
            tokens, all of every request.
        query_start_loc: as for `paged_attention`.

    Raises:
        ValueError: shapes disagree, a cell is outside the pool, or a new token has the null page; nothing is
            written.
    """
    pages = _with_fields(layer_kv)
    if (value is None) != (pages.shape[1] == 1):
        raise ValueError(
            f"value: must be {'given' if value is None else 'None, as the pages hold keys alone'}"
        )
    fields = [key] if value is None else [key, value]
    for name, tensor in zip(("key", "value"), fields, strict=False):
        _check_tokens(tensor, pages, name)
        if tensor.shape != key.shape or tensor.shape[1] != pages.shape[3]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: must be [total_q, {pages.shape[3]}, "
                f"{pages.shape[4]}], the same for key and value"
            )
    page, offset = _new_cells(inputs, pages, len(key), query_start_loc)
    for field, tensor in enumerate(fields):
        pages[page, field, offset] = tensor.to(pages.dtype)


def _new_cells(
    inputs: AnyTables, pages: torch.Tensor, total_q: int, query_start_loc: Indices | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of each new token, in batch order."""
    page_size = pages.shape[2]
    if isinstance(inputs, VllmTables):
        slots, count = _int64(inputs.slot_mapping, pages.device), len(pages) * page_size
        if len(slots) != total_q:
            raise ValueError(f"slot_mapping has {len(slots)} cells for {total_q} tokens of key")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < count:
            raise ValueError(f"slot_mapping has a cell outside 0..{count - 1}")
        return slots // page_size, slots % page_size
    if isinstance(inputs, CrossTables):
        if sum(_ints(inputs.encoder_lens)) != total_q:
            raise ValueError(f"encoder_lens: {_ints(inputs.encoder_lens)}, for {total_q} tokens of key")
        sequences = _sequences(inputs, pages, _ints(inputs.query_start_loc)[-1], None)
    else:
        sequences = _sequences(inputs, pages, total_q, query_start_loc)
    cells = [
        sequence.cells(
            torch.arange(0 if sequence.is_encoded else sequence.past, sequence.kv_len, device=pages.device),
            page_size,
        )
        for sequence in sequences
    ]
    if not cells:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    page, offset = (torch.cat(part) for part in zip(*cells, strict=True))
    return page, offset


def _keys_and_values(
    pages: torch.Tensor, cells: tuple[torch.Tensor, torch.Tensor], v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What some cells hold, `[cells, kv_heads, head_dim]` and `[cells, kv_heads, v_head_dim]`."""
    page, offset = cells
    key = pages[page, 0, offset]
    return key, key[..., :v_head_dim] if pages.shape[1] == 1 else pages[page, 1, offset]


@dataclass(frozen=True, slots=True)
class _Mask:
    """Which tokens a token sees: all up to itself, less what a window or chunks hide."""

    sliding_window: int | None
    sinks: int
    chunk: int | None

    @classmethod
    def parse(cls, sliding_window: int | None, sinks: int, chunk: int | None) -> _Mask:
        if sliding_window is not None:
            sliding_window = whole_number(sliding_window, "sliding_window")
        if chunk is not None:
            chunk = whole_number(chunk, "chunk")
        sinks = whole_number(sinks, "sinks", 0)
        if sinks and sliding_window is None:
            raise ValueError(f"sinks={sinks}: needs a sliding_window")
        if chunk is not None and sliding_window is not None:
            raise ValueError(f"chunk={chunk}, sliding_window={sliding_window}: must not both be given")
        return cls(sliding_window, sinks, chunk)

    def seen(self, sequence: _Sequence, device: torch.device) -> torch.Tensor:
        """Bool `[query_len, kv_len]`: the tokens that each new token sees."""
        if sequence.is_encoded:
            return torch.ones(sequence.query_len, sequence.kv_len, dtype=torch.bool, device=device)
        query_at = torch.arange(sequence.past, sequence.kv_len, device=device).unsqueeze(1)
        token_at = torch.arange(sequence.kv_len, device=device)
        seen = token_at <= query_at
        if self.sliding_window is not None:
            seen &= (token_at > query_at - self.sliding_window) | (token_at < self.sinks)
        if self.chunk is not None:
            seen &= token_at >= query_at // self.chunk * self.chunk
        return seen


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One request of a batch, whatever form its table had."""

    row: int
    pages: torch.Tensor
    """int64 `[ceil(kv_len / page_size)]`; 0 is the null page."""
    first_query: int
    query_len: int
    kv_len: int
    is_encoded: bool = False
    """Whether the pages hold what an encoder made, and nothing of the new tokens."""

    @property
    def past(self) -> int:
        """Tokens that had KV before this forward."""
        return self.kv_len - self.query_len

    def cells(self, positions: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of tokens. Only a request that is padding has cells on the null page."""
        block = positions // page_size
        page = self.pages[block]
        if self.pages.any() and not page.all():
            first = int((page == 0).nonzero()[0])
            raise ValueError(
                f"row {self.row}: token {int(positions[first])} is needed, but its block {int(block[first])} "
                "has the null page"
            )
        return page, positions % page_size


def _sequences(
    inputs: AnyTables, pages: torch.Tensor, total_q: int, query_start_loc: Indices | None
) -> list[_Sequence]:
    """Reads any table form into sequences, checked against the pool and the query."""
    page_size, is_encoded = pages.shape[2], isinstance(inputs, CrossTables)
    starts, kv_lens, rows = _read(inputs, pages, total_q, query_start_loc)
    if not len(starts) == len(rows) + 1 == len(kv_lens) + 1 or starts[0] != 0 or starts[-1] != total_q:
        raise ValueError(
            f"{total_q} tokens were given for {len(rows)} requests, but the query starts are {starts}"
        )
    sequences = []
    for row, (ids, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
        first, last = starts[row], starts[row + 1]
        used = -(-kv_len // page_size)
        if not 0 <= last - first <= (total_q if is_encoded else kv_len) or used > len(ids):
            raise ValueError(
                f"row {row}: {last - first} new tokens of {kv_len} in all do not fit {len(ids)} pages "
                f"of {page_size} tokens"
            )
        ids = ids[:used]
        if used and not 0 <= int(ids.min()) <= int(ids.max()) < len(pages):
            raise ValueError(f"row {row}: page ids {ids.tolist()} are not all in 0..{len(pages) - 1}")
        sequences.append(_Sequence(row, ids, first, last - first, kv_len, is_encoded))
    return sequences


def _read(
    inputs: AnyTables, pages: torch.Tensor, total_q: int, query_start_loc: Indices | None
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Any table form as query starts `[batch + 1]`, tokens with KV `[batch]` and page ids of each row."""
    page_size, device = pages.shape[2], pages.device
    if isinstance(inputs, VllmTables):
        rows = list(_int64(inputs.block_table, device))
        return _ints(inputs.query_start_loc), _ints(inputs.seq_lens), rows
    if isinstance(inputs, CrossTables):
        rows = list(_int64(inputs.block_table, device))
        return _ints(inputs.query_start_loc), _ints(inputs.encoder_lens), rows
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
    if isinstance(inputs, TensorRTTables):
        if len(inputs.pools) != 1:
            raise ValueError(
                f"inputs has {len(inputs.pools)} pools: must be of the layer's alone, as of_pool gives them"
            )
        kv_lens = _ints(inputs.seq_lens)
        entries = _int64(inputs.pools[0], device)[:, : pages.shape[1]]
        rows = [
            _pages_of_entries(row, of_row[:, : -(-kv_len // page_size)], pages)
            for row, (of_row, kv_len) in enumerate(zip(entries, kv_lens, strict=True))
        ]
        return _ints(inputs.query_start_loc), kv_lens, rows
    raise ValueError(
        f"inputs is a {type(inputs).__name__}: "
        "must be one replica's max, vllm, flashinfer, TensorRT or cross tables"
    )


def _pages_of_entries(row: int, entries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The pages that a TensorRT-LLM row `[fields, blocks]` stands for; 0 where it is all ones.

    As for a kernel, an entry is a distance in memory from the layer's first block, counted in blocks of one
    field of one layer. So the layer's own strides say whether other layers lie between two of its pages.
    """
    fields, block = pages.shape[1], math.prod(pages.shape[2:])
    per_page, rest = divmod(pages.stride(0), block)
    if rest or per_page < fields or (fields == 2 and pages.stride(1) != block):
        raise ValueError(
            f"layer_kv has strides {pages.stride()}: TensorRT tables need whole blocks of {block} elements "
            "from page to page, and values next to their keys"
        )
    ids = torch.where(entries[0] == -1, 0, entries[0] // per_page)
    field = torch.arange(fields, device=entries.device).unsqueeze(1)
    if not torch.equal(entries, torch.where(ids == 0, -1, ids * per_page + field)):
        raise ValueError(
            f"row {row}: entries {entries.tolist()} are not those of the {fields} fields of pages of "
            f"{per_page} entries"
        )
    return ids


def _with_fields(layer_kv: torch.Tensor) -> torch.Tensor:
    """`[pages, fields, page_size, n_kv_heads, head_dim]`: keys and values, or the one field of keys alone."""
    if layer_kv.ndim == 4:
        return layer_kv.unsqueeze(1)
    if layer_kv.ndim != 5 or layer_kv.shape[1] != 2:
        raise ValueError(
            f"layer_kv has shape {tuple(layer_kv.shape)}: must be "
            "[pages, 2, page_size, n_kv_heads, head_dim] or [pages, page_size, n_kv_heads, head_dim]"
        )
    return layer_kv


def _check_v_head_dim(v_head_dim: int | None, pages: torch.Tensor) -> int:
    """Elements of a value."""
    fields, head_dim = pages.shape[1], pages.shape[4]
    if (v_head_dim is None) != (fields == 2):
        raise ValueError(
            f"v_head_dim={v_head_dim}: must be given when the pages hold keys alone, and only then"
        )
    return head_dim if v_head_dim is None else whole_number(v_head_dim, "v_head_dim", 1, head_dim)


def _check_tokens(tokens: torch.Tensor, pages: torch.Tensor, name: str) -> None:
    if tokens.ndim != 3 or tokens.shape[2] != pages.shape[4]:
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}: must be [total_q, heads, {pages.shape[4]}]"
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
