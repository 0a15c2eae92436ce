"""The manager that is none (MGR-10): every public name of the real one, and every call does nothing."""

import inspect
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import request

PUBLIC = [name for name in vars(pk.PagedKVCacheManager) if not name.startswith("_")]
MANAGER = pk.PagedKVCacheManager(
    pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1),
    total_num_pages=1,
    max_batch_size=1,
    allocate_pools=False,
)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_call_of_a_manager_is_there_with_its_arguments(name: str) -> None:
    real, dummy = vars(pk.PagedKVCacheManager)[name], vars(pk.DummyKVCache)[name]
    assert type(dummy) is type(real)
    if inspect.isfunction(real):
        assert shape(dummy) == shape(real)


def shape(function: Any) -> list[tuple[str, Any, Any, Any]]:
    return [
        (parameter.name, parameter.kind, parameter.default, parameter.annotation)
        for parameter in inspect.signature(function).parameters.values()
    ]


def test_it_is_made_with_the_arguments_of_a_manager_or_with_none() -> None:
    real, dummy = inspect.signature(pk.PagedKVCacheManager), inspect.signature(pk.DummyKVCache)
    assert list(dummy.parameters) == list(real.parameters)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in dummy.parameters.values())


@pytest.mark.parametrize("attribute", [name for name in sorted(vars(MANAGER)) if not name.startswith("_")])
def test_it_has_the_attributes_of_a_manager(attribute: str) -> None:
    given = {"total_num_pages": 7, "max_batch_size": 3, "max_seq_len": 50, "max_num_input_tokens": 9}
    names = {"model_name": "a", "weights_revision": "b"}
    dummy = pk.DummyKVCache(MANAGER.params, **given, **names)  # type: ignore[arg-type]
    assert getattr(dummy, attribute) == ({"params": MANAGER.params} | given | names)[attribute]
    assert hasattr(pk.DummyKVCache(), attribute)


def test_every_request_is_there_and_every_transfer_complete() -> None:
    kv = pk.DummyKVCache()
    assert isinstance(kv, pk.PagedKVCacheManager)
    a, b = request([1]), request([2])
    kv.claim(a)
    assert kv.contains(b)
    assert kv.alloc(a).is_complete()
    assert kv.alloc(0).is_complete()
    assert [transfer.is_complete() for transfer in kv.alloc([a, b])] == [True, True]
    assert len(kv.alloc(np.zeros(3, np.int32))) == 3
    assert kv.alloc_dummy(a).is_complete()
    assert kv.poll_transfers() == []


def test_the_verbs_of_a_request_do_nothing() -> None:
    kv = pk.DummyKVCache()
    a, b = request([1]), request([2])
    kv.step([a, b], new_tokens=[1, 1])
    kv.truncate(a, 0)
    kv.preempt(a)
    kv.release([a, b])
    assert [ctx.tokens.all.tolist() for ctx in (a, b)] == [[1], [2]]


def test_its_one_page_is_free_and_nothing_is_cached_or_counted() -> None:
    kv = pk.DummyKVCache(total_num_pages=50)
    assert (kv.block_count().free, kv.block_count().total) == (1, 1)
    assert kv.metrics() == {}
    assert kv.probe_prefix_match_length([1, 2, 3], salt="a") == 0
    assert kv.analyze_prefix_reuse([1, 2, 3]).first_new_block is None
    assert kv.commit_and_get_block_hashes(request([1])) == []
    assert kv.hash_seed is None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer"])
def test_tables_are_empty_and_of_the_right_batch(form: Any, batch: int) -> None:
    requests = [request([1]) for _ in range(batch)]
    tables = pk.DummyKVCache().runtime_inputs([requests], form=form)[0]
    rows = {"max": "cache_lengths", "vllm": "seq_lens", "flashinfer": "kv_last_page_len"}[form]
    assert len(getattr(tables, rows)) == batch
    arrays = [getattr(tables, name) for name in tables.__slots__]
    assert not any(array.any() for array in arrays if isinstance(array, np.ndarray))


def test_one_request_has_a_table_of_one_row() -> None:
    assert pk.DummyKVCache().runtime_inputs([request([1])])[0].lookup_table.shape == (1, 16)


def test_look_ups_are_empty() -> None:
    kv = pk.DummyKVCache()
    a, b = request([1]), request([2])
    assert kv.get_cache_indices(a) == [[]]
    assert kv.get_batch_cache_indices([a, b]) == [[[]], [[]]]
    assert kv.slot_mapping(a, [0, 1, 2]).tolist() == [0, 0, 0]
    out = np.full((1, 1, 2, 2), 5, np.int32)
    assert kv.copy_block_offsets(out, 0, a) == 0
    assert (out == 5).all()


def test_there_is_no_pool() -> None:
    with pytest.raises(ValueError, match="there is no pool"):
        pk.DummyKVCache().get_buffers(0)
    with pytest.raises(ValueError, match="there is no pool"):
        pk.DummyKVCache().pages_view()
    with pytest.raises(ValueError, match="there is no pool"):
        pk.DummyKVCache().pool_pointers()


def test_the_books_are_always_in_order() -> None:
    kv = pk.DummyKVCache()
    kv.verify()
    kv.reset_prefix_cache()
    assert kv.begin_step(completions=[3]) == 0
    assert (kv.fingerprint(), kv.debug_dump()) == (0, "DummyKVCache")
    kv.shutdown()


def test_an_unknown_argument_is_a_type_error_as_in_a_manager() -> None:
    with pytest.raises(TypeError, match="pages"):
        pk.DummyKVCache(pages=3)  # type: ignore[call-arg]
