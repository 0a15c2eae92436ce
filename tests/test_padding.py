"""Padding requests, and the manager that is none (MGR-10)."""

import pytest

import pagekeeper as pk
from model.engine import claimed, free, hit, manager, prefilled, request

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks of four."""


def test_a_padding_request_reads_the_null_page_and_takes_none() -> None:
    kv = manager(pages=4)
    real, padding = claimed(kv, PROMPT[:5]), claimed(kv, [0])
    kv.alloc(real)
    kv.alloc_dummy(padding)
    tables = kv.runtime_inputs([[real, padding]])[0]
    assert tables.lookup_table[0, :2].tolist() == [1, 2]
    assert not tables.lookup_table[1].any()
    assert free(kv) == 2
    kv.verify()


def test_a_padding_request_is_stepped_and_released_like_any_other_and_stores_nothing() -> None:
    kv = manager(pages=4)
    padding = claimed(kv, PROMPT[:4])
    kv.alloc_dummy(padding)
    kv.step(padding, new_tokens=[0])
    assert hit(kv, PROMPT) == 0
    kv.release(padding)
    assert free(kv) == 4
    kv.verify()


def test_a_request_that_holds_pages_cannot_become_padding() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:5])
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="padding"):
        kv.alloc_dummy(ctx)
    assert kv.fingerprint() == before


def test_the_dummy_cache_accepts_everything_and_holds_nothing() -> None:
    kv = pk.DummyKVCache()
    assert isinstance(kv, pk.PagedKVCacheManager)
    a, b = request([1]), request([2])
    kv.claim(a)
    assert kv.contains(b)
    assert kv.alloc(a).is_complete()
    assert [transfer.is_complete() for transfer in kv.alloc([a, b])] == [True, True]
    kv.step([a, b], new_tokens=[1, 1])
    kv.release(a)
    assert (kv.block_count().free, kv.block_count().total) == (1, 1)
    assert kv.metrics() == {}


def test_the_dummy_cache_gives_empty_tables_of_the_right_batch() -> None:
    tables = pk.DummyKVCache().runtime_inputs([[request([1]), request([2]), request([3])]])[0]
    assert tables.lookup_table.shape[0] == 3
    assert not tables.lookup_table.any()
