"""What schedulers are told of requests that wait for blocks from a tier (SCHED-7)."""

import pytest

import pagekeeper as pk
from model.engine import claimed, free
from model.tiered import PROMPT, Cache


def two_of_one_prefix() -> tuple[Cache, pk.TextContext, pk.TextContext]:
    """Ten pages; two requests of six blocks, four tokens more to come, three blocks of theirs in the tier."""
    cache = Cache(pages=10)
    cache.stored_only_in_the_tier()
    prompts = [[*PROMPT[:12], *range(100 * i, 100 * i + 12)] for i in (1, 2)]
    first, second = (claimed(cache.kv, prompt, max_new_tokens=4) for prompt in prompts)
    return cache, first, second


def test_a_request_that_waits_needs_nothing_more_for_its_prompt() -> None:
    cache, first, second = two_of_one_prefix()
    kv = cache.kv
    assert [kv.get_needed_blocks_one_step(ctx) for ctx in (first, second)] == [6, 6]
    kv.alloc(first)
    assert first.active_length == 0  # it waits, with the pages of its load and of the rest
    assert free(kv) == 4
    assert kv.get_needed_blocks_one_step(first) == 0
    assert kv.get_remaining_blocks_to_completion(first) == 1  # 28 tokens are seven blocks
    assert kv.get_remaining_blocks_to_completion([first, second]).tolist() == [1, 7]


def test_one_that_comes_while_another_waits_is_told_that_it_does_not_fit() -> None:
    cache, first, second = two_of_one_prefix()
    kv = cache.kv
    kv.alloc(first)
    needed = kv.get_needed_blocks_one_step(second)
    assert isinstance(needed, int)
    assert (needed, kv.can_satisfy(needed), kv.can_alloc(second)) == (6, False, False)
    kv.start_scheduling()
    assert [kv.scheduling_has_free_blocks(blocks) for blocks in (4, 5)] == [True, False]
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(second)


def test_who_waited_never_lacks_a_page_for_its_prompt() -> None:
    cache, first, second = two_of_one_prefix()
    kv = cache.kv
    kv.alloc(first)
    cache.tier.in_flight()[0].finish()
    kv.poll_transfers()
    # Others take all that is free; the chunks of the first need nothing of it.
    other = claimed(kv, range(1000, 1016))
    kv.alloc(other)
    assert free(kv) == 0
    for tokens in (5, None):
        assert kv.get_needed_blocks_one_step(first, num_tokens=tokens) == 0
        assert kv.can_alloc(first, num_tokens=tokens)
        cache.run(first, num_tokens=tokens)
    assert first.processed_length == 24
    assert kv.get_needed_blocks_one_step(second) == 3  # its first three blocks are the first's


def test_one_that_gives_up_its_load_needs_all_again() -> None:
    cache, first, _ = two_of_one_prefix()
    kv = cache.kv
    kv.alloc(first)
    kv.preempt(first)
    assert kv.get_needed_blocks_one_step(first) == 6
    assert free(kv) == 7  # the copy still writes to three
