"""What no caller should do: it is a named error or it works, and the books are in order afterwards."""

import copy
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, request, store

PROMPT = list(range(10, 30))
FORMS = ("max", "vllm", "flashinfer", "tensorrt")


def int32_at_odd_address(values: list[int]) -> Any:
    """An int32 array whose numbers do not lie at multiples of 4."""
    return np.frombuffer(b"\0" + np.array(values, np.int32).tobytes(), np.uint8)[1:].view(np.int32)


class Index:
    """Something that is an integer, and does something when it is asked for it."""

    def __init__(self, value: int, act: Callable[[], object] = lambda: None) -> None:
        self.value = value
        self.act = act

    def __index__(self) -> int:
        self.act()
        return self.value


# What is given.


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_sizes_of_numpy_are_ints_to_the_manager(dtype: Any) -> None:
    kv = manager(pages=dtype(100), max_batch_size=dtype(2), max_seq_len=dtype(90), page_size=256)
    ctx = claimed(kv, range(80))
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping.tolist() == list(range(256, 336))


@pytest.mark.parametrize(
    "tokens",
    [
        np.array(PROMPT, ">i8"),
        np.repeat(PROMPT, 2)[::2],
        np.array(PROMPT[::-1])[::-1],
        np.array(PROMPT, object),
        int32_at_odd_address(PROMPT),
        tuple(map(np.uint8, PROMPT)),
        [Index(token) for token in PROMPT],
    ],
    ids=["big-endian", "strided", "backwards", "objects", "unaligned", "numpy scalars", "by __index__"],
)
def test_tokens_are_the_same_however_they_lie_in_memory(tokens: Any) -> None:
    kv = manager()
    store(kv, PROMPT[:8])
    assert kv.probe_prefix_match_length(tokens) == 8
    assert pk.TextContext("a", tokens).tokens.all.tolist() == PROMPT
    assert pk.hash_blocks(tokens, 4) == pk.hash_blocks(PROMPT, 4)


@pytest.mark.parametrize("one", [np.int64, np.uint8, np.array, Index])
def test_one_number_may_be_numpys_or_an_index(one: Callable[[int], Any]) -> None:
    kv: Any = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx, num_tokens=one(5))
    kv.step(ctx, new_tokens=one(7), counts=one(1))
    assert ctx.tokens.all.tolist() == [*PROMPT[:5], 7]


@pytest.mark.parametrize("one", [np.float32(1), np.bool_(True), np.array(1.0), np.array(True), True, 1.0])
@pytest.mark.parametrize("name", ["new_tokens", "counts"])
def test_one_number_that_is_no_integer_is_refused_by_name(name: str, one: Any) -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises((TypeError, ValueError), match=name):
        kv.step(ctx, **({"new_tokens": 7} | {name: one}))
    assert kv.fingerprint() == before


def test_slots_may_lie_anywhere_in_memory() -> None:
    kv = manager()
    contexts = request(PROMPT[:5]), request(PROMPT)
    first, second = map(kv.claim, contexts)
    slots = int32_at_odd_address([first, 99, second])[::-2]
    slots.flags.writeable = False
    kv.release(slots)
    assert [ctx.slot for ctx in contexts] == [None, None]


# Code of the caller's that runs in the middle of a call.


def test_a_request_that_is_released_while_its_bound_is_read_is_not_planned() -> None:
    kv: Any = manager()
    ctx = claimed(kv, PROMPT[:5])
    with pytest.raises(ValueError, match="slot"):
        kv.alloc(ctx, [Index(4, lambda: kv.release(ctx))])
    kv.verify()
    assert kv.block_count().free == 8


def test_an_array_that_is_made_on_demand_may_call_the_manager() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)

    class Sampler:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            kv.verify()
            return np.array([kv.probe_prefix_match_length(PROMPT)])

    kv.step(ctx, new_tokens=Sampler())
    assert ctx.tokens.all.tolist() == [*PROMPT[:5], 0]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, KeyError, AttributeError])
@pytest.mark.parametrize(
    "call",
    [
        lambda kv, ctx, bad: kv.probe_prefix_match_length([1, bad]),
        lambda kv, ctx, bad: kv.alloc(ctx, num_tokens=bad),
        lambda kv, ctx, bad: kv.slot_mapping(ctx, [bad]),
        lambda kv, ctx, bad: kv.begin_step(completions=[bad]),
        lambda kv, ctx, bad: kv.release(bad),
        lambda kv, ctx, bad: ctx.truncate(bad),
        lambda kv, ctx, bad: ctx.update(bad),
        lambda kv, ctx, bad: pk.TextContext("a", [1], lora_generation=bad),
        lambda kv, ctx, bad: pk.hash_blocks([1], bad),
    ],
)
def test_what_an_integer_raises_when_it_is_asked_goes_through(
    raised: type[BaseException], call: Callable[[Any, Any, Any], object]
) -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    before = kv.fingerprint()

    def fail() -> None:
        raise raised

    with pytest.raises(raised):
        call(kv, ctx, Index(2, fail))
    assert kv.fingerprint() == before


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, KeyError])
def test_what_an_integer_in_an_item_raises_goes_through(raised: type[BaseException]) -> None:
    def fail() -> None:
        raise raised

    items: Any = [(bytes(32), Index(0, fail), 1)]
    with pytest.raises(raised):
        pk.TextContext("a", [1], mm_items=items)


# The process around the cache.


LIVES_ON = """
import sys
import pagekeeper as pk

params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=4)
kv = pk.PagedKVCacheManager(params=params, total_num_pages=64, max_batch_size=1, allocate_pools=False)
ctx = pk.TextContext("a", list(range(9)))
print("ready", flush=True)
while sys.argv[1] == "on":
    kv.claim(ctx), kv.alloc(ctx), kv.runtime_inputs([[ctx]]), kv.step(ctx), kv.release(ctx)
"""


def test_a_process_ends_without_shutdown() -> None:
    subprocess.run([sys.executable, "-c", LIVES_ON, "no"], check=True, timeout=30, stdout=subprocess.DEVNULL)


def test_a_process_that_is_interrupted_in_its_calls_ends() -> None:
    command = [sys.executable, "-c", LIVES_ON, "on"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")


def test_a_fork_has_a_cache_of_its_own() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    before = kv.fingerprint()
    child = os.fork()
    if child == 0:
        kv.release(ctx)
        kv.verify()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.fingerprint() == before


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_request_cannot_be_copied(act: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="TextContext"):
        act(claimed(manager(), PROMPT))


def test_a_manager_and_its_contexts_are_gone_with_their_last_name() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT)
    gone = weakref.ref(kv), weakref.ref(ctx)
    del kv, ctx
    gc.collect()
    assert [name() for name in gone] == [None, None]


class Name(str):
    """A request id that refers to what it names."""

    refers: Any


@pytest.mark.parametrize("is_claimed", [False, True])
def test_an_id_that_refers_to_its_context_and_manager_is_collected(is_claimed: bool) -> None:
    kv, name = manager(), Name("a")
    ctx = pk.TextContext(name, PROMPT)
    if is_claimed:
        kv.claim(ctx)
    name.refers = kv, ctx
    gone = weakref.ref(kv), weakref.ref(ctx)
    del kv, name, ctx
    gc.collect()
    assert [dead() for dead in gone] == [None, None]


def test_a_number_that_asks_the_context_for_its_name_is_refused_like_any_other() -> None:
    class Curious(int):
        def __repr__(self) -> str:
            return f"{int(self)} of {len(ctx)}"

        __str__ = __repr__

    ctx = pk.TextContext("a", PROMPT)
    with pytest.raises(ValueError, match=r"length=.*99.*: must be 0 to 20"):
        ctx.truncate(Curious(99))
    assert len(ctx) == 20


def test_a_context_has_its_tokens_back_when_its_manager_ends() -> None:
    kv, heir = manager(), manager()
    ctx = prefilled(kv, PROMPT)
    ctx.update(7)
    with pytest.raises(ValueError, match="by another manager"):
        heir.claim(ctx)
    del kv
    gc.collect()
    assert (ctx.slot, ctx.processed_length, ctx.tokens.all.tolist()) == (None, 0, [*PROMPT, 7])
    heir.claim(ctx)
    compute(heir, ctx)
    assert ctx.processed_length == 21
    heir.verify()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of memory")
def test_requests_that_come_and_go_leave_no_memory_behind() -> None:
    kv = manager()

    def live(times: int) -> int:
        for index in range(times):
            ctx = claimed(kv, [*PROMPT[:5], index], cache_salt=str(index))
            kv.alloc(ctx)
            kv.runtime_inputs([[ctx]])
            kv.release(ctx)  # the results are due and never come
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = live(5_000)
    assert live(20_000) - before < 4 << 20


def test_a_pool_of_two_thousand_million_pages_costs_what_is_used_of_it() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from pagekeeper import *\n"
        "params = MHAKVCacheParams(dtype='uint8', n_kv_heads=1, head_dim=1, num_layers=1, page_size=1)\n"
        "kv = PagedKVCacheManager(params, None, 2**31 - 1, 1, allocate_pools=False)\n"
        "ctx = TextContext('a', [1, 2, 3])\n"
        "kv.claim(ctx), kv.alloc(ctx)\n"
        "print(kv.get_cache_indices(ctx), kv.block_count().free)\n"
        "try: kv.runtime_inputs([ctx], form='vllm')\n"
        "except MemoryError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said.startswith("[[1, 2, 3]] 2147483644\n")
    assert "'vllm', 1 requests of up to 2147483647 pages, 2147483648 tokens" in said


# Contexts, slots and managers that do not belong together.


def test_a_context_lives_again_under_other_pages_and_hashes() -> None:
    first, second = manager(page_size=4), manager(page_size=3, kv_hash_algo="sha256", kv_hash_seed="0" * 64)
    ctx = prefilled(first, PROMPT)
    first.release(ctx)
    second.claim(ctx)
    compute(second, ctx)
    assert second.commit_and_get_block_hashes(ctx) == pk.hash_blocks(PROMPT, 3, algo="sha256", seed="0" * 64)
    second.verify()


def test_results_from_another_manager_reach_nobody() -> None:
    first, second = manager(), manager()
    ctx = claimed(first, PROMPT[:5])
    first.alloc(ctx)
    first.runtime_inputs([[ctx]])
    first.release(ctx)
    bystander = claimed(second, PROMPT[:5])
    second.alloc(bystander)
    with pytest.raises(ValueError, match="released"):
        second.step(ctx, 1)
    assert bystander.processed_length == 0


def test_a_late_result_reaches_nobody_after_thousands_of_requests() -> None:
    kv = manager()
    late = claimed(kv, PROMPT[:5])
    kv.alloc(late)
    kv.runtime_inputs([[late]])
    kv.release(late)
    for _ in range(2_047):
        kv.release(claimed(kv, [1]))
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    kv.step(late, 1)
    assert (ctx.processed_length, len(ctx)) == (0, 5)


def test_a_late_result_is_given_once_a_batch() -> None:
    kv = manager()
    late = claimed(kv, PROMPT[:5])
    kv.alloc(late)
    kv.runtime_inputs([[late]])
    kv.release(late)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="twice"):
        kv.step([late, late])
    assert kv.fingerprint() == before


@pytest.mark.parametrize("edit", [lambda kv, ctx: ctx.truncate(2), lambda kv, ctx: kv.preempt(ctx)])
def test_an_edit_without_a_forward_makes_no_result_due(edit: Callable[[Any, Any], object]) -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    edit(kv, ctx)
    with pytest.raises(ValueError, match="no step out"):
        kv.step(ctx, 1)


# Memory of tables.


@pytest.mark.parametrize(
    ("form", "name"),
    [("vllm", "seq_lens"), ("flashinfer", "kv_indices"), ("flashinfer", "qo_indptr")],
)
def test_a_batch_that_lies_in_the_memory_of_its_tables_is_an_error(form: Any, name: str) -> None:
    kv = manager()
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    tables = [kv.runtime_inputs([[ctx]], form=form)[0] for _ in range(2)]
    with pytest.raises(ValueError, match="batch"):
        kv.runtime_inputs([getattr(tables[0], name)], form=form)
    kv.verify()


@pytest.mark.parametrize("form", FORMS)
def test_a_table_cannot_be_written_by_its_reader(form: Any) -> None:
    kv = manager()
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    tables = kv.runtime_inputs([[ctx]], form=form)[0]
    name = {"max": "lookup_table", "vllm": "block_table", "flashinfer": "kv_indices"}.get(form)
    first = tables.pools[0] if name is None else getattr(tables, name)
    with pytest.raises(ValueError, match="read-only"):
        first[...] = 7


@pytest.mark.parametrize("form", FORMS)
def test_tables_stand_through_calls_that_fail_and_calls_in_other_forms(form: Any) -> None:
    kv: Any = manager(pages=40, max_batch_size=4)
    batch = [claimed(kv, range(size, 2 * size)) for size in (3, 5, 9)]
    kv.alloc(batch)
    kept = kv.runtime_inputs([batch], form=form)[0]
    copies = {name: np.copy(getattr(kept, name)) for name in kept.__slots__}
    kv.runtime_inputs([batch[::-1]], form=form)
    for wrong in ([batch[0]] * 2, [*batch, request([1])], batch * 2, np.array([7], np.int32), None):
        with pytest.raises((TypeError, ValueError)):
            kv.runtime_inputs([wrong], form=form)
    for other in sorted(set(FORMS) - {form}):
        kv.runtime_inputs([batch[:1]], form=other)
    for name, copied in copies.items():
        np.testing.assert_array_equal(getattr(kept, name), copied)


def test_padding_obeys_the_limits_of_a_request() -> None:
    kv = manager(pages=2)
    before = kv.block_count(), kv.metrics()["requests"]
    with pytest.raises((ValueError, pk.RequestTooLargeError)):
        kv.alloc_dummy(request(range(200)))
    assert (kv.block_count(), kv.metrics()["requests"]) == before


# Sizes.


def test_no_more_requests_are_in_a_batch_than_there_are_slots() -> None:
    assert manager(max_batch_size=2**20).max_batch_size == 1_048_576
    with pytest.raises(ValueError, match=r"^max_batch_size=1048577: must be .* 1 to 1048576$"):
        manager(max_batch_size=2**20 + 1)


def test_tables_are_sized_for_what_a_forward_may_compute() -> None:
    kv = manager(pages=2**20, page_size=128, max_batch_size=2, max_num_input_tokens=3, max_seq_len=256)
    batch = [claimed(kv, range(first, first + 3)) for first in (10, 20)]
    kv.alloc(batch)
    tables = kv.runtime_inputs([batch], form="vllm")[0]
    assert tables.slot_mapping.tolist() == [128, 129, 130, 256, 257, 258]
    assert tables.slot_mapping.base.nbytes == 2 * 3 * 8


def test_a_page_may_be_larger_than_any_prompt() -> None:
    kv = manager(pages=1, page_size=2**31 - 1)
    ctx = prefilled(kv, PROMPT)
    assert kv.slot_mapping(ctx, [0, 19]).tolist() == [2**31 - 1, 2**31 + 18]


@pytest.mark.parametrize(("room", "pages"), [(2.0, 1), (2.99, 1), (3.0, 2)])
def test_bytes_buy_whole_pages_and_the_null_page(room: float, pages: int) -> None:
    params = manager().params
    assert isinstance(params, pk.KVCacheParams)
    given = int(room * params.bytes_per_page)
    kv = pk.PagedKVCacheManager(params, max_batch_size=1, available_bytes=given, allocate_pools=False)
    assert kv.block_count().total == pages
