"""Many threads on one cache: each call is whole, and what is shared between requests stays what it is."""

import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, row
from model.memory import PageMemory, prefix_values

PROMPT = list(range(10, 30))


def in_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Runs each in a thread of its own, all as mixed up as Python can; gives what they raised."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    return raised


def test_of_two_threads_that_claim_one_id_one_gets_it() -> None:
    kv = manager()
    turns = threading.Barrier(2)
    contexts = [[pk.TextContext(f"request {index}", PROMPT) for index in range(100)] for _ in range(2)]

    def claim_all(mine: list[Any]) -> None:
        for ctx in mine:
            turns.wait()
            with suppress(ValueError):
                kv.claim(ctx)

    assert in_threads(*(partial(claim_all, mine) for mine in contexts)) == []
    assert [(a.slot is None) + (b.slot is None) for a, b in zip(*contexts, strict=True)] == [1] * 100
    kv.verify()


def test_threads_with_requests_of_their_own_do_not_meet() -> None:
    kv = manager(pages=100)

    def live(first: int) -> None:
        for turn in range(200):
            batch = [claimed(kv, [first, *PROMPT[: turn % 7 + size]]) for size in (1, 4, 8)]
            compute(kv, *batch, new_tokens=[1, 2, 3])
            assert [ctx.tokens.all[-1] for ctx in batch] == [1, 2, 3]
            kv.release(batch)

    assert in_threads(*(partial(live, first) for first in range(3))) == []
    kv.verify()
    assert (kv.block_count().free, kv.metrics()["requests"]) == (100, 0)


def test_a_page_holds_the_kv_of_its_readers_prefix_as_long_as_they_read() -> None:
    """Four threads share a pool that is too small for them, and what they compute of two texts."""
    kv, memory = manager(pages=24), PageMemory(24, 4)

    def live(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(500):
            length = chosen.randint(1, 40)
            tokens = [chosen.choice([1, 2])] * chosen.randint(0, length) + [3] * length
            values = prefix_values(None, tokens)
            ctx = claimed(kv, tokens)
            with suppress(pk.InsufficientBlocksError):
                kv.alloc(ctx)
                memory.write(row(kv, ctx), ctx.processed_length, values[ctx.processed_length :])
                assert (memory.read(row(kv, ctx), len(tokens)) == values).all()
                kv.step(ctx)
                assert (memory.read(row(kv, ctx), len(tokens)) == values).all()
            kv.release(ctx)

    assert in_threads(*(partial(live, seed) for seed in range(4))) == []
    kv.verify()
    assert free(kv) == 24
    assert kv.metrics()["reused_blocks"] > 0 < kv.metrics()["evictions"]


def test_threads_that_store_prefixes_of_one_text_store_each_block_once() -> None:
    kv = manager(pages=600, page_size=1)

    def live(seed: int) -> None:
        chosen, longest = random.Random(seed), 0
        for _ in range(200):
            length = chosen.randint(1, 64)
            ctx = claimed(kv, [7] * length)
            kv.alloc(ctx)
            assert min(length - 1, longest) <= ctx.cached_prefix_length < length
            kv.step(ctx)
            kv.release(ctx)
            longest = max(longest, length)

    assert in_threads(*(partial(live, seed) for seed in range(8))) == []
    kv.verify()
    assert kv.metrics()["cached_blocks"] == hit(kv, [7] * 100) == 64
