"""Pages that a sequence takes as it grows, gives back as it is cut, and shares with its continuations.

Pages have 4 tokens.
"""

import random

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, row, store

PROMPT = list(range(10, 30))


def forward(kv: pk.PagedKVCacheManager, *batch: pk.TextContext, num_tokens: int | None = None) -> None:
    """Computes what `alloc` plans, behind the page copies that go before it."""
    kv.alloc(list(batch), num_tokens=num_tokens)
    kv.take_page_copies()
    kv.step(list(batch))


# A second request with the same prompt


def test_nine_tokens_that_come_again_take_one_page() -> None:
    kv = manager(pages=8)
    first = prefilled(kv, PROMPT[:9])
    assert row(kv, first) == [1, 2, 3]
    second = claimed(kv, PROMPT[:9])
    kv.alloc(second)
    assert (second.processed_length, row(kv, second)) == (8, [1, 2, 4])
    kv.release([first, second])
    assert (free(kv), hit(kv, PROMPT[:9])) == (8, 8)


# One step at a time


def test_a_token_takes_a_page_where_a_block_begins_and_nowhere_else() -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:2])
    held = []
    for token in range(9):
        compute(kv, ctx, new_tokens=[token])
        held.append(len(row(kv, ctx)))
    # 2 to 10 tokens have KV.
    assert held == [1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_continuations_take_a_page_each_where_a_block_begins_and_nowhere_else() -> None:
    kv = manager(pages=16)
    first = prefilled(kv, PROMPT[:8])
    beams = [first, kv.fork(first), kv.fork(first)]
    used = []
    for token in range(6):
        for beam, ctx in enumerate(beams):
            ctx.update(100 * beam + token)
        forward(kv, *beams)
        used.append(kv.block_count().used)
    assert used == [5, 5, 5, 5, 8, 8]  # two shared blocks, and a block of each from token 8 and from token 12


@pytest.mark.parametrize(("prompt", "used"), [(8, 2 + 4), (10, 2 + 4), (3, 4)])
def test_four_continuations_share_full_blocks_and_have_tails_of_their_own(prompt: int, used: int) -> None:
    kv = manager(pages=16)
    first = prefilled(kv, PROMPT[:prompt])
    beams = [first, *(kv.fork(first) for _ in range(3))]
    for token, ctx in enumerate(beams):
        ctx.update(token)
    forward(kv, *beams)
    assert kv.block_count().used == used
    tails = {row(kv, ctx)[-1] for ctx in beams}
    assert len(tails) == 4
    assert {tuple(row(kv, ctx)[: prompt // 4]) for ctx in beams} == {tuple(range(1, prompt // 4 + 1))}


# Back and forth


@pytest.mark.parametrize("dropped", range(1, 10))
def test_tokens_that_are_dropped_and_come_again_take_as_many_pages_as_before(dropped: int) -> None:
    kv = manager(pages=8)
    ctx = claimed(kv, PROMPT[:5])
    for token in PROMPT[5:15]:
        compute(kv, ctx, new_tokens=[token])
    assert kv.block_count().used == 4  # 14 tokens have KV
    ctx.truncate(15 - dropped)
    kv.verify()
    for token in PROMPT[15 - dropped : 15]:
        ctx.update(token)
    kv.alloc(ctx)
    assert (len(row(kv, ctx)), kv.block_count().used) == (4, 4)  # 15 of the 16 that fit
    kv.step(ctx)
    assert hit(kv, PROMPT[:13]) == 12
    kv.release(ctx)
    assert free(kv) == 8


# Everything comes back


@pytest.mark.parametrize("page_size", [1, 3, 4, 64, 128])
def test_after_random_prompts_that_are_cut_and_given_up_no_page_is_used(page_size: int) -> None:
    draw = random.Random(page_size)
    kv = manager(pages=400 // page_size + 8, page_size=page_size)
    live: list[pk.TextContext] = []
    for _ in range(200):
        prefix = draw.choice([0, 20, 70, 130])
        prompt = [*range(prefix), *(draw.randrange(1000, 1003) for _ in range(draw.randint(1, 20)))]
        live.append(claimed(kv, prompt))
        batch = [ctx for ctx in live if ctx.processed_length < len(ctx)]
        try:
            forward(kv, *batch, num_tokens=draw.randint(1, 100))
        except pk.InsufficientBlocksError:
            kv.release(live)
            live = []
        if len(live) > 2:
            kv.release(live.pop(draw.randrange(len(live))))
        kv.verify()
    kv.release(live)
    assert kv.block_count().used == 0
    assert kv.metrics()["reused_blocks"] > 0


def test_requests_that_are_never_released_fill_the_pool() -> None:
    kv = manager(pages=8)
    for number in range(4):
        prefilled(kv, range(100 * number, 100 * number + 8))
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(claimed(kv, [1]))
    assert (refused.value.needed, refused.value.free) == (1, 0)


def test_a_thousand_requests_with_one_prompt_hold_its_pages_once() -> None:
    kv = manager(pages=4)
    for _ in range(1000):
        assert store(kv, PROMPT[:13])[:3] == [1, 2, 3]
    assert kv.metrics()["cached_blocks"] == 3
    assert free(kv) == 4


def test_a_batch_of_nobody_is_no_error_and_changes_nothing() -> None:
    kv = manager()
    prefilled(kv, PROMPT[:3])
    before = kv.fingerprint()
    assert kv.alloc([]) == []
    kv.step([])
    kv.preempt([])
    kv.release([])
    assert kv.fingerprint() == before
