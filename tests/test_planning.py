"""Plans of memory (PLAN-1 to PLAN-4): what is left for a cache, how it is divided, what there is room for."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import pagekeeper as pk
from pagekeeper import CacheTooSmallError, MemoryPlanner, PagedMemoryPlanner
from pagekeeper.models import HuggingFaceModel
from pagekeeper.params import (
    CrossAttention,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    Scratch,
    SlidingWindow,
)
from pagekeeper.planning import CachePlan, calculate_max_num_blocks, plan_cache
from test_cache_config import HYBRID

GIB = 2**30
SHAPE: dict[str, Any] = {"dtype": "bfloat16", "n_kv_heads": 1, "head_dim": 4, "page_size": 16}
FULL = MHAKVCacheParams(**SHAPE, num_layers=1)  # key and value x 16 tokens x 4 values x 2 bytes: 256 a page
SLIDING = MHAKVCacheParams(**SHAPE, num_layers=2, kind=SlidingWindow(64))  # 512 a page


def states(**given: Any) -> RecurrentKVCacheParams:
    """16 values of 4 bytes: 64 a page."""
    state = RecurrentState("ssm", (16,), "float32")
    return RecurrentKVCacheParams(
        **({"kind": Recurrent(64)} | given), states=[state], num_layers=1, page_size=16
    )


def groups(layout: Any = "paged", shares: Any = None, **more: KVCacheParams) -> MultiKVCacheParams:
    members: dict[str, KVCacheParams] = {"full": FULL, "sliding": SLIDING, **more}
    return MultiKVCacheParams(members, layout=layout, window_size_shares=shares)


# What planners ask (PLAN-1, PLAN-2)


class Model:
    """A model's configuration as an engine has it."""

    def __init__(self, devices: Sequence[object] = ("cpu",)) -> None:
        self.devices = devices


class CachingModel(Model):
    def get_kv_params(self) -> KVCacheParams:
        return FULL


def pipeline(weights: int) -> Any:
    return SimpleNamespace(model=SimpleNamespace(weights_size=lambda: weights))


def test_the_protocols_are_told_by_what_an_object_has() -> None:
    assert isinstance(Model(), pk.ModelConfig)
    assert not isinstance(Model(), pk.ModelConfigWithKVCache)
    assert isinstance(CachingModel(), pk.ModelConfigWithKVCache)
    assert not isinstance(SimpleNamespace(get_kv_params=lambda: FULL), pk.ModelConfigWithKVCache)


def test_a_planner_needs_devices_and_a_paged_one_the_parameters_of_a_cache() -> None:
    with pytest.raises(TypeError, match=r"config: got NoneType, must have devices"):
        MemoryPlanner(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config: got Model, must have get_kv_params"):
        PagedMemoryPlanner(Model())  # type: ignore[arg-type]
    assert PagedMemoryPlanner(CachingModel()).kv_params == FULL


def test_a_planner_knows_the_weights_and_sets_nothing_else_aside() -> None:
    planner = MemoryPlanner(Model())
    assert planner.estimate_weights_size(pipeline(70)) == 70
    assert planner.estimate_activation_memory(pipeline(70), None) == 0
    assert planner.infer_max_batch_size(pipeline(70), ["cpu"], 70) is None
    assert planner.estimate_signal_buffer_memory(pipeline(70)) == 0


def test_signal_buffers_are_on_each_of_several_devices_and_on_one_alone_if_they_always_are() -> None:
    class Signalling(PagedMemoryPlanner):
        signal_buffer_bytes = 5

    one, three = CachingModel(), CachingModel(["cuda:0", "cuda:1", "cuda:2"])
    always = Signalling.with_activation_reservation(0, always_signal_buffers=True)
    assert Signalling(three).estimate_signal_buffer_memory(pipeline(1)) == 15
    assert Signalling(one).estimate_signal_buffer_memory(pipeline(1)) == 0
    assert always(one).estimate_signal_buffer_memory(pipeline(1)) == 5


@pytest.mark.parametrize(
    ("reserved", "name"),
    [(15 * GIB, "15GiB"), (0, "0GiB"), (GIB // 2, "0.5GiB"), (GIB + GIB // 4, "1.25GiB")],
)
def test_a_planner_that_sets_activations_aside_is_named_after_them(reserved: int, name: str) -> None:
    planner = PagedMemoryPlanner.with_activation_reservation(reserved)
    assert planner.__name__ == f"PagedMemoryPlanner({name})"
    assert issubclass(planner, PagedMemoryPlanner)
    assert planner(CachingModel()).estimate_activation_memory(pipeline(1), None) == reserved
    assert PagedMemoryPlanner(CachingModel()).estimate_activation_memory(pipeline(1), None) == 0


@pytest.mark.parametrize("bad", [-1, 1.5, None, True])
def test_no_other_number_can_be_set_aside(bad: Any) -> None:
    with pytest.raises(ValueError, match="activation_bytes="):
        PagedMemoryPlanner.with_activation_reservation(bad)


# What is left (PLAN-3)


def test_what_is_left_is_the_usable_part_of_what_is_free_less_weights_activations_and_signals() -> None:
    class Signalling(PagedMemoryPlanner):
        signal_buffer_bytes = 50

    planner = Signalling.with_activation_reservation(200)(CachingModel(["cuda:0", "cuda:1"]))
    # of 1,000 on each device 900; on both together 300 + 200 + 2 x 50
    assert planner.available_cache_memory(pipeline(300), 1000, 0.9) == 900 - 300
    assert planner.available_cache_memory(pipeline(301), 1000, 0.5) == 500 - 301


def test_of_devices_that_differ_the_least_counts() -> None:
    """Case 137."""
    planner = PagedMemoryPlanner(CachingModel(["cuda:0", "cuda:1", "cuda:2"]))
    free = [10 * GIB, 9 * GIB + GIB // 2, 10 * GIB]
    assert planner.available_cache_memory(pipeline(0), free, 1.0) == 9 * GIB + GIB // 2
    kv = pk.load_kv_manager(FULL, 4, 64, None, [25_600, 12_800, 25_600], allocate_pools=False)
    assert kv.block_count().total == 12_800 // 256 - 1


def test_weights_that_leave_nothing_are_refused_with_the_numbers() -> None:
    planner = PagedMemoryPlanner(CachingModel())
    with pytest.raises(
        CacheTooSmallError, match=r"nothing is left for the cache.* weights 900 bytes"
    ) as refused:
        planner.available_cache_memory(pipeline(900), 1000)
    assert (refused.value.needed, refused.value.available) == (901, 900)


@pytest.mark.parametrize("bad", [0, -0.1, 1.1, float("nan"), "0.9", None])
def test_a_part_that_may_be_used_is_above_0_and_up_to_1(bad: Any) -> None:
    with pytest.raises(
        ValueError, match=r"device_memory_utilization=.*: must be a number above 0 and up to 1"
    ):
        PagedMemoryPlanner(CachingModel()).available_cache_memory(pipeline(0), 1000, bad)


# One group


def test_pages_are_rounded_down_and_one_is_the_null_page() -> None:
    plan = plan_cache(FULL, 256 * 10 + 255, 4)
    assert (plan.num_pages, plan.pool_bytes) == ({"full": 9}, 2560)


def test_a_request_that_the_reserved_page_leaves_no_room_for_is_refused_at_the_start() -> None:
    """Case 135: 13 blocks of 8,192 tokens, one of them reserved."""
    params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=1, head_dim=4, num_layers=1, page_size=8192)
    memory = 13 * params.bytes_per_page
    with pytest.raises(
        CacheTooSmallError, match=r"max_seq_len=106496: .*13 of 12 of 'full' pages.*98304 fits"
    ) as no:
        pk.load_kv_manager(params, 4, 106_496, None, memory)
    assert no.value.max_seq_len_that_fits == 98_304
    assert (no.value.needed, no.value.available) == (14 * params.bytes_per_page, memory)
    kv = pk.PagedKVCacheManager(params, None, 12, 4, allocate_pools=False)
    ctx = pk.TextContext("long", [1] * 98_305)
    kv.claim(ctx)
    with pytest.raises(pk.RequestTooLargeError):  # never, and not: try again later
        kv.alloc(ctx)


def test_a_cache_without_a_page_is_refused() -> None:
    with pytest.raises(CacheTooSmallError, match="makes 0 pages of 256 bytes") as refused:
        pk.load_kv_manager(FULL, 4, 1, None, 511)
    assert (refused.value.needed, refused.value.available) == (512, 511)


@pytest.mark.parametrize(("drafts", "pages"), [(0, 8), (1, 9), (2, 9), (22, 10)])
def test_drafts_take_pages_behind_the_longest_request_and_leave_its_length(drafts: int, pages: int) -> None:
    """Case 145: 512 tokens, and with steps planned ahead three times the drafts, in pages of 64."""
    params = MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=1, head_dim=4, num_layers=1, page_size=64, kind=SlidingWindow(32_768)
    )
    limits: dict[str, Any] = {"num_draft_tokens": drafts, "allocate_pools": False}
    kv = pk.load_kv_manager(params, 4, 512, None, params.bytes_per_page * (pages + 1), **limits)
    assert (kv.max_seq_len, kv.block_count().total) == (512, pages)
    with pytest.raises(CacheTooSmallError):
        pk.load_kv_manager(params, 4, 512, None, params.bytes_per_page * pages, **limits)


def test_fewer_bits_a_value_hold_more_tokens_in_the_same_memory() -> None:
    """Case 141."""
    memory = 2**20
    shape: dict[str, Any] = dict(n_kv_heads=2, head_dim=64, num_layers=2, page_size=16)
    scales = KVCacheQuantizationConfig("float32", 64)
    plans = {
        "bfloat16": plan_cache(MHAKVCacheParams(dtype="bfloat16", **shape), memory, 4),
        "float8_e4m3fn": plan_cache(MHAKVCacheParams(dtype="float8_e4m3fn", **shape), memory, 4),
        "int8": plan_cache(MHAKVCacheParams(dtype="int8", kvcache_quant_config=scales, **shape), memory, 4),
    }
    # A page has 8,192 values, in 2 bytes or 1, or in 1 with 4 for each 64 of them; one more is the null page.
    assert {name: plan.num_pages["full"] + 1 for name, plan in plans.items()} == {
        "bfloat16": 64,
        "float8_e4m3fn": 128,
        "int8": 2**20 // (8192 + 512),
    }
    for plan in plans.values():
        longest = plan.longest()
        assert longest == plan.num_pages["full"] * 16
        plan.check(longest)
        with pytest.raises(CacheTooSmallError) as refused:
            plan.check(longest + 1)
        assert (refused.value.available, refused.value.max_seq_len_that_fits) == (memory, longest)


def test_what_grows_with_a_request_and_what_does_not_are_told_apart() -> None:
    """Case 144."""
    params = groups("paged", state=states(kind=Recurrent(None, save_last_snapshot=False)))
    plan = plan_cache(params, 2**20, 4, max_num_input_tokens=16)
    # 7 pages of the window (64 - 1 and two chunks of 16, wherever they begin), and one state
    assert {plan.fixed_bytes(tokens) for tokens in (160, 1600, 16_000)} == {7 * 512 + 64}
    assert params.bytes_per_token_kept == 16
    assert plan.pages(1600)["full"] * 256 == 1600 * 16


def test_the_capacity_at_each_length_is_what_fits_of_both() -> None:
    """Case 144: n requests, if n x fixed and n x bytes a token x length are no more than the memory."""
    memory, fixed = 2**20, 7 * 512
    capacities = {}
    for tokens in (160, 1600, 16_000):
        plan = plan_cache(groups("jenga"), memory, 4, max_num_input_tokens=16, max_seq_len=tokens)
        assert plan.fixed_bytes(tokens) == fixed
        requests = capacities[tokens] = plan.concurrency(tokens)
        assert (memory - requests * fixed) // (16 * tokens) >= requests
        assert (memory - (requests + 1) * fixed) // (16 * tokens) < requests + 1
    # Of 1,048,576 bytes each takes 3,584 + 2,560, or + 25,600, or + 256,000. That is no rate: in tokens it is
    # 27,200, 56,000 and 64,000.
    assert capacities == {160: 170, 1600: 35, 16_000: 4}


def test_with_memory_of_their_own_the_group_with_the_least_room_counts_at_each_length() -> None:
    """Case 144."""
    params = groups("paged", state=states(kind=Recurrent(None, save_last_snapshot=False)))
    plan = plan_cache(params, 2**20, 1000, max_num_input_tokens=16)
    # 1,000 states and a null page are 64,064 bytes; two halves of the rest are 492,256: 1,922 pages of 256
    # and 961 of 512, one of each of them null.
    assert plan.num_pages == {"full": 1921, "sliding": 960, "state": 1000}
    # 960 / 7 in the window, then 1,921 / 100 and 1,921 / 1,000
    assert [plan.concurrency(tokens) for tokens in (160, 1600, 16_000)] == [137, 19, 1]


@pytest.mark.parametrize(("caching", "pages"), [(True, 99), (False, 4 * 3)])
def test_a_cache_that_keeps_nothing_has_no_more_pages_than_requests_can_take(
    caching: bool, pages: int
) -> None:
    params = MHAKVCacheParams(**SHAPE, num_layers=1, enable_prefix_caching=caching)
    kv = pk.load_kv_manager(params, 4, 48, None, 25_600, allocate_pools=False)
    assert kv.block_count().total == pages


@pytest.mark.parametrize(
    ("asked", "pages", "said"),
    [
        (160, 10, "max_tokens=160 limits the pool to 10 pages; memory has room for 99"),
        (161, 11, "max_tokens=161 limits the pool to 11 pages; memory has room for 99"),
        (10_000, 99, "memory limits the pool to 99 pages; max_tokens=10000 asks for 625"),
    ],
)
def test_the_smaller_limit_wins_and_a_warning_says_which(
    asked: int, pages: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = MHAKVCacheParams(**SHAPE, num_layers=1, max_tokens=asked)
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        kv = pk.load_kv_manager(params, 4, 48, None, 25_600, allocate_pools=False)
    assert kv.block_count().total == pages
    assert caplog.messages == [said]


@pytest.mark.parametrize("layout", ["paged", "jenga"])
def test_of_several_windows_no_number_of_tokens_is_a_limit(
    layout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params = MultiKVCacheParams({"full": FULL, "sliding": SLIDING}, layout=layout, max_tokens=16)
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        kv = pk.load_kv_manager(params, 4, 48, None, 51_200, allocate_pools=False)
    assert kv.block_count(group="full").total > 1
    assert caplog.messages == ["max_tokens=16 has no effect: the cache is not one window"]


# Several groups (PLAN-4)


def test_groups_divide_their_memory_equally() -> None:
    assert calculate_max_num_blocks(groups(), 51_200, 4) == {"full": 99, "sliding": 49}


def test_shares_are_those_of_ascending_windows_and_need_not_sum_to_1() -> None:
    for shares in ((0.25, 0.75), (0.1, 0.3)):
        # of 51,200 bytes a quarter, in pages of 512, and three, in pages of 256; less a null page each
        assert calculate_max_num_blocks(groups(shares=shares), 51_200, 4) == {"full": 149, "sliding": 24}


def test_the_environment_has_shares_where_the_parameters_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_WINDOW_SIZE_SHARES", "0.25, 0.75")
    assert calculate_max_num_blocks(groups(), 51_200, 4) == {"full": 149, "sliding": 24}
    assert calculate_max_num_blocks(groups(shares=(1, 1)), 51_200, 4) == {"full": 99, "sliding": 49}
    kv = pk.PagedKVCacheManager(groups(), max_batch_size=4, available_bytes=51_200, allocate_pools=False)
    assert [kv.block_count(group=name).total for name in ("full", "sliding")] == [149, 24]


@pytest.mark.parametrize("given", ["[0.25, 0.75]", " (0.25,0.75) "])
def test_shares_in_the_environment_may_stand_in_brackets(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_WINDOW_SIZE_SHARES", given)
    assert calculate_max_num_blocks(groups(), 51_200, 4) == {"full": 149, "sliding": 24}


def test_no_shares_in_the_environment_are_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_WINDOW_SIZE_SHARES", "none")
    assert calculate_max_num_blocks(groups(), 51_200, 4) == {"full": 99, "sliding": 49}


@pytest.mark.parametrize(
    "given", ["0.4", "0.4,0.3,0.3", "a,b", "0,0", "-0.5,1", "1.5,0.5", "0.4;0.6", "nan,1"]
)
def test_other_shares_in_the_environment_are_refused_with_the_groups(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_WINDOW_SIZE_SHARES", given)
    with pytest.raises(ValueError, match=f"PAGEKEEPER_WINDOW_SIZE_SHARES='{given}': must ") as refused:
        calculate_max_num_blocks(groups(), 51_200, 4)
    assert "'sliding' (sliding_window(64)), 'full' (full)" in str(refused.value)


@pytest.mark.parametrize("shares", [(0.4,), (0.4, 0.3, 0.3), (0, 0), (-0.5, 1), (1.5, 0.5)])
def test_other_shares_of_the_parameters_are_refused_with_the_groups(shares: Any) -> None:
    with pytest.raises(ValueError, match=r"window_size_shares=.*: must ") as refused:
        groups(shares=shares)
    assert "'sliding' (sliding_window(64)), 'full' (full)" in str(refused.value)


def test_a_group_without_a_share_is_refused_whatever_the_memory() -> None:
    with pytest.raises(ValueError, match="window_size_shares: 'sliding' has a share of 0, and no page") as no:
        calculate_max_num_blocks(groups(shares=(0, 1)), 51_200, 4)
    assert not isinstance(no.value, CacheTooSmallError)


@pytest.mark.parametrize(
    ("kind", "caching"),
    [(Recurrent(None, save_last_snapshot=False), True), (Recurrent(64), False), (Scratch(), True)],
)
def test_states_that_nobody_reuses_are_set_aside_for_each_request_first(kind: Any, caching: bool) -> None:
    full = MHAKVCacheParams(**SHAPE, num_layers=1, enable_prefix_caching=caching)
    kept = states(kind=kind, enable_prefix_caching=caching)
    params = MultiKVCacheParams({"full": full, "states": kept}, layout="paged")
    assert calculate_max_num_blocks(params, 25_600 + 11 * 64, 10) == {"full": 99, "states": 10}


def test_states_that_are_reused_have_a_share_and_it_is_the_first() -> None:
    params = MultiKVCacheParams(
        {"full": FULL, "states": states()}, layout="paged", window_size_shares=(0.25, 0.75)
    )
    # a quarter of 51,200 in pages of 64, three in pages of 256
    assert calculate_max_num_blocks(params, 51_200, 10) == {"full": 149, "states": 199}


def test_for_a_mix_of_lengths_as_many_requests_fit_in_each_group() -> None:
    # Of 160 tokens a request has 10 pages of 256, and 7 of 512: the window's 63 tokens and two chunks of 16.
    memory = 256 + 512 + 10 * (10 * 256 + 7 * 512)
    limits: dict[str, Any] = {"max_num_input_tokens": 16}
    assert calculate_max_num_blocks(groups(), memory, 64, length_mix={160: 1}, **limits) == {
        "full": 100,
        "sliding": 70,
    }
    assert plan_cache(groups(), memory, 64, length_mix={160: 1}, **limits).concurrency(160) == 10
    assert plan_cache(groups(), memory, 64, **limits).concurrency(160) == 8


def test_for_a_mix_the_longest_fits_in_each_group_however_seldom_it_comes() -> None:
    memory = 256 + 512 + 10_000
    # 16 tokens: a page in each. 320: 20 pages of 256, which proportion alone, a third of 10,000, is not.
    plan = plan_cache(groups(), memory, 64, length_mix={16: 1, 320: 0}, max_num_input_tokens=16)
    assert plan.num_pages == {"full": 20, "sliding": (10_000 - 20 * 256) // 512}
    assert plan.concurrency(320) == 1


@pytest.mark.parametrize("bad", [{}, {0: 1}, {16: 0}, {16: -1}, {16: "a"}, {1.5: 1}, [16], 16])
def test_a_mix_is_tokens_and_weights(bad: Any) -> None:
    with pytest.raises(ValueError, match="length_mix="):
        plan_cache(groups(), 51_200, 4, length_mix=bad)


def test_groups_that_share_memory_have_room_for_what_huge_pages_hold_together() -> None:
    # A huge page of 512 bytes holds two pages of one group or one of the other; of 21 one is null. A request
    # of 160 tokens takes 10 pages and 7: 5 + 7 huge ones.
    plan = plan_cache(groups("jenga"), 21 * 512, 4, max_num_input_tokens=16)
    assert (plan.memory.huge_pages, plan.memory.huge_bytes, plan.memory.pages) == (20, 512, (2, 1))
    assert (plan.concurrency(160), plan.longest()) == (1, (20 - 7) * 2 * 16)


def test_memory_that_groups_share_is_cut_so_that_most_requests_of_the_planned_length_fit() -> None:
    # Pages of 40 and 42 bytes: huge ones of 42, which pad the 40; of 440, for 11 or 10; of 840, for 21 or 20,
    # without padding.
    shape: dict[str, Any] = {"dtype": "float8_e4m3fn", "head_dim": 1, "num_layers": 1, "page_size": 1}
    full = MHAKVCacheParams(**shape, n_kv_heads=20)
    sliding = MHAKVCacheParams(**shape, n_kv_heads=21, kind=SlidingWindow(4))
    params = MultiKVCacheParams({"full": full, "sliding": sliding})

    def plan(memory: int) -> CachePlan:
        return plan_cache(params, memory, 4, max_num_input_tokens=1)

    # Of two of 840 one is null, and one is none for each group. Of 47 of 42 there are 46, two for each token.
    small = plan(2000)
    assert (small.memory.huge_bytes, small.concurrency(1)) == (42, 23)
    assert (small.needed_bytes(1, 23), small.needed_bytes(1, 24)) == (47 * 42, 49 * 42)
    # Of 200 tokens a request has 200 pages and 5. There are 408 of 42, for one. Of 440 there are 38: 37 of
    # 11 pages and one of 10, for two.
    middle = plan(409 * 42)
    assert (middle.memory.huge_bytes, middle.concurrency(1), middle.concurrency(200)) == (42, 204, 1)
    longer = middle.planned_for(200)
    assert (longer.memory.huge_bytes, longer.concurrency(1), longer.concurrency(200)) == (440, 198, 2)
    same = plan_cache(params, 409 * 42, 4, max_num_input_tokens=1, max_seq_len=200)
    assert same.memory == longer.memory
    # 1,024 of 20 pages and 975 of 21 are all but the null one of 2,000.
    large = plan(2_000 * 840)
    assert (large.memory.pages, large.concurrency(1)) == ((21, 20), 20_475)


def test_groups_that_share_memory_and_keep_nothing_have_no_more_than_requests_can_take() -> None:
    shape = SHAPE | {"enable_prefix_caching": False}
    params = MultiKVCacheParams(
        {
            "full": MHAKVCacheParams(**shape, num_layers=1),
            "sliding": MHAKVCacheParams(**shape, num_layers=2, kind=SlidingWindow(64)),
        }
    )
    kv = pk.load_kv_manager(params, 2, 160, None, 2**20, max_num_input_tokens=16, allocate_pools=False)
    assert kv.block_count().total == 2 * (5 + 7)


def test_pages_that_fit_no_huge_page_get_memory_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    large = RecurrentKVCacheParams(
        states=[RecurrentState("ssm", (2**26,), "float32")], num_layers=1, kind=Recurrent(64), page_size=16
    )
    members: dict[str, KVCacheParams] = {"full": FULL, "states": large}
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        plan = plan_cache(MultiKVCacheParams(members), 8 * GIB, 4)
    assert not plan.is_shared
    assert plan.num_pages["states"] == 4 * GIB // 2**28 - 1
    (said,) = caplog.messages
    assert said.startswith("groups get memory of their own: no huge page of at most ")
    with pytest.raises(ValueError, match="no huge page of at most"):
        plan_cache(MultiKVCacheParams(members, layout="jenga"), 8 * GIB, 4)


@pytest.mark.parametrize("layout", ["paged", "jenga"])
def test_groups_that_have_no_page_each_are_refused_with_what_they_would_need(layout: Any) -> None:
    with pytest.raises(CacheTooSmallError) as refused:
        plan_cache(groups(layout), 1000, 4)
    # twice a page of 512 for half of the memory; or three huge pages of 512: the null one, and one for each
    assert (refused.value.needed, refused.value.available) == ({"paged": 2048, "jenga": 1536}[layout], 1000)


def test_one_size_of_pages_may_be_forced_whatever_the_shards() -> None:
    """Case 146: the page that a state would fill differs with the shards; a cache need not have it."""
    model = HuggingFaceModel.read(HYBRID)
    config = pk.KVCacheConfig(kv_cache_page_size=4192)
    sharded = [config.to_model_params(model, tensor_parallel_degree=degree) for degree in (1, 2, 4)]
    assert {params.page_size for params in sharded} == {4192}
    for params in sharded:
        assert plan_cache(params, 2**28, 4, max_num_input_tokens=4192).concurrency(10_000) > 1


def test_an_encoders_pages_are_set_aside_for_each_request() -> None:
    """Case 140: 1,500 positions take 94 pages of 16, whatever the decoder's limit."""
    whisper = MHAKVCacheParams(**SHAPE, num_layers=1, kind=CrossAttention())
    params = MultiKVCacheParams({"full": FULL, "cross": whisper}, layout="paged")
    memory = (16 * 94 + 1) * 256 + 101 * 256
    plan = plan_cache(params, memory, 16, encoder_length=1500)
    assert plan.num_pages == {"full": 100, "cross": 16 * 94}
    assert plan.pages(448) == {"full": 28, "cross": 94}
    assert (plan.concurrency(1), plan.fixed_bytes(448)) == (16, 94 * 256)
    kv = pk.load_kv_manager(params, 16, 448, None, memory, encoder_length=1500, allocate_pools=False)
    ctx = pk.TextContext("a", [1, 2], encoder_length=1500)
    kv.claim(ctx)
    kv.alloc(ctx)
    assert len(kv.get_cache_indices(ctx, group="cross")[0]) == 94


def test_a_cache_with_cross_attention_is_not_planned_without_the_encoders_tokens() -> None:
    params = MultiKVCacheParams(
        {"full": FULL, "cross": MHAKVCacheParams(**SHAPE, num_layers=1, kind=CrossAttention())}
    )
    with pytest.raises(ValueError, match="encoder_length: missing"):
        plan_cache(params, 2**20, 4)


def test_shares_for_long_requests_are_those_of_layers_times_windows() -> None:
    windows = {f"of {size}": (size, layers) for size, layers in ((1024, 1), (4096, 3), (8192, 2))}
    shape = SHAPE | {"page_size": 1}
    params = MultiKVCacheParams(
        {
            name: MHAKVCacheParams(**shape, num_layers=layers, kind=SlidingWindow(size))
            for name, (size, layers) in windows.items()
        },
        layout="paged",
    )
    pages = calculate_max_num_blocks(params, 2**26, 4, length_mix={20_000: 1}, max_num_input_tokens=1)
    sizes = {name: pages[name] * params[name].bytes_per_page / 2**26 for name in windows}
    assert list(sizes.values()) == pytest.approx([1 / 29, 12 / 29, 16 / 29], abs=1e-3)
