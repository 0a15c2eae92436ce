"""Padding requests: the null page in tables, nothing held, nothing stored (MGR-10)."""

import pytest

from model.engine import claimed, free, hit, manager, prefilled

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
