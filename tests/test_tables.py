"""What kernels read: four table forms over one ledger, look-ups of pages, and the pools."""

from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, decode_and_prompt, manager, prefilled, row, store

PROMPT = list(range(10, 30))


@pytest.fixture
def kv() -> pk.PagedKVCacheManager:
    return manager(pages=9, max_batch_size=4)


@pytest.fixture
def batch(kv: pk.PagedKVCacheManager) -> list[pk.TextContext]:
    return decode_and_prompt(kv)


# MAX (TAB-1)


def test_the_max_table_holds_pages_then_null_pages_with_room_for_a_wide_load(kv: Any, batch: Any) -> None:
    table = kv.runtime_inputs([batch], form="max")[0].lookup_table
    assert table.dtype == np.uint32
    assert table.tolist() == [[1, 2] + [0] * 30, [3, 4] + [0] * 30]  # nine pages: ceil8 is 16, and 16 more


def test_the_max_form_tells_the_lengths_before_the_forward(kv: Any, batch: Any) -> None:
    tables = kv.runtime_inputs([batch], form="max")[0]
    assert tables.cache_lengths.dtype == np.uint32
    assert tables.cache_lengths.tolist() == [6, 0]
    assert tables.max_prompt_length == 5
    assert tables.max_cache_length == 7


def test_max_is_the_form_that_is_given_unasked(kv: Any, batch: Any) -> None:
    assert kv.runtime_inputs([batch])[0].lookup_table.shape == (2, 32)


@pytest.mark.parametrize(("max_seq_len", "columns"), [(4, 24), (32, 24), (33, 32), (10_000, 32)])
def test_a_table_is_as_wide_as_the_most_pages_of_one_request(max_seq_len: int, columns: int) -> None:
    kv = manager(pages=9, max_seq_len=max_seq_len)
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]])[0].lookup_table.shape == (1, columns)


# vLLM and FlashAttention


def test_the_vllm_form_holds_pages_lengths_and_the_slot_of_every_new_token(kv: Any, batch: Any) -> None:
    tables = kv.runtime_inputs([batch], form="vllm")[0]
    assert tables.block_table.dtype == np.int32
    assert [cells[:3] for cells in tables.block_table.tolist()] == [[1, 2, 0], [3, 4, 0]]
    assert not tables.block_table[:, 2:].any()
    assert tables.seq_lens.dtype == np.int32
    assert tables.seq_lens.tolist() == [7, 5]
    assert tables.slot_mapping.dtype == np.int64
    assert tables.slot_mapping.tolist() == [2 * 4 + 2, 12, 13, 14, 15, 16]
    assert tables.query_start_loc.dtype == np.int32
    assert tables.query_start_loc.tolist() == [0, 1, 6]
    assert (tables.max_query_len, tables.max_seq_len) == (5, 7)


# FlashInfer


def test_the_flashinfer_form_holds_ragged_pages_and_the_fill_of_the_last(kv: Any, batch: Any) -> None:
    tables = kv.runtime_inputs([batch], form="flashinfer")[0]
    for name in ("kv_indptr", "kv_indices", "kv_last_page_len", "qo_indptr"):
        assert getattr(tables, name).dtype == np.int32
    assert tables.kv_indptr.tolist() == [0, 2, 4]
    assert tables.kv_indices.tolist() == [1, 2, 3, 4]
    assert tables.kv_last_page_len.tolist() == [3, 1]  # seven and five tokens on pages of four
    assert tables.qo_indptr.tolist() == [0, 1, 6]


def test_a_last_page_that_is_full_counts_as_full_in_flashinfer() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]], form="flashinfer")[0].kv_last_page_len.tolist() == [4]


def test_pages_reserved_beyond_this_forward_are_not_read_by_flashinfer() -> None:
    kv = manager(pages=8, reserve="prompt")
    ctx = claimed(kv, PROMPT[:16])
    kv.alloc(ctx, num_tokens=5)
    tables = kv.runtime_inputs([[ctx]], form="flashinfer")[0]
    assert tables.kv_indptr.tolist() == [0, 2]
    assert tables.kv_indices.tolist() == [1, 2]
    assert tables.kv_last_page_len.tolist() == [1]


# Every form


@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer", "tensorrt"])
def test_rows_stand_in_the_order_of_the_batch(kv: Any, batch: Any, form: str) -> None:
    there = kv.runtime_inputs([batch], form=form)[0]
    lengths = {
        "max": "cache_lengths",
        "vllm": "seq_lens",
        "flashinfer": "kv_last_page_len",
        "tensorrt": "seq_lens",
    }[form]
    first = getattr(there, lengths).tolist()
    back = kv.runtime_inputs([batch[::-1]], form=form)[0]
    assert getattr(back, lengths).tolist() == first[::-1]


@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer", "tensorrt"])
def test_slots_in_an_array_give_the_tables_of_their_contexts(kv: Any, batch: Any, form: str) -> None:
    name = {
        "max": "lookup_table",
        "vllm": "block_table",
        "flashinfer": "kv_indices",
        "tensorrt": "pools",
    }[form]
    listed = np.array(getattr(kv.runtime_inputs([batch], form=form)[0], name)).tolist()
    slots = np.array([ctx.slot for ctx in batch], np.int32)
    assert np.array(getattr(kv.runtime_inputs([slots], form=form)[0], name)).tolist() == listed


def test_a_hit_and_a_miss_in_one_batch_read_their_own_pages() -> None:
    kv = manager(pages=9)
    store(kv, PROMPT[:12])
    reader, newcomer = claimed(kv, PROMPT[:13]), claimed(kv, range(50, 58))
    kv.alloc([reader, newcomer])
    table = kv.runtime_inputs([[reader, newcomer]])[0].lookup_table
    assert table[:, :4].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


# Staging memory (TAB-2)


def test_tables_live_at_two_addresses_that_never_change() -> None:
    kv = manager(pages=9)
    ctx = claimed(kv, PROMPT[:3])
    places = []
    for token in range(6):
        kv.alloc(ctx)
        places.append(kv.runtime_inputs([[ctx]])[0].lookup_table.ctypes.data)
        kv.step(ctx, new_tokens=[token])
    assert places[0] != places[1]
    assert places == places[:2] * 3


def test_the_tables_of_a_step_stand_while_the_next_step_is_written() -> None:
    kv = manager(pages=9)
    ctx = claimed(kv, PROMPT[:4])
    kv.alloc(ctx)
    this = kv.runtime_inputs([[ctx]])[0].lookup_table
    kv.alloc(ctx)
    following = kv.runtime_inputs([[ctx]])[0].lookup_table
    assert this[0, :2].tolist() == [1, 0]
    assert following[0, :2].tolist() == [1, 2]


def test_a_shorter_row_leaves_no_page_of_the_longer_one_before_it() -> None:
    kv = manager(pages=9)
    long = claimed(kv, PROMPT[:16])
    kv.alloc(long)
    for _ in range(2):
        kv.runtime_inputs([[long]])
    kv.release(long)
    short = claimed(kv, [1])
    kv.alloc(short)
    for _ in range(2):
        table = kv.runtime_inputs([[short]])[0].lookup_table
        assert table[0].tolist() == [4] + [0] * 31  # the tail of the longer one was given back first


def test_a_row_that_a_twin_changed_is_changed_in_both_buffers() -> None:
    kv = manager(pages=9)
    a, b = claimed(kv, PROMPT[:4]), claimed(kv, PROMPT[:4])
    kv.alloc([a, b])
    for _ in range(2):
        kv.runtime_inputs([[b]])
    kv.step([a, b], new_tokens=[7, 8])
    kv.alloc([a, b])
    for _ in range(2):
        assert kv.runtime_inputs([[b]])[0].lookup_table[0, :2].tolist() == row(kv, b)
    assert row(kv, b)[0] == row(kv, a)[0] == 1


# Look-ups (TAB-6)


def test_indices_are_given_by_beam_and_block(kv: Any, batch: Any) -> None:
    assert kv.get_cache_indices(batch[0]) == [[1, 2]]
    assert kv.get_batch_cache_indices(batch) == [[[1, 2]], [[3, 4]]]


def test_the_slot_of_a_position_follows_the_row_and_not_the_neighbour() -> None:
    kv = manager(pages=9)
    stored = store(kv, PROMPT[:8])
    assert stored == [1, 2]
    hold = prefilled(kv, range(50, 58))
    ctx = claimed(kv, [*PROMPT[:8], 60, 61])
    kv.alloc(ctx)
    assert row(kv, hold) == [3, 4]
    assert row(kv, ctx) == [1, 2, 5]
    slots = kv.slot_mapping(ctx, np.array([0, 3, 4, 7, 8, 9]))
    assert slots.dtype == np.int64
    assert slots.tolist() == [4, 7, 8, 11, 20, 21]


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_without_a_page_has_no_slot(kv: Any, batch: Any, position: int) -> None:
    with pytest.raises(ValueError, match=str(position)):
        kv.slot_mapping(batch[0], np.array([position]))


def test_a_position_that_is_no_whole_number_is_refused(kv: Any, batch: Any) -> None:
    with pytest.raises(ValueError, match="positions"):
        kv.slot_mapping(batch[0], [0.5])
