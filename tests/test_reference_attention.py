"""Attention over pages equals dense attention, whichever table form says where the pages are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, RequestID, TextContext, TokenBuffer
from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import FlashInferTables, MaxTables, Tables, VllmTables

KV_HEADS, HEADS, HEAD_DIM = 2, 6, 4
PAGE_SIZES = (1, 16, 128)
FORMS = ("max", "vllm", "flashinfer")

# (tokens that have KV already, tokens of this forward): decodes, first and later chunks, page borders.
RAGGED = ((0, 1), (37, 1), (0, 20), (16, 16), (127, 2), (130, 9), (15, 1))


def dense_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention by the textbook, a query token and a head at a time.

    `query` [query_len, heads, head_dim] is the end of `key` and `value` [kv_len, kv_heads, head_dim].
    """
    output = np.empty_like(query)
    past = len(key) - len(query)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // key.shape[1])
            seen = slice(0, past + token + 1)
            scores = key[seen, kv_head] @ query[token, head] / np.sqrt(query.shape[2])
            weights = np.exp(scores - scores.max())
            output[token, head] = weights @ value[seen, kv_head] / weights.sum()
    return output


@dataclass
class Batch:
    """Random queries, keys and values of some requests, by request."""

    lengths: tuple[tuple[int, int], ...]
    query: list[np.ndarray]
    key: list[np.ndarray]
    value: list[np.ndarray]

    @classmethod
    def random(cls, lengths: tuple[tuple[int, int], ...], heads: int = HEADS) -> Batch:
        rng = np.random.default_rng(7)
        return cls(
            lengths,
            query=[rng.standard_normal((active, heads, HEAD_DIM)) for _, active in lengths],
            key=[rng.standard_normal((past + active, KV_HEADS, HEAD_DIM)) for past, active in lengths],
            value=[rng.standard_normal((past + active, KV_HEADS, HEAD_DIM)) for past, active in lengths],
        )

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *accumulate(active for _, active in self.lengths)]

    @property
    def max_query_len(self) -> int:
        return max(active for _, active in self.lengths)

    @property
    def max_seq_len(self) -> int:
        return max(past + active for past, active in self.lengths)

    @property
    def dense(self) -> np.ndarray:
        return np.concatenate(
            [dense_attention(*qkv) for qkv in zip(self.query, self.key, self.value, strict=True)]
        )

    def new(self, tensors: list[np.ndarray]) -> torch.Tensor:
        """The tokens of this forward, flat."""
        pairs = zip(tensors, self.lengths, strict=True)
        return torch.from_numpy(
            np.concatenate([tensor[len(tensor) - active :] for tensor, (_, active) in pairs])
        )

    def attention(self, layer_kv: torch.Tensor, tables: Any) -> np.ndarray:
        """Writes this forward's KV and attends, both through the tables."""
        starts = self.query_start_loc
        query, key, value = (
            self.new(part).to(layer_kv.device) for part in (self.query, self.key, self.value)
        )
        write_kv(layer_kv, key, value, tables, query_start_loc=starts)
        return paged_attention(query, layer_kv, tables, query_start_loc=starts).cpu().numpy()


def garbage(pages: int, page_size: int, seed: int = 0) -> torch.Tensor:
    """A layer whose every cell holds large, finite nonsense."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pages, 2, page_size, KV_HEADS, HEAD_DIM)
    return 1e6 * torch.randn(shape, generator=generator, dtype=torch.float64)


def place(batch: Batch, layer_kv: torch.Tensor, rows: list[list[int]]) -> None:
    """Puts the KV of tokens before this forward in their cells, a cell at a time."""
    page_size = layer_kv.shape[2]
    for row, (past, _) in enumerate(batch.lengths):
        for position in range(past):
            page, offset = rows[row][position // page_size], position % page_size
            layer_kv[page, 0, offset] = torch.from_numpy(batch.key[row][position])
            layer_kv[page, 1, offset] = torch.from_numpy(batch.value[row][position])


def shuffled_rows(batch: Batch, page_size: int) -> tuple[list[list[int]], int]:
    """Page ids of each request in no order, and the pages in the pool; page 0 is the null page."""
    counts = [-(-(past + active) // page_size) for past, active in batch.lengths]
    ids = np.random.default_rng(3).permutation(np.arange(1, sum(counts) + 1)).tolist()
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 1


def max_tables(batch: Batch, rows: list[list[int]], page_size: int) -> MaxTables:
    table = np.zeros((len(rows), max(map(len, rows)) + 16), dtype=np.uint32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    past = np.array([past for past, _ in batch.lengths], dtype=np.uint32)
    return MaxTables(table, past, batch.max_query_len, batch.max_seq_len)


def vllm_tables(batch: Batch, rows: list[list[int]], page_size: int) -> VllmTables:
    return VllmTables(
        block_table=max_tables(batch, rows, page_size).lookup_table.astype(np.int32),
        seq_lens=np.array([past + active for past, active in batch.lengths], dtype=np.int32),
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
        max_seq_len=batch.max_seq_len,
    )


def flashinfer_tables(batch: Batch, rows: list[list[int]], page_size: int) -> FlashInferTables:
    lengths = [past + active for past, active in batch.lengths]
    return FlashInferTables(
        kv_indptr=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        kv_indices=np.array([page for row in rows for page in row], dtype=np.int32),
        kv_last_page_len=np.array([(length - 1) % page_size + 1 for length in lengths], dtype=np.int32),
        qo_indptr=np.array(batch.query_start_loc, dtype=np.int32),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


TABLES: dict[str, Callable[[Batch, list[list[int]], int], Tables]] = {
    "max": max_tables,
    "vllm": vllm_tables,
    "flashinfer": flashinfer_tables,
}


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_shuffled_pages_equals_dense_attention(form: Any, page_size: int, device: str) -> None:
    batch = Batch.random(RAGGED)
    rows, pages = shuffled_rows(batch, page_size)
    layer_kv = garbage(pages, page_size)
    place(batch, layer_kv, rows)
    output = batch.attention(layer_kv.to(device), TABLES[form](batch, rows, page_size))
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_through_the_managers_tables_equals_dense_attention(form: Any, page_size: int) -> None:
    batch = Batch.random(RAGGED)
    params = MHAKVCacheParams(
        dtype="float64",
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=1,
        page_size=page_size,
        devices=["cpu"],
    )
    kv = PagedKVCacheManager(
        params=params, total_num_pages=shuffled_rows(batch, page_size)[1] + 8, max_batch_size=8
    )
    layer_kv = kv.get_buffers(0)
    layer_kv.copy_(garbage(len(layer_kv), page_size))
    mix_free_pages(kv)

    requests = [context(past + active, first_token=1000 * row) for row, (past, active) in enumerate(RAGGED)]
    for request in requests:
        kv.claim(request)
    later = [row for row, (past, _) in enumerate(RAGGED) if past]
    earlier = [requests[row] for row in later]
    kv.alloc(earlier, num_tokens=[RAGGED[row][0] for row in later])
    starts = np.cumsum([0, *(RAGGED[row][0] for row in later)])
    key, value = (
        torch.from_numpy(np.concatenate([tensor[row][: RAGGED[row][0]] for row in later]))
        for tensor in (batch.key, batch.value)
    )
    write_kv(layer_kv, key, value, kv.runtime_inputs([earlier], form=form)[0], query_start_loc=starts)
    kv.step(earlier)

    kv.alloc(requests)
    output = batch.attention(layer_kv, kv.runtime_inputs([requests], form=form)[0])
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)
    row = kv.get_cache_indices(requests[5])[0]
    assert row != list(range(row[0], row[0] + len(row)))  # or the table would have proved little


@pytest.mark.parametrize("form", FORMS)
def test_padding_requests_leave_the_others_alone(form: Any) -> None:
    batch = Batch.random(((0, 20), (0, 5)))
    params = MHAKVCacheParams(
        dtype="float64", n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_layers=1, page_size=16, devices=["cpu"]
    )
    kv = PagedKVCacheManager(params=params, total_num_pages=4, max_batch_size=2)
    request, padding = context(20, first_token=0), context(5, first_token=100)
    kv.claim(request)
    kv.alloc(request)
    kv.alloc_dummy(padding)
    output = batch.attention(kv.get_buffers(0), kv.runtime_inputs([[request, padding]], form=form)[0])
    np.testing.assert_allclose(output[:20], batch.dense[:20], rtol=0, atol=1e-12)


def context(length: int, first_token: int) -> TextContext:
    tokens = np.arange(first_token, first_token + length, dtype=np.int32)
    return TextContext(request_id=RequestID(), max_length=length, tokens=TokenBuffer(tokens))


def mix_free_pages(kv: PagedKVCacheManager) -> None:
    """Leaves the free pages of a fresh manager in no simple order."""
    count = kv.total_num_pages // 3
    requests = [context(3 * kv.params.page_size, first_token=10**6) for _ in range(count)]
    for request in requests:
        kv.claim(request)
    kv.alloc(requests)
    for index in np.random.default_rng(5).permutation(count):
        kv.release(requests[index])


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_query_heads_share_kv_heads_in_consecutive_groups(heads: int) -> None:
    batch = Batch.random(RAGGED[:4], heads)
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = garbage(pages, 16)
    place(batch, layer_kv, rows)
    output = batch.attention(layer_kv, vllm_tables(batch, rows, 16))
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_null_page_and_unused_cells_have_no_influence(form: Any) -> None:
    batch = Batch.random(RAGGED)
    rows, pages = shuffled_rows(batch, 16)
    outputs = []
    for seed in (1, 2):
        layer_kv = garbage(pages, 16, seed)
        place(batch, layer_kv, rows)
        outputs.append(batch.attention(layer_kv, TABLES[form](batch, rows, 16)))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_a_wrong_page_id_changes_the_output() -> None:
    batch = Batch.random(RAGGED)
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = garbage(pages, 16)
    place(batch, layer_kv, rows)
    tables = vllm_tables(batch, rows, 16)
    right = batch.attention(layer_kv, tables)
    tables.block_table[1, [0, 1]] = tables.block_table[1, [1, 0]]
    wrong = batch.attention(layer_kv, tables)
    changed = [row for row, same in enumerate((right == wrong).all(axis=(1, 2))) if not same]
    assert changed == [1]  # request 1 has one new token, the second row of the flat query


def test_new_tokens_land_in_the_cells_of_the_slot_mapping() -> None:
    layer_kv = torch.zeros((4, 2, 2, KV_HEADS, HEAD_DIM), dtype=torch.float64)
    tables = VllmTables(
        block_table=np.array([[3, 1]], dtype=np.int32),
        seq_lens=np.array([3], dtype=np.int32),
        slot_mapping=np.array([7, 2], dtype=np.int64),  # page 3 offset 1, page 1 offset 0
        query_start_loc=np.array([0, 2], dtype=np.int32),
        max_query_len=2,
        max_seq_len=3,
    )
    key = torch.ones((2, KV_HEADS, HEAD_DIM), dtype=torch.float64)
    write_kv(layer_kv, key, 2 * key, tables)
    written = {tuple(cell) for cell in layer_kv[:, :, :, 0, 0].nonzero().tolist()}
    assert written == {(3, 0, 1), (3, 1, 1), (1, 0, 0), (1, 1, 0)}
    assert layer_kv[3, 1, 1].unique().tolist() == [2.0]


def test_half_precision_pages_are_computed_in_float32() -> None:
    batch = Batch.random(RAGGED[:3])
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = garbage(pages, 16)
    place(batch, layer_kv, rows)
    tables = vllm_tables(batch, rows, 16)
    batch.attention(layer_kv, tables)
    query = batch.new(batch.query).bfloat16()
    half = paged_attention(query, layer_kv.bfloat16(), tables)
    single = paged_attention(query.float(), layer_kv.bfloat16(), tables)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, single.bfloat16(), rtol=0, atol=0)


def test_the_scale_of_scores_can_be_given() -> None:
    batch = Batch.random(RAGGED[:3])
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = garbage(pages, 16)
    place(batch, layer_kv, rows)
    tables = vllm_tables(batch, rows, 16)
    batch.attention(layer_kv, tables)
    # Scores of zero weigh all seen tokens alike, so a decode gives the mean of its values.
    output = paged_attention(batch.new(batch.query), layer_kv, tables, scale=0.0)
    mean = batch.value[1].mean(axis=0).repeat(HEADS // KV_HEADS, axis=0)
    np.testing.assert_allclose(output[1].numpy(), mean, rtol=0, atol=1e-12)


def test_decodes_need_no_query_starts_in_the_max_form() -> None:
    batch = Batch.random(((5, 1), (33, 1)))
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = garbage(pages, 16)
    place(batch, layer_kv, rows)
    tables = max_tables(batch, rows, 16)
    write_kv(layer_kv, batch.new(batch.key), batch.new(batch.value), tables)
    output = paged_attention(batch.new(batch.query), layer_kv, tables)
    np.testing.assert_allclose(output.numpy(), batch.dense, rtol=0, atol=1e-12)


def test_the_max_form_asks_for_query_starts_when_chunks_are_ambiguous() -> None:
    batch = Batch.random(((5, 2), (33, 1)))
    rows, pages = shuffled_rows(batch, 16)
    with pytest.raises(ValueError, match="2 requests share the 3 tokens: give query_start_loc"):
        paged_attention(batch.new(batch.query), garbage(pages, 16), max_tables(batch, rows, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tables: tables.block_table.__setitem__((0, 0), 99),
            r"row 0: page ids \[99\] are not all in 0..2",
        ),
        (lambda tables: tables.seq_lens.__setitem__(0, 0), "row 0: 1 new tokens of 0 in all"),
        (lambda tables: tables.seq_lens.__setitem__(0, 400), "do not fit 17 pages of 16 tokens"),
        (lambda tables: tables.query_start_loc.__setitem__(1, 7), "1 tokens were given for 1 requests"),
    ],
)
def test_tables_that_contradict_the_query_or_the_pool_are_refused(
    change: Callable[[VllmTables], None], message: str
) -> None:
    batch = Batch.random(((3, 1),))
    tables = vllm_tables(batch, [[2]], 16)
    change(tables)
    with pytest.raises(ValueError, match=message):
        paged_attention(batch.new(batch.query), garbage(3, 16), tables)


@pytest.mark.parametrize("cell", [-1, 3 * 16])
def test_a_cell_outside_the_pool_is_refused_and_nothing_is_written(cell: int) -> None:
    batch = Batch.random(((3, 1),))
    tables = vllm_tables(batch, [[2]], 16)
    tables.slot_mapping[0] = cell
    layer_kv = garbage(3, 16)
    before = layer_kv.clone()
    with pytest.raises(ValueError, match=r"slot_mapping has a cell outside 0\.\.47"):
        write_kv(layer_kv, batch.new(batch.key), batch.new(batch.value), tables)
    assert torch.equal(layer_kv, before)


def test_heads_that_cannot_share_are_refused() -> None:
    batch = Batch.random(((3, 1),), heads=3)
    with pytest.raises(ValueError, match="query has 3 heads: must be a multiple of the 2 KV heads"):
        paged_attention(batch.new(batch.query), garbage(3, 16), vllm_tables(batch, [[2]], 16))


def test_something_that_is_no_table_is_refused() -> None:
    batch = Batch.random(((3, 1),))
    with pytest.raises(
        ValueError, match="inputs is a dict: must be one replica's max, vllm or flashinfer tables"
    ):
        paged_attention(batch.new(batch.query), garbage(3, 16), {})  # type: ignore[arg-type]


def test_without_torch_the_import_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import pagekeeper.reference"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("pagekeeper.reference needs torch: pip install 'pagekeeper[torch]'\n")
