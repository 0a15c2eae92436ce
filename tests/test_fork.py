"""Forks (MGR-11): several continuations of one prompt on shared pages, copied when the first one writes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, request, row
from pagekeeper.pools import DevicePool
from tiny_model import cache, forward, greedy

PROMPT = [1, 2, 3, 4, 5, 6]


# Parallel sampling


@pytest.mark.usefixtures("one_thread")
def test_continuations_of_one_prompt_are_those_of_requests_that_share_nothing() -> None:
    prompt = [5, 17, 3, 88, 41, 9, 12, 60, 33, 2]
    kv = cache(pages=20)
    first = claimed(kv, prompt)
    kv.alloc(first)
    forward(kv, [first], [prompt])
    kv.step(first)
    family = [first, *(kv.fork(first) for _ in range(3))]
    assert kv.block_count().used == 3  # one prompt, ten tokens
    samples = [[20 + index] for index in range(4)]  # what sampling chose behind the prompt
    for ctx, sample in zip(family, samples, strict=True):
        ctx.update(sample[0])
    for _ in range(8):
        kv.alloc(family)
        given = forward(kv, family, [sample[-1:] for sample in samples])
        for sample, (token,) in zip(samples, given, strict=True):
            sample.append(token)
        kv.step(family, new_tokens=[token for (token,) in given])
        kv.verify()
    assert samples == [[start, *greedy([*prompt, start], 8)] for start in (20, 21, 22, 23)]
    assert kv.metrics()["page_copies"] == 3  # the last of the four wrote in place
    kv.release(family)
    assert kv.block_count().used == 0


# The child


def test_a_fork_is_a_claimed_request_with_the_tokens_and_settings_of_its_parent() -> None:
    kv = manager()
    options = {"max_new_tokens": 9, "num_draft_tokens": 2, "cache_salt": "a", "no_store": True}
    parent = prefilled(kv, PROMPT, **options)
    child = kv.fork(parent, request_id="child")
    assert (child.request_id, kv.contains(child)) == ("child", True)
    assert child.tokens == parent.tokens
    assert child.processed_length == 6
    told = (child.max_length, child.max_new_tokens, child.num_draft_tokens, child.cache_salt)
    assert told == (parent.max_length, 9, 2, "a")
    assert (child.no_read, child.no_store) == (False, True)
    assert row(kv, child) == row(kv, parent)[:2]  # not the page that the parent has for drafts


def test_a_fork_without_a_name_gets_one() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    assert isinstance(kv.fork(parent).request_id, pk.RequestID)


def test_a_request_is_forked_by_its_slot() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    assert parent.slot is not None
    assert kv.fork(parent.slot).tokens == parent.tokens


def test_a_fork_of_a_fork_shares_the_same_pages() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    grandchild = kv.fork(kv.fork(parent))
    assert row(kv, grandchild) == row(kv, parent) == [1, 2]
    kv.verify()


def test_the_blocks_of_a_salted_fork_are_found_with_the_salt_alone() -> None:
    kv = manager()
    child = kv.fork(prefilled(kv, PROMPT, cache_salt="a"))
    for token in (7, 8):
        child.update(token)
    compute(kv, child)
    assert hit(kv, [*PROMPT, 7, 8, 9], salt="a") == 8
    assert hit(kv, [*PROMPT, 7, 8, 9]) == 0


def test_a_fork_counts_as_a_claim_and_as_a_fork_and_not_as_an_admission() -> None:
    kv = manager()
    child = kv.fork(prefilled(kv, PROMPT))
    child.update(7)
    compute(kv, child)
    metrics = kv.metrics()
    assert (metrics["claims"], metrics["forks"], metrics["admissions"], metrics["prompt_tokens"]) == (
        2,
        1,
        1,
        6,
    )


# Page copies


def test_the_manager_copies_pages_in_its_own_pool_before_the_tables_are_handed_out() -> None:
    kv = manager(allocate_pools=True)
    parent = prefilled(kv, PROMPT)
    child = kv.fork(parent)
    pages = kv.pages_view()
    pages[1:3] = torch.tensor([[7], [8]], dtype=torch.uint8)
    child.update(9)
    kv.alloc(child)
    inputs = kv.runtime_inputs([[child]])
    assert row(kv, child) == [1, 3]
    assert pages[:5, 0].tolist() == [0, 7, 8, 8, 0]
    assert (pages[3] == 8).all()
    assert inputs.page_copies.shape == (0, 2)


def test_an_engine_with_its_own_memory_is_told_what_to_copy_once() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    child = kv.fork(parent)
    child.update(9)
    kv.alloc(child)
    copies = kv.runtime_inputs([[child]], form="flashinfer").page_copies
    assert (str(copies.dtype), copies.tolist()) == ("int32", [[2, 3]])
    assert kv.runtime_inputs([[child]], form="vllm").page_copies.tolist() == []


def test_an_engine_that_builds_its_own_tables_takes_the_copies_itself() -> None:
    kv = manager()
    child = kv.fork(prefilled(kv, PROMPT))
    child.update(9)
    kv.alloc(child)
    copies = kv.take_page_copies()
    assert (str(copies.dtype), copies.tolist()) == ("int32", [[2, 3]])
    assert kv.take_page_copies().shape == (0, 2)


def test_inputs_that_are_refused_leave_the_copies_to_the_next_ones() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    child = kv.fork(parent)
    child.update(9)
    kv.alloc(child)
    with pytest.raises(ValueError, match="no step out"):
        kv.runtime_inputs([[child, parent]])
    assert kv.runtime_inputs([[child]]).page_copies.tolist() == [[2, 3]]


@pytest.mark.parametrize(
    "copies",
    [
        [[1, 2]],
        [[1, 3], [2, 4]],
        [[1, 3], [1, 4]],
        [[1, 2], [2, 3]],  # the second reads what the first wrote
        [[2, 3], [1, 2]],  # the second writes what the first read
        [[1, 3], [2, 3]],
        [[1, 2], [2, 1]],
    ],
)
def test_pages_are_copied_as_if_one_after_the_other(copies: list[list[int]]) -> None:
    params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=2, num_layers=2, page_size=2)
    pool = DevicePool(params, 4)
    expected = [0, 1, 2, 3, 4]
    pool.pages()[:] = torch.tensor(expected, dtype=torch.uint8)[:, None]
    pool.copy_pages(np.array(copies, np.int32))
    for source, destination in copies:
        expected[destination] = expected[source]
    assert pool.pages().tolist() == [[byte] * params.bytes_per_page for byte in expected]


def test_pages_are_copied_without_new_memory() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=2, num_layers=2, page_size=2)
    pool = DevicePool(params, 4)
    memory = pool.pages().untyped_storage().data_ptr()

    class InPlace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            assert result.untyped_storage().data_ptr() == memory, func
            return result

    with InPlace():  # type: ignore[no-untyped-call]
        pool.copy_pages(np.array([[1, 3], [2, 4]], np.int32))


def test_a_chain_of_copies_keeps_its_order() -> None:
    kv = manager(allocate_pools=True)
    child = kv.fork(prefilled(kv, PROMPT))
    child.update(9)
    kv.alloc(child)
    grandchild = kv.fork(child)
    grandchild.update(8)
    kv.alloc(grandchild)
    kv.pages_view()[2] = 5
    kv.runtime_inputs([[child, grandchild]])
    assert (row(kv, child), row(kv, grandchild)) == ([1, 3], [1, 4])
    assert kv.pages_view()[1:5, 0].tolist() == [0, 5, 5, 5]


# Room


def test_a_copy_needs_a_page_and_a_request_without_room_for_it_is_refused() -> None:
    kv = manager(pages=2)
    parent = prefilled(kv, PROMPT)
    child = kv.fork(parent)
    child.update(9)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(child)
    assert (refused.value.needed, refused.value.free, refused.value.request_id) == (1, 0, child.request_id)
    assert kv.fingerprint() == before
    kv.release(parent)
    kv.alloc(child)
    assert row(kv, child) == [1, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_family_gives_all_pages_back_in_any_order(order: tuple[int, int, int]) -> None:
    kv = manager(pages=8)
    parent = prefilled(kv, PROMPT)
    family = [parent, kv.fork(parent), kv.fork(parent)]
    for token, ctx in enumerate(family):
        ctx.update(token)
    compute(kv, *family)
    kv.take_page_copies()
    for index in order:
        kv.release(family[index])
        kv.verify()
    assert free(kv) == 8


@pytest.mark.parametrize(
    "end",
    [
        lambda kv, ctx: kv.release(ctx),
        lambda kv, ctx: kv.preempt(ctx),
        lambda kv, ctx: ctx.truncate(5),
        lambda kv, ctx: ctx.truncate(1),
    ],
    ids=["release", "preempt", "truncate into the last block", "truncate into the first block"],
)
@pytest.mark.parametrize("which", [0, 1])
def test_what_happens_to_one_does_not_touch_the_other(
    which: int, end: Callable[[pk.PagedKVCacheManager, pk.TextContext], None]
) -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    family = [parent, kv.fork(parent)]
    end(kv, family[which])
    other = family[1 - which]
    assert (row(kv, other), other.processed_length, other.tokens.all.tolist()) == ([1, 2], 6, PROMPT)
    other.update(7)
    kv.alloc(other)
    assert other.active_length == 1
    kv.verify()


# Refusals


def test_a_padding_request_is_not_forked() -> None:
    kv = manager()
    padding = request([1])
    kv.alloc_dummy(padding)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="padding"):
        kv.fork(padding)
    assert kv.fingerprint() == before


def test_a_request_that_is_not_claimed_is_not_forked() -> None:
    kv = manager()
    with pytest.raises(ValueError, match="not claimed"):
        kv.fork(request(PROMPT))
    gone = prefilled(kv, PROMPT)
    slot = gone.slot
    assert slot is not None
    kv.release(gone)
    with pytest.raises(ValueError, match="not claimed"):
        kv.fork(gone)
    with pytest.raises(ValueError, match=f"slot {slot}"):
        kv.fork(slot)


def test_a_name_that_is_taken_is_refused_and_a_name_of_a_refused_fork_is_free() -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="claimed already"):
        kv.fork(parent, request_id=parent.request_id)
    assert kv.fingerprint() == before
    padding = request([1])
    kv.alloc_dummy(padding)
    with pytest.raises(ValueError, match="padding"):
        kv.fork(padding, request_id="child")
    assert kv.fork(parent, request_id="child").request_id == "child"


@pytest.mark.parametrize("name", [1.5, True, b"a"])
def test_a_name_of_another_type_is_refused(name: object) -> None:
    kv = manager()
    parent = prefilled(kv, PROMPT)
    with pytest.raises(TypeError, match="request_id"):
        kv.fork(parent, request_id=name)  # type: ignore[arg-type]
