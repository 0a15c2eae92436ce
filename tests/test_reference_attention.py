"""Attention over pages equals dense attention, whichever table form says where the pages are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from model.attention import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    LAYERS,
    TABLES,
    AnyTables,
    Batch,
    max_tables,
    place,
    shuffled_rows,
    unwritten,
    vllm_tables,
)
from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, RequestID, TextContext, TokenBuffer
from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import Form, KVCacheInputs, Tables, VllmTables

PAGE_SIZES = (1, 16, 128)
FORMS = tuple(TABLES)
FORMS_AND_PAGE_SIZES = [
    (form, page_size)
    for form in FORMS
    for page_size in PAGE_SIZES
    if page_size > 1 or form != "tensorrt"  # whose kernels want a power of two above 1
]

# (tokens that have KV already, tokens of this forward): decodes, first and later chunks, page borders.
RAGGED = ((0, 1), (37, 1), (0, 20), (16, 16), (127, 2), (130, 9), (15, 1))


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(("form", "page_size"), FORMS_AND_PAGE_SIZES)
def test_attention_over_shuffled_pages_equals_dense_attention(form: str, page_size: int, device: str) -> None:
    batch = Batch.random(RAGGED)
    rows, pages = shuffled_rows(batch, page_size)
    layer_kv = unwritten(pages, page_size, device=device)
    place(batch, layer_kv, rows)
    output = batch.attention(layer_kv, TABLES[form](batch, rows, page_size))
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "page_size"), FORMS_AND_PAGE_SIZES)
def test_attention_through_the_managers_tables_equals_dense_attention(form: str, page_size: int) -> None:
    batch = Batch.random(RAGGED)
    params = MHAKVCacheParams(
        dtype="float64",
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=LAYERS,
        page_size=page_size,
        devices=["cpu"],
    )
    kv = PagedKVCacheManager(
        params=params, total_num_pages=shuffled_rows(batch, page_size)[1] + 8, max_batch_size=8
    )
    layer_kv = kv.get_buffers(LAYER)
    layer_kv.fill_(torch.nan)
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
    tables = managers_tables(kv, earlier, form)
    write_kv(layer_kv, key, value, tables, query_start_loc=starts)
    kv.step(earlier)

    kv.alloc(requests)
    output = batch.attention(layer_kv, managers_tables(kv, requests, form))
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)
    row = kv.get_cache_indices(requests[5])[0]
    assert row != list(range(row[0], row[0] + len(row)))  # or the table would have proved little


@pytest.mark.parametrize("form", get_args(Form))
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


@pytest.mark.parametrize("form", FORMS)
def test_a_request_with_the_null_page_alone_is_padding(form: str) -> None:
    batch = Batch.random(((0, 20), (3, 5), (17, 1)))
    layer_kv = unwritten(6, 16)
    rows = [[4, 2], [0], [5, 1]]
    place(batch, layer_kv, rows)
    output = batch.attention(layer_kv, TABLES[form](batch, rows, 16))
    others = [*range(20), 25]
    np.testing.assert_allclose(output[others], batch.dense[others], rtol=0, atol=1e-12)


def managers_tables(kv: PagedKVCacheManager, requests: list[TextContext], form: Any) -> AnyTables:
    """The tables of a step."""
    inputs: KVCacheInputs[Tables] = kv.runtime_inputs([requests], form=form)
    return inputs[0]


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
    layer_kv = unwritten(pages, 16)
    place(batch, layer_kv, rows)
    output = batch.attention(layer_kv, vllm_tables(batch, rows, 16))
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)


def test_a_wrong_page_id_changes_the_output() -> None:
    batch = Batch.random(RAGGED)
    rows, pages = shuffled_rows(batch, 16)
    layer_kv = unwritten(pages, 16)
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
    layer_kv = unwritten(pages, 16)
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
    layer_kv = unwritten(pages, 16)
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
    layer_kv = unwritten(pages, 16)
    place(batch, layer_kv, rows)
    tables = max_tables(batch, rows, 16)
    write_kv(layer_kv, batch.new(batch.key), batch.new(batch.value), tables)
    output = paged_attention(batch.new(batch.query), layer_kv, tables)
    np.testing.assert_allclose(output.numpy(), batch.dense, rtol=0, atol=1e-12)


def test_the_max_form_asks_for_query_starts_when_chunks_are_ambiguous() -> None:
    batch = Batch.random(((5, 2), (33, 1)))
    rows, pages = shuffled_rows(batch, 16)
    with pytest.raises(ValueError, match="2 requests share the 3 tokens: give query_start_loc"):
        paged_attention(batch.new(batch.query), unwritten(pages, 16), max_tables(batch, rows, 16))


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
        paged_attention(batch.new(batch.query), unwritten(3, 16), tables)


@pytest.mark.parametrize("cell", [-1, 3 * 16])
def test_a_cell_outside_the_pool_is_refused_and_nothing_is_written(cell: int) -> None:
    batch = Batch.random(((3, 1),))
    tables = vllm_tables(batch, [[2]], 16)
    tables.slot_mapping[0] = cell
    layer_kv = unwritten(3, 16)
    with pytest.raises(ValueError, match=r"slot_mapping has a cell outside 0\.\.47"):
        write_kv(layer_kv, batch.new(batch.key), batch.new(batch.value), tables)
    assert layer_kv.isnan().all()


def test_heads_that_cannot_share_are_refused() -> None:
    batch = Batch.random(((3, 1),), heads=3)
    with pytest.raises(ValueError, match="query has 3 heads: must be a multiple of the 2 KV heads"):
        paged_attention(batch.new(batch.query), unwritten(3, 16), vllm_tables(batch, [[2]], 16))


def test_something_that_is_no_table_is_refused() -> None:
    batch = Batch.random(((3, 1),))
    with pytest.raises(
        ValueError,
        match="inputs is a dict: must be one replica's max, vllm, flashinfer, TensorRT or cross tables",
    ):
        paged_attention(batch.new(batch.query), unwritten(3, 16), {})  # type: ignore[arg-type]


def test_without_torch_the_import_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import pagekeeper.reference"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("pagekeeper.reference needs torch: pip install 'pagekeeper[torch]'\n")
