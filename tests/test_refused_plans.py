"""What a refused plan says is needed (PLAN-3): so much is enough, and the sentence is about what is wrong."""

import random
from typing import Any

import pytest

import pagekeeper as pk
from pagekeeper import CacheTooSmallError
from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    MHAKVCacheParams,
    MultiKVCacheParams,
    SlidingWindow,
)
from pagekeeper.planning import CachePlan, plan_cache
from test_planned_caches import parameters
from test_planning import FULL, SHAPE, groups


def uneven(draw: random.Random, most: int = 2) -> MultiKVCacheParams:
    """Two to `most` groups whose pages tile no small huge page without padding."""
    heads: dict[str, Any] = {"dtype": "bfloat16", "page_size": draw.choice([1, 3, 16])}
    kinds: list[Any] = [
        FullAttention(),
        SlidingWindow(draw.randint(1, 60)),
        ChunkedLocal(draw.randint(1, 60)),
        SlidingWindow(draw.randint(1, 60)),
    ]
    return MultiKVCacheParams(
        {
            f"{number}": MHAKVCacheParams(
                n_kv_heads=draw.randint(1, 13),
                head_dim=draw.choice([4, 6, 10, 14]),
                num_layers=draw.randint(1, 7),
                kind=kind,
                **heads,
            )
            for number, kind in enumerate(kinds[: draw.randint(2, most)])
        }
    )


@pytest.mark.parametrize("case", range(60))
def test_what_a_refusal_says_is_needed_is_enough_and_no_more_than_has_to_be(
    case: int, first_seed: int
) -> None:
    draw = random.Random(first_seed + case)
    params = uneven(draw) if case % 3 == 0 else parameters(draw)
    batch, tokens = draw.randint(1, 6), draw.choice([1, draw.randint(1, 400)])
    given: dict[str, Any] = {
        "max_num_input_tokens": draw.choice([None, 1, 8, 30]),
        "encoder_length": 25 if isinstance(params, MultiKVCacheParams) and "cross" in params else None,
        "length_mix": draw.choice([None, {30: 3, 100: 1}, {7: 1, 200: 0.01}]),
    }

    def refused(memory: int) -> pk.CacheTooSmallError | None:
        try:
            plan_cache(params, memory, batch, max_seq_len=tokens, **given)
        except pk.CacheTooSmallError as error:
            return error
        return None

    memory = draw.choice([0, draw.randint(0, 2000), draw.randint(0, 100_000)])
    while (error := refused(memory)) is None:
        memory = memory * 3 // 4
    plan = plan_cache(params, error.needed, batch, max_seq_len=tokens, **given)
    assert plan.concurrency(tokens) >= 1
    pk.load_kv_manager(params, batch, tokens, None, error.needed, allocate_pools=False, **given)
    assert error.needed > error.available == memory
    assert refused(error.needed - 1)
    assert all(refused(memory + (error.needed - memory) * part // 8) for part in range(8))


@pytest.mark.parametrize("case", range(60))
def test_with_more_memory_no_fewer_requests_fit(case: int, first_seed: int) -> None:
    draw = random.Random(first_seed + case)
    params = uneven(draw, 4)
    batch, tokens = draw.randint(1, 6), draw.choice([1, draw.randint(1, 400)])

    def plan(memory: int) -> CachePlan:
        return plan_cache(params, memory, batch, max_num_input_tokens=30, max_seq_len=tokens)

    with pytest.raises(CacheTooSmallError) as refused:
        plan(0)
    needed = refused.value.needed
    budgets = sorted(needed + draw.randint(0, needed * 3**part) for part in range(4) for _ in range(6))
    plans = [plan(memory) for memory in (needed, *budgets)]
    fit = [one.concurrency(tokens) for one in plans]
    assert fit[0] >= 1
    assert fit == sorted(fit)
    longest = [one.longest(1000) for one in plans[::6]]
    assert longest[0] >= tokens
    assert longest == sorted(longest)
    for requests in {1, fit[len(fit) // 2], fit[-1]}:
        least = plans[0].needed_bytes(tokens, requests)
        enough = plan(least).concurrency(tokens)
        assert enough >= requests
        assert all(
            (count >= requests) == (memory >= least) for memory, count in zip(budgets, fit[1:], strict=True)
        )


def test_a_plan_without_surplus_is_cut_for_the_length_that_it_is_asked_for() -> None:
    shape: dict[str, Any] = dict(dtype="float8_e4m3fn", head_dim=1, num_layers=1, page_size=1)
    sliding = MHAKVCacheParams(**shape, n_kv_heads=21, kind=SlidingWindow(4))
    params = MultiKVCacheParams({"full": MHAKVCacheParams(**shape, n_kv_heads=20), "sliding": sliding})
    plan = plan_cache(params, 409 * 42, 4, max_num_input_tokens=1)
    # As it is cut, for requests of one token, two of 200 do not fit.
    assert (plan.concurrency(200), plan.planned_for(200).concurrency(200)) == (1, 2)
    assert plan.without_surplus(200, 2).concurrency(200) == 2


def test_a_request_that_max_tokens_leaves_no_room_for_is_told_so() -> None:
    params = MHAKVCacheParams(**SHAPE, num_layers=1, max_tokens=160)
    said = r"32 of 10 of 'full' pages; max_tokens=160: must be 497 at least, or None; .*max_seq_len=160 fits"
    with pytest.raises(CacheTooSmallError, match=said) as refused:
        pk.load_kv_manager(params, 4, 512, None, 25_600, allocate_pools=False)
    assert (refused.value.needed, refused.value.max_seq_len_that_fits) == (33 * 256, 160)
    enough = MHAKVCacheParams(**SHAPE, num_layers=1, max_tokens=497)
    assert pk.load_kv_manager(enough, 4, 512, None, 33 * 256, allocate_pools=False).max_seq_len == 512


def test_what_no_memory_has_room_for_is_refused() -> None:
    plan = plan_cache(groups(), 51_200, 4)
    with pytest.raises(ValueError, match=r"2147483647 requests of 16777216 tokens: no number of bytes up to"):
        plan.needed_bytes(2**24, 2**31 - 1)
    with pytest.raises(ValueError, match=r"1 requests of 1 tokens: no number of bytes up to 2\*\*63 - 1 is"):
        plan_cache(groups(shares=(1e-300, 1)), 2**62, 4)


@pytest.mark.parametrize("layout", ["jenga", "paged"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, None, "1", True])
def test_requests_and_lengths_of_a_plan_are_whole_numbers(bad: Any, layout: Any) -> None:
    plan = plan_cache(groups(layout), 51_200, 4)
    for asked in (
        plan.pages,
        plan.concurrency,
        plan.planned_for,
        plan.longest,
        plan.check,
        plan.needed_bytes,
    ):
        with pytest.raises(ValueError, match="must be a whole number from 1 to 16777216"):
            asked(bad)
    with pytest.raises(ValueError, match=r"requests=.*: must be a whole number from 1"):
        plan.needed_bytes(16, bad)
    with pytest.raises(ValueError, match=r"max_seq_len=.*: must be a whole number from 1 to 16777216"):
        plan_cache(groups(), 51_200, 4, max_seq_len=bad)


def test_a_mix_moves_memory_to_where_more_of_it_is_needed() -> None:
    # Of 320 tokens a request has 20 pages of 256, and 7 of 512. The mix divides all but the null pages
    # in the ratio of 256 to 512: the 20 pages have to be a third.
    mix: dict[str, Any] = {"length_mix": {16: 1}, "max_num_input_tokens": 16}
    with pytest.raises(CacheTooSmallError) as refused:
        plan_cache(groups(), 10_000, 4, max_seq_len=320, **mix)
    assert refused.value.needed == 256 + 512 + 3 * 20 * 256
    assert plan_cache(groups(), 256 + 512 + 3 * 20 * 256, 4, **mix).concurrency(320) == 1


def test_more_pages_than_have_ids_are_refused_as_too_many_and_not_as_too_little_memory() -> None:
    with pytest.raises(
        ValueError, match=r"makes 2147483648 pages of 256 bytes .*, must make 1 to 2\*\*31 - 1"
    ) as no:
        plan_cache(FULL, 256 * (2**31 + 1), 4)
    assert not isinstance(no.value, CacheTooSmallError)


def test_an_encoder_of_more_tokens_than_are_planned_for_is_refused_with_the_numbers() -> None:
    cross = MHAKVCacheParams(**SHAPE, num_layers=1, kind=CrossAttention())
    params = MultiKVCacheParams({"full": FULL, "cross": cross}, layout="paged")
    with pytest.raises(
        ValueError, match="encoder_length=16777217: must be a whole number from 1 to 16777216"
    ):
        plan_cache(params, 2**62, 4, encoder_length=2**24 + 1)
    said = "max_batch_size=2048: takes 2147483648 pages of 'cross', 1048576 for each request; must take up to"
    with pytest.raises(ValueError, match=said) as no:
        plan_cache(params, 2**62, 2048, encoder_length=2**24)
    assert not isinstance(no.value, CacheTooSmallError)
    assert plan_cache(params, 2**62, 2047, encoder_length=2**24).num_pages["cross"] == 2047 * 2**20
