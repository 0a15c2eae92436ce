"""Attention over pages equals dense attention under every mask, and reads nothing that the mask hides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from model.attention import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    TABLES,
    Batch,
    place,
    shuffled_rows,
    tensorrt_tables,
    unwritten,
    vllm_tables,
    without_unseen,
)
from model.windows import Chunked, Full, Kind, Window, blocks_behind, needed_blocks
from pagekeeper.reference import paged_attention, write_kv

FORMS = tuple(TABLES)
LATENT = 3
"""Of a key's 4 elements, those that are its value too."""

# (tokens that have KV already, tokens of this forward): decodes and chunks, short of windows and past them.
RAGGED = ((0, 1), (37, 1), (0, 20), (16, 16), (127, 2), (130, 9), (300, 40), (641, 1), (1023, 3))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small are computed sooner by one thread, above all where others want the processors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kinds(page_size: int) -> list[Kind]:
    around = (1, page_size - 1, page_size, page_size + 1, 500)
    return [
        Full(),
        *(Window(tokens) for tokens in (*around, 5000)),
        *(
            Window(tokens, sinks)
            for tokens in (1, page_size + 1, 500)
            for sinks in (1, page_size, page_size + 1)
        ),
        *(Chunked(tokens) for tokens in (*around, 3 * page_size, 5000)),
    ]


KINDS_AND_PAGE_SIZES = [
    pytest.param(kind, page_size, id=f"{kind}-{page_size}")
    for page_size in (16, 128)
    for kind in kinds(page_size)
]


@cache
def ragged(kind: Kind, v_head_dim: int | None = None) -> tuple[Batch, np.ndarray]:
    """A batch, and dense attention over it; both as float32 holds its numbers."""
    batch = Batch.random(RAGGED, kind=kind, v_head_dim=v_head_dim).rounded(torch.float32)
    return batch, batch.dense


@pytest.mark.parametrize("v_head_dim", [None, LATENT], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "page_size"), KINDS_AND_PAGE_SIZES)
def test_attention_over_what_the_mask_shows_equals_dense_attention(
    kind: Kind, page_size: int, form: str, v_head_dim: int | None
) -> None:
    batch, dense = ragged(kind, v_head_dim)
    output = through_pages(batch, form, page_size, torch.float64)
    np.testing.assert_allclose(output, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("v_head_dim", [None, LATENT], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize("form", FORMS)
def test_in_float32_it_is_the_same_to_a_hundred_thousandth(
    form: str, v_head_dim: int | None, device: str
) -> None:
    for kind in kinds(16):
        batch, dense = ragged(kind, v_head_dim)
        output = through_pages(batch, form, 16, torch.float32, device)
        np.testing.assert_allclose(output, dense, rtol=0, atol=1e-5, err_msg=str(kind))


@pytest.mark.parametrize("v_head_dim", [None, LATENT], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_pages_of_fewer_bits_are_computed_in_the_querys_precision(
    dtype: torch.dtype, v_head_dim: int | None
) -> None:
    batch = Batch.random(RAGGED[:6], kind=Window(17, sinks=3), v_head_dim=v_head_dim).rounded(dtype)
    output = through_pages(batch, "vllm", 16, torch.float32, pages=dtype)
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-5)


def through_pages(
    batch: Batch,
    form: str,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    pages: torch.dtype | None = None,
) -> np.ndarray:
    """Attention over shuffled pages: only those that the mask shows, all else is NaN."""
    rows, count = shuffled_rows(batch, page_size)
    rows = without_unseen(batch, rows, page_size)
    layer_kv = unwritten(count, page_size, keys_only=batch.fields == 1, dtype=pages or dtype, device=device)
    place(batch, layer_kv, rows)
    tables = TABLES[form](batch, rows, page_size)
    batch.write(layer_kv, tables)
    return batch.read(layer_kv, tables, dtype)


@pytest.mark.parametrize("kind", [Full(), Window(1), Window(9), Window(9, sinks=5), Chunked(12)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_block_that_the_mask_needs_and_no_other_must_have_a_page(form: str, kind: Kind) -> None:
    for past in (27, 30, 31, 32, 35, 36):
        batch = Batch.random(((3, 1), (past, 1)), kind=kind)
        rows, pages = shuffled_rows(batch, 4)
        layer_kv = unwritten(pages, 4)
        place(batch, layer_kv, rows)
        right = batch.attention(layer_kv, TABLES[form](batch, rows, 4))
        for block, page in enumerate(rows[1]):
            kept = layer_kv[page].clone()
            layer_kv[page] = torch.nan
            tables = TABLES[form](batch, [rows[0], [*rows[1][:block], 0, *rows[1][block + 1 :]]], 4)
            if block in needed_blocks(kind, past, 4):
                with pytest.raises(
                    ValueError, match=rf"^row 1: token \d+ is needed, but its block {block} has"
                ):
                    batch.read(layer_kv, tables)
            else:
                np.testing.assert_array_equal(batch.read(layer_kv, tables), right)
            layer_kv[page] = kept


def test_the_first_token_of_a_prompts_chunk_may_need_what_its_last_does_not() -> None:
    batch = Batch.random(((8, 4),), kind=Window(3))
    tables = vllm_tables(batch, [[3, 0, 2]], 4)
    # Token 8 sees 6 and 7; token 11 sees 9 and 10. Block 0 is seen by neither.
    with pytest.raises(
        ValueError, match=re.escape("row 0: token 6 is needed, but its block 1 has the null page")
    ):
        batch.attention(unwritten(4, 4), tables)


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"vllm"}))
def test_a_new_token_needs_a_page_to_be_written(form: str) -> None:
    batch = Batch.random(((4, 5),))
    layer_kv = unwritten(4, 4)
    with pytest.raises(ValueError, match="row 0: token 4 is needed, but its block 1 has the null page"):
        batch.write(layer_kv, TABLES[form](batch, [[3, 0, 2]], 4))
    assert layer_kv.isnan().all()


@pytest.mark.parametrize("v_head_dim", [None, LATENT], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind",
    [Full(), Window(1), Window(13), Window(16), Window(21, sinks=9), Chunked(24), Chunked(13)],
    ids=str,
)
def test_requests_that_give_back_what_is_behind_their_windows_stay_right(
    kind: Kind, form: str, v_head_dim: int | None
) -> None:
    lengths = (90, 61, 75)
    whole = Batch.random([(0, length) for length in lengths], kind=kind, v_head_dim=v_head_dim)
    dense = np.split(whole.dense, whole.query_start_loc[1:-1])
    requests = Pages(kind, unwritten(40, 8, keys_only=v_head_dim is not None), len(lengths))
    rng = np.random.default_rng(11)
    done = [0, 0, 0]
    while chosen := [row for row in rng.permutation(3).tolist() if done[row] < lengths[row]]:
        ends = [min(done[row] + int(rng.choice([1, 1, 5, 20])), lengths[row]) for row in chosen]
        for row, end in zip(chosen, ends, strict=True):
            requests.give_back_behind(row, done[row])
            requests.take_up_to(row, end)
        batch = part_of(whole, chosen, [done[row] for row in chosen], ends)
        tables = TABLES[form](batch, [requests.rows[row] for row in chosen], 8)
        expected = [dense[row][done[row] : end] for row, end in zip(chosen, ends, strict=True)]
        output = batch.attention(requests.layer_kv, tables)
        np.testing.assert_allclose(output, np.concatenate(expected), rtol=0, atol=1e-12)
        for row, end in zip(chosen, ends, strict=True):
            done[row] = end


class Pages:
    """A few requests that share the pages of a layer and keep what their kind may still see."""

    def __init__(self, kind: Kind, layer_kv: torch.Tensor, requests: int) -> None:
        self.kind, self.layer_kv, self.page_size = kind, layer_kv, layer_kv.shape[-3]
        self.free = list(range(1, len(layer_kv)))
        self.rows: list[list[int]] = [[] for _ in range(requests)]

    def give_back_behind(self, row: int, position: int) -> None:
        for block in blocks_behind(self.kind, position, self.page_size):
            page, self.rows[row][block] = self.rows[row][block], 0
            if page:
                self.layer_kv[page] = torch.nan
                self.free.insert(len(self.free) // 2, page)

    def take_up_to(self, row: int, tokens: int) -> None:
        while len(self.rows[row]) * self.page_size < tokens:
            self.rows[row].append(self.free.pop(3 % len(self.free)))


def part_of(whole: Batch, rows: list[int], starts: list[int], ends: list[int]) -> Batch:
    """Some requests of a batch when their tokens from `starts` up to `ends` are computed."""
    spans = list(zip(rows, starts, ends, strict=True))
    return Batch(
        [(start, end - start) for _, start, end in spans],
        whole.kind,
        whole.v_head_dim,
        query=[whole.query[row][start:end] for row, start, end in spans],
        key=[whole.key[row][:end] for row, _, end in spans],
        value=[whole.value[row][:end] for row, _, end in spans],
    )


# TensorRT-LLM's entries


@pytest.mark.parametrize("keys_only", [False, True], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize("layer_first", [False, True], ids=["block first", "layer first"])
def test_an_entry_is_a_distance_in_memory_from_the_layers_first_block(
    layer_first: bool, keys_only: bool
) -> None:
    layers, layer, fields = 3, 2, 1 if keys_only else 2
    batch = Batch.random(((20, 3), (5, 1)), v_head_dim=LATENT if keys_only else None)
    rows, pages = shuffled_rows(batch, 16)
    block = (16, 1 if keys_only else KV_HEADS, HEAD_DIM)
    memory = torch.full((layers * pages * fields, *block), torch.nan, dtype=torch.float64)
    # (slot * layers + layer) * fields + field, or (layer * pages + slot) * fields + field
    if layer_first:
        pool, per_page, of_layer = memory.view(layers, pages, fields, *block), fields, pages * fields
    else:
        pool, per_page, of_layer = memory.view(pages, layers, fields, *block), layers * fields, fields
        pool = pool.transpose(0, 1)
    tables = tensorrt_tables(batch, rows, 16, per_page)
    for row, (past, active) in enumerate(batch.lengths):
        for position in range(past + active):
            for field, part in enumerate((batch.key, batch.value)[:fields]):
                entry = int(tables.pools[0][row, field, position // 16])
                memory[entry + layer * of_layer, position % 16] = torch.from_numpy(part[row][position])
    layer_kv = pool[layer].squeeze(1) if keys_only else pool[layer]
    np.testing.assert_allclose(batch.read(layer_kv, tables), batch.dense, rtol=0, atol=1e-12)


def test_the_second_field_is_not_read_where_pages_hold_keys_alone() -> None:
    batch = Batch.random(((20, 3),), v_head_dim=LATENT)
    layer_kv = unwritten(3, 16, keys_only=True)
    place(batch, layer_kv, [[2, 1]])
    tables = tensorrt_tables(batch, [[2, 1]], 16)
    assert (tables.pools[0][:, 1] == -1).all()
    right = batch.attention(layer_kv, tables)
    np.testing.assert_allclose(right, batch.dense, rtol=0, atol=1e-12)
    tables.pools[0][:, 1] = 77
    np.testing.assert_array_equal(batch.read(layer_kv, tables), right)


@pytest.mark.parametrize(
    ("field", "entry"),
    [(0, 7), (0, -2), (1, 6), (1, 13), (1, -1), (0, 0), (0, -(2**31) + 6)],
    ids=["values first", "negative", "keys last", "another page", "no values", "page 0", "host memory"],
)
def test_entries_that_are_not_those_of_one_page_are_refused(field: int, entry: int) -> None:
    batch = Batch.random(((3, 1),))
    tables = tensorrt_tables(batch, [[1]], 16)
    assert tables.pools[0][0, :, 0].tolist() == [6, 7]  # page 1 of 3 layers of two fields
    tables.pools[0][0, field, 0] = entry
    with pytest.raises(
        ValueError, match=r"^row 0: entries .* are not those of the 2 fields of pages of 6 entries"
    ):
        batch.read(unwritten(3, 16), tables)


def test_tensorrt_tables_need_pages_that_lie_whole_blocks_apart() -> None:
    batch = Batch.random(((3, 1),))
    block = 16 * KV_HEADS * HEAD_DIM
    for padded in (2 * block + 1, block):
        layer_kv = torch.zeros(8 * block, dtype=torch.float64)
        layer_kv = layer_kv.as_strided((3, 2, 16, KV_HEADS, HEAD_DIM), (padded, block, 8, 4, 1))
        with pytest.raises(ValueError, match=f"need whole blocks of {block} elements from page to page"):
            batch.read(layer_kv, tensorrt_tables(batch, [[1]], 16))


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0: must be a whole number from 1"),
        ({"sliding_window": 4, "sinks": -1}, "sinks=-1: must be a whole number from 0"),
        ({"sinks": 4}, "sinks=4: needs a sliding_window"),
        ({"chunk": 0}, "chunk=0: must be a whole number from 1"),
        ({"chunk": 8, "sliding_window": 4}, "chunk=8, sliding_window=4: must not both be given"),
        ({"v_head_dim": 3}, "v_head_dim=3: must be given when the pages hold keys alone, and only then"),
    ],
)
def test_a_mask_that_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    batch = Batch.random(((3, 1),))
    with pytest.raises(ValueError, match=message):
        paged_attention(batch.new(batch.query), unwritten(3, 16), vllm_tables(batch, [[2]], 16), **arguments)


@pytest.mark.parametrize(
    ("v_head_dim", "message"),
    [
        (None, "v_head_dim=None: must be given when the pages hold keys alone"),
        (HEAD_DIM + 1, "v_head_dim=5: must be a whole number from 1 to 4"),
    ],
)
def test_pages_of_keys_alone_need_to_know_what_of_them_is_the_value(
    v_head_dim: int | None, message: str
) -> None:
    batch = Batch.random(((3, 1),), v_head_dim=LATENT)
    layer_kv, tables = unwritten(3, 16, keys_only=True), vllm_tables(batch, [[2]], 16)
    with pytest.raises(ValueError, match=message):
        paged_attention(batch.new(batch.query), layer_kv, tables, v_head_dim=v_head_dim)


@pytest.mark.parametrize("keys_only", [False, True])
def test_values_are_written_where_pages_hold_them_and_only_there(keys_only: bool) -> None:
    batch = Batch.random(((3, 1),), v_head_dim=LATENT if keys_only else None)
    layer_kv, key = unwritten(3, 16, keys_only=keys_only), batch.new(batch.key)
    message = "must be None, as the pages hold keys alone" if keys_only else "must be given"
    with pytest.raises(ValueError, match=f"^value: {message}$"):
        write_kv(layer_kv, key, key if keys_only else None, vllm_tables(batch, [[2]], 16))
    assert layer_kv.isnan().all()


@pytest.mark.parametrize("shape", [(3, 16, 4), (3, 1, 16, 2, 4), (3, 3, 16, 2, 4)])
def test_pages_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    batch = Batch.random(((3, 1),))
    with pytest.raises(
        ValueError, match=re.escape(f"layer_kv has shape {shape}: must be [pages, 2, page_size")
    ):
        paged_attention(batch.new(batch.query), torch.zeros(shape), vllm_tables(batch, [[2]], 16))


@pytest.mark.parametrize("heads", [1, HEADS])
def test_all_query_heads_share_the_latent(heads: int) -> None:
    batch = Batch.random(((40, 3), (7, 1)), heads, v_head_dim=LATENT)
    output = through_pages(batch, "vllm", 16, torch.float64)
    assert output.shape == (4, heads, LATENT)
    np.testing.assert_allclose(output, batch.dense, rtol=0, atol=1e-12)
