"""One request, by its context or by its slot (API-1): wherever one is meant, and nowhere a batch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pagekeeper as pk
from model.engine import claimed, free, manager, prefilled, request, row

PROMPT = list(range(10, 30))
OUT = np.zeros((1, 1, 2, 8), np.int32)

ONE: dict[str, Callable[[Any, Any], Any]] = {
    "commit_and_get_block_hashes": lambda kv, one: kv.commit_and_get_block_hashes(one),
    "get_cache_indices": lambda kv, one: kv.get_cache_indices(one),
    "slot_mapping": lambda kv, one: kv.slot_mapping(one, [0, 5]).tolist(),
    "copy_block_offsets": lambda kv, one: kv.copy_block_offsets(OUT, 0, one),
    "get_batch_cache_indices": lambda kv, one: kv.get_batch_cache_indices(one),
}


@pytest.mark.parametrize("number", [int, np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("call", ONE)
def test_a_slot_answers_as_its_context_does(call: str, number: Any) -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:10])
    assert ONE[call](kv, number(ctx.slot)) == ONE[call](kv, ctx)


@pytest.mark.parametrize("call", [name for name in ONE if "batch" not in name])
@pytest.mark.parametrize(
    "form", ["list", "tuple", "array", "scalar array", "tensor", "text", "none", "float"]
)
def test_what_is_not_one_request_is_a_type_error_where_one_is_meant(call: str, form: str) -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT[:10])
    given: dict[str, Any] = {
        "list": [ctx],
        "tuple": (ctx,),
        "array": np.array([ctx.slot], np.int32),
        "scalar array": np.array(ctx.slot),
        "tensor": torch.tensor([ctx.slot]),
        "text": str(ctx.slot),
        "none": None,
        "float": 0.0,
    }
    with pytest.raises(TypeError, match=r"^ctx: got .*; give one TextContext or one slot$"):
        ONE[call](kv, given[form])


@pytest.mark.parametrize("slot", [-1, 2**31, 2**64, True])
def test_what_can_be_no_slot_is_a_value_error(slot: int) -> None:
    kv = manager()
    prefilled(kv, PROMPT[:10])
    with pytest.raises(ValueError, match=r"^ctx: "):
        kv.get_cache_indices(slot)
    with pytest.raises(ValueError, match=r"^batch: "):
        kv.release(slot)


def test_a_slot_that_was_released_is_refused() -> None:
    kv = manager()
    ctx = request(PROMPT[:10])
    slot = kv.claim(ctx)
    kv.release(ctx)
    with pytest.raises(ValueError, match=f"slot {slot}"):
        kv.commit_and_get_block_hashes(slot)


def test_an_engines_own_request_lives_by_its_slot_alone() -> None:
    kv = manager(pages=8)
    slot = kv.claim(SimpleNamespace(request_id="mine", tokens=PROMPT[:10]))
    assert kv.alloc(slot).is_complete()
    assert kv.runtime_inputs([slot], form="vllm")[0].seq_lens.tolist() == [10]
    kv.step(slot, 7)
    assert kv.get_cache_indices(slot) == [[1, 2, 3]]
    assert kv.commit_and_get_block_hashes(slot) == pk.hash_blocks(PROMPT[:8], 4)
    kv.preempt(slot)
    assert free(kv) == 8
    kv.alloc(slot)
    kv.step(slot, 8)
    kv.truncate(slot, 6)
    kv.alloc(slot)
    assert kv.runtime_inputs([slot], form="vllm")[0].seq_lens.tolist() == [6]
    kv.release(slot)
    assert not kv.contains(SimpleNamespace(request_id="mine", tokens=[]))
    kv.verify()


def test_a_slot_may_become_a_padding_request() -> None:
    kv = manager(pages=4)
    slot = kv.claim(SimpleNamespace(request_id="padding", tokens=[0]))
    kv.alloc_dummy(slot)
    assert not kv.runtime_inputs([slot])[0].lookup_table.any()
    assert free(kv) == 4


def test_truncating_by_slot_is_truncating_the_context() -> None:
    by_context, by_slot = manager(), manager()
    a, b = prefilled(by_context, PROMPT), prefilled(by_slot, PROMPT)
    a.truncate(9)
    assert b.slot is not None
    by_slot.truncate(b.slot, 9)
    assert a.tokens.all.tolist() == b.tokens.all.tolist() == PROMPT[:9]
    assert row(by_context, a) == row(by_slot, b)
    assert a.processed_length == b.processed_length


@pytest.mark.parametrize("length", [-1, 21, 2**40])
def test_truncating_to_a_length_that_is_not_there_changes_nothing(length: int) -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=str(length)):
        kv.truncate(ctx, length)
    assert kv.fingerprint() == before


def test_truncating_a_request_that_is_not_claimed_is_refused() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT)
    kv.release(ctx)
    with pytest.raises(ValueError, match="released"):
        kv.truncate(ctx, 4)
    assert len(ctx.tokens) == 20


def test_a_tensor_is_no_batch_however_many_slots_it_holds() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT)
    for given in (torch.tensor(ctx.slot), torch.tensor([ctx.slot])):
        with pytest.raises(TypeError, match=r"^batch: got Tensor; give "):
            kv.alloc(given)  # type: ignore[call-overload]


def test_one_request_gets_one_transfer_and_a_batch_a_list() -> None:
    kv = manager(pages=16)
    contexts = [claimed(kv, range(100 * n, 100 * n + 5)) for n in range(4)]
    assert isinstance(kv.alloc(contexts[0]), pk.CompletedTransfer)
    slot = contexts[1].slot
    assert slot is not None
    assert isinstance(kv.alloc(np.int32(slot)), pk.CompletedTransfer)
    transfers = kv.alloc(contexts[2:])
    assert [transfer.is_complete() for transfer in transfers] == [True, True]
