"""Groups of layers that share one slab of memory (PAGE-1 to PAGE-5), through the manager."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, copy_pages
from model.memory import PageMemory
from model.tier import Tier
from pagekeeper.params import FullAttention, Recurrent, RecurrentKVCacheParams, RecurrentState, Scratch

WINDOW = pk.SlidingWindow(1024)


def layers(count: int, **options: Any) -> pk.MHAKVCacheParams:
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 8, "head_dim": 128, "page_size": 128}
    return pk.MHAKVCacheParams(num_layers=count, **(shape | options))


def tiny(**groups: dict[str, Any]) -> pk.MultiKVCacheParams:
    """Groups of one head of four values, pages of 4 tokens: 128 bytes."""
    shape: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 4, "page_size": 4}
    return pk.MultiKVCacheParams({name: layers(1, **(shape | group)) for name, group in groups.items()})


def manager(params: pk.MultiKVCacheParams, budget: int, **options: Any) -> pk.PagedKVCacheManager:
    chosen: dict[str, Any] = {"max_batch_size": 4, "allocate_pools": False} | options
    return pk.PagedKVCacheManager(params, available_bytes=budget, **chosen)


# How much fits


def test_a_long_request_takes_what_the_windows_do_not_need() -> None:
    # 10 full and 50 sliding layers: pages of 10 MiB and 50 MiB, in huge pages of 50 MiB. 16 GiB have 327, one
    # of them null. In chunks of a page the window of 1,024 tokens holds 8 pages and that of the chunk; the
    # other 317 huge pages hold 1,585 full pages of 128 tokens.
    params = pk.MultiKVCacheParams({"full": layers(10), "sliding": layers(50, kind=WINDOW)})
    assert [group.bytes_per_page for group in params.values()] == [10 << 20, 50 << 20]
    kv = manager(params, 16 << 30, max_seq_len=210_000)
    assert kv.block_count() == pk.BlockCount(free=326, total=326)
    ctx = claimed(kv, [1] * (1585 * 128 + 1))
    with pytest.raises(
        pk.RequestTooLargeError, match=r"202881 tokens need 327 pages, a request may hold 326"
    ):
        kv.alloc(ctx, num_tokens=128)
    ctx.truncate(202_880)
    for _ in range(1585):
        kv.alloc(ctx, num_tokens=128)
        kv.step(ctx, counts=0)
    assert (ctx.processed_length, kv.block_count().free) == (202_880, 1)


def test_pages_that_have_no_small_multiple_are_padded() -> None:
    # 61 latents of 576 bfloat16, and a draft layer of 64 heads: 8,994,816 and 4,194,304 bytes.
    latents = pk.MLAKVCacheParams(
        dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, num_layers=61, page_size=128
    )
    draft = layers(1, dtype="bfloat16", n_kv_heads=64)
    assert [latents.bytes_per_page, draft.bytes_per_page] == [8_994_816, 4_194_304]
    memory = manager(pk.MultiKVCacheParams({"latents": latents, "draft": draft}), 120 << 30)._memory
    assert memory.huge_bytes < 256 << 20
    for ratio, stride, page in zip(memory.pages, memory.strides, [8_994_816, 4_194_304], strict=True):
        assert ratio * stride == memory.huge_bytes
        assert 0 <= 1 - page / stride < 0.05


# Which group has what


def test_a_huge_page_that_nobody_uses_goes_to_whichever_group_wants_it() -> None:
    # Pages of 128 and 256 bytes in huge pages of 256: four, and the null one.
    kv = manager(tiny(full={}, wide={"head_dim": 8}), 5 * 256)
    assert [kv.block_count(group=name).total for name in ("full", "wide")] == [8, 4]
    large = claimed(kv, range(10))  # three pages of each: two huge pages and three
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(large)
    small = claimed(kv, range(4))
    kv.alloc(small)
    assert kv.block_count() == pk.BlockCount(free=2, total=4)
    assert kv.block_count(group="full") == pk.BlockCount(free=5, total=8)  # one beside its own, four in two
    assert kv.block_count(group="wide") == pk.BlockCount(free=2, total=4)
    kv.verify()
    kv.release(small)
    assert kv.block_count() == pk.BlockCount(free=4, total=4)


def test_what_is_cached_in_a_huge_page_goes_when_another_group_takes_it() -> None:
    kv = manager(tiny(full={}, wide={"head_dim": 8, "kind": pk.SlidingWindow(4)}), 6 * 256)
    first = claimed(kv, range(8))
    compute(kv, first)
    kv.release(first)
    again = claimed(kv, range(9))
    kv.alloc(again)
    assert again.cached_prefix_length == 8
    kv.release(again)
    for number in range(1, 6):  # others take all of the slab
        other = claimed(kv, range(100 * number, 100 * number + 8))
        compute(kv, other)
        kv.release(other)
    last = claimed(kv, range(9))
    kv.alloc(last)
    assert last.cached_prefix_length == 0
    kv.verify()


# What is counted, and what lies idle


def test_gauges_count_huge_pages() -> None:
    # Two narrow pages or one wide page in each of five huge pages.
    kv = manager(tiny(full={}, wide={"head_dim": 8, "kind": pk.SlidingWindow(4)}), 6 * 256)

    def gauges() -> tuple[int, ...]:
        counted = kv.metrics()
        return tuple(counted[f"pages_{name}"] for name in ("total", "free", "pristine", "evictable"))

    assert gauges() == (5, 5, 5, 0)
    ctx = claimed(kv, range(8))
    kv.alloc(ctx)  # two narrow pages in one, and two wide ones
    assert gauges() == (5, 2, 2, 0)
    kv.step(ctx, counts=0)
    # The token after these sees back to the second block: the first wide page is cached, and nobody's.
    assert gauges() == (5, 3, 2, 1)
    kv.release(ctx)
    assert gauges() == (5, 5, 2, 3)
    assert kv.block_count() == pk.BlockCount(free=5, total=5)


def test_a_cache_whose_groups_share_memory_sleeps_when_nobody_holds_a_page() -> None:
    kv = manager(tiny(full={}, wide={"head_dim": 8}), 6 * 256, allocate_pools=True)
    ctx = claimed(kv, range(8))
    compute(kv, ctx)
    with pytest.raises(ValueError, match=r"4 pages are held, by requests \(1\)"):
        kv.sleep()
    kv.release(ctx)
    assert kv.probe_prefix_match_length(np.arange(9)) == 8
    kv.sleep()
    kv.wake()
    assert kv.probe_prefix_match_length(np.arange(9)) == 0
    compute(kv, claimed(kv, range(8)))
    kv.verify()


def test_memory_that_nobody_uses_yet_costs_nothing() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = manager(tiny(full={}, wide={}), 128 << 29, max_seq_len=64)
    assert kv.block_count().total == (1 << 29) - 1
    compute(kv, claimed(kv, range(8)))
    kv.verify()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


# Requests that are alone


def small(huge_pages: int, window: int) -> pk.PagedKVCacheManager:
    """A huge page has two pages of three layers, or three of two layers."""
    shape: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 1, "page_size": 2}
    params = pk.MultiKVCacheParams(
        {"full": layers(3, **shape), "win": layers(2, **shape, kind=pk.SlidingWindow(window))}
    )
    kv = manager(params, (huge_pages + 1) * 96, max_seq_len=200)
    assert kv.block_count().total == huge_pages
    return kv


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_request_that_is_alone_grows_until_it_is_too_large(chunk: int) -> None:
    # Cached pages of the window would come to lie in all huge pages.
    for huge_pages in range(3, 12):
        kv = small(huge_pages, window=4)
        ctx = claimed(kv, [1])
        while len(ctx) <= (huge_pages - 1) * 4:
            kv.alloc(ctx, num_tokens=chunk)
            kv.step(ctx, new_tokens=[5])
        kv.verify()
        # The window's three pages have a huge page, the others four tokens each.
        with pytest.raises(pk.RequestTooLargeError):
            kv.alloc(ctx)


def test_what_groups_need_at_different_times_is_not_summed() -> None:
    # Pages of two tokens; each is a huge page. While tokens 12 to 15 are computed the window has eight blocks
    # and the chunk four; while the last token is, nine and one. The most of each would be 13.
    shape: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 1, "page_size": 2}
    kinds = {"win": pk.SlidingWindow(33), "chunk": pk.ChunkedLocal(8)}
    groups = {name: layers(1, **shape, kind=kind) for name, kind in kinds.items()}
    kv = manager(pk.MultiKVCacheParams(groups), 13 * 16, max_seq_len=32)
    assert kv.block_count().total == 12
    ctx = claimed(kv, list(range(17)))
    free = []
    while ctx.processed_length < 17:
        kv.alloc(ctx, num_tokens=4)
        free.append(kv.block_count().free)
        kv.step(ctx, counts=0)
    assert free == [12 - 4, 12 - 8, 12 - 8, 12 - 12, 12 - 10]


def test_what_a_request_finds_never_keeps_it_out_when_it_is_alone() -> None:
    # While two requests grow by turns their windows come to lie in twice as many huge pages as one needs. One
    # that goes on alone is refused at last, and then for good if it went on from all that it finds.
    refused = shorter = 0
    for seed in range(60):
        random = Random(seed)
        kv = small(random.randint(8, 16), window=random.choice([12, 20]))
        both = [claimed(kv, [number]) for number in range(2)]
        for ctx in both * random.randint(8, 20):
            try:
                kv.alloc(ctx)
            except (pk.InsufficientBlocksError, pk.RequestTooLargeError):
                break
            copy_pages(kv)
            kv.step(ctx, new_tokens=[5])
        ctx, other = random.sample(both, 2)
        kv.release(other)
        longest = 0
        while True:
            try:
                kv.alloc(ctx, num_tokens=2)
            except pk.RequestTooLargeError:
                break
            except pk.InsufficientBlocksError:
                assert len(ctx) > longest, "it got on since it was refused before"
                longest, refused = len(ctx), refused + 1
                kv.preempt(ctx)
                found = kv.probe_prefix_match_length(ctx.tokens.all)
                kv.alloc(ctx, num_tokens=2)
                shorter += ctx.cached_prefix_length < min(found, (len(ctx) - 1) // 2 * 2)
            copy_pages(kv)
            ends = ctx.processed_length + ctx.active_length == len(ctx)
            kv.step(ctx, new_tokens=[5] if ends else [], counts=int(ends))
        kv.verify()
    assert min(refused, shorter) > 0, (refused, shorter)


@pytest.mark.parametrize("huge_pages", [7, 8])
def test_a_load_that_never_fits_beside_what_its_request_took_for_good_is_computed(huge_pages: int) -> None:
    # 13 tokens are four blocks. With the page to work in, the state that there is, the loaded one and its
    # copy a load has eight pages. A forward has two states, and does with seven.
    states: Any = {"states": [RecurrentState("state", (32,), "float32")], "num_layers": 1, "page_size": 4}
    attention = layers(1, n_kv_heads=1, head_dim=4, page_size=4, kind=FullAttention())
    state = RecurrentKVCacheParams(**states, kind=Recurrent(4))
    scratch = RecurrentKVCacheParams(**states, kind=Scratch())
    params = pk.MultiKVCacheParams({"full": attention, "state": state, "scratch": scratch})
    tier = Tier([PageMemory(huge_pages, 4) for _ in params])
    kv = manager(params, (huge_pages + 1) * 128, connector=tier)
    assert kv.block_count() == pk.BlockCount(free=huge_pages, total=huge_pages)
    first = claimed(kv, range(13))
    for _ in range(4):
        compute(kv, first, num_tokens=4)
    kv.release(first)
    kv.truncate_prefix([])
    tier.loads = "blind"
    second = claimed(kv, range(13))
    compute(kv, second, num_tokens=4)
    tier.loads = "late"
    kv.alloc(second, num_tokens=4)
    assert (second.active_length, len(tier.in_flight())) == ((4, 0) if huge_pages == 7 else (0, 1))


# Bytes


def cells(page: int, width: int) -> range:
    """Where a page lies, in units of the narrower group's pages."""
    return range(page * width, (page + 1) * width)


@pytest.mark.parametrize("wide", [8, 4])
@pytest.mark.parametrize("swapped", [False, True])
def test_whatever_is_let_go_in_between_pages_that_others_wrote_are_zeroed(wide: int, swapped: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        random = Random(seed)
        groups: dict[str, Any] = {
            "full": {},
            "win": {"head_dim": wide, "kind": pk.SlidingWindow(random.choice([4, 9]))},
        }
        widths = {"full": 1, "win": wide // 4}
        order = sorted(groups, reverse=swapped)
        kv = manager(tiny(**{name: groups[name] for name in order}), random.randint(8, 16) * wide * 32)
        writer: dict[int, str] = {}
        live: list[pk.TextContext] = []

        def pages(batch: list[pk.TextContext], name: str, kv: pk.PagedKVCacheManager = kv) -> set[int]:
            return {page for ctx in batch for page in kv.get_cache_indices(ctx, name)[0]} - {0}

        for number in range(40):
            if len(live) < 3:
                live.append(claimed(kv, range(100 * number, 100 * number + random.randint(1, 20))))
            batch = [ctx for ctx in live if ctx.processed_length < len(ctx)]
            batch = random.sample(batch, random.randint(0, len(batch)))
            try:
                kv.alloc(batch, num_tokens=random.choice([4, 20]))
            except (pk.InsufficientBlocksError, pk.RequestTooLargeError):
                kv.release(live.pop(0))
                continue
            in_vain = [ctx for ctx in batch if random.random() < 0.3]
            kv.preempt(in_vain)
            batch = [ctx for ctx in batch if ctx not in in_vain]
            inputs = kv.runtime_inputs([batch])
            for name in groups:
                fills = inputs[name].page_fills.tolist()
                assert len(set(fills)) == len(fills)
                assert set(fills) <= pages(live, name), "of pages that somebody holds"
                for page in fills:
                    lost = {writer.pop(cell, name) for cell in cells(page, widths[name])} - {name}
                    seen[f"zeroed {name}"] += bool(lost)
            for name, width in widths.items():
                for page in pages(batch, name):
                    assert {writer.get(cell, name) for cell in cells(page, width)} == {name}
                    writer.update(dict.fromkeys(cells(page, width), name))
            kv.step(batch, counts=[0] * len(batch))
            seen["in vain"] += len(in_vain)
    assert min(seen["zeroed full"], seen["zeroed win"], seen["in vain"]) > 10, seen


def test_pools_of_groups_that_share_a_slab_lie_over_each_other() -> None:
    kv = manager(tiny(full={}, wide={"head_dim": 8}), 5 * 256, allocate_pools=True)
    full, wide = (kv.get_buffers(0, group=name) for name in ("full", "wide"))
    assert (full.shape, wide.shape) == ((10, 2, 4, 1, 4), (5, 2, 4, 1, 8))
    wide[3] = 7.0
    assert (full[6:8] == 7.0).all()
    assert (full[:6] == 0.0).all()


def test_a_page_that_another_group_left_is_zeroed_before_it_is_read() -> None:
    kv = manager(tiny(full={}, wide={"head_dim": 8}), 5 * 256, allocate_pools=True)
    seen = 0
    for number in range(6):
        ctx = claimed(kv, range(100 * number, 100 * number + 3 + 3 * (number % 2)), no_store=True)
        kv.alloc(ctx)
        kv.runtime_inputs([[ctx]])
        for name in ("full", "wide"):
            pages, buffer = kv.get_cache_indices(ctx, group=name)[0], kv.get_buffers(0, group=name)
            for values in buffer[pages]:
                own = values == np.inf if name == "full" else values.isnan()
                assert own.all() or (values == 0).all()
                seen += int((values == 0).all())
            buffer[pages] = np.inf if name == "full" else np.nan
        kv.step(ctx, counts=0)
        kv.release(ctx)
    assert seen > 3


def test_an_engine_is_told_which_pages_to_zero() -> None:
    # Three huge pages. The second request has one wide and two full pages less, so huge pages change hands.
    kv = manager(tiny(full={}, wide={"head_dim": 8, "kind": pk.SlidingWindow(4)}), 4 * 256)
    told: dict[str, list[int]] = {"full": [], "wide": []}
    for length in (4, 7, 4, 7):
        ctx = claimed(kv, range(length), no_read=True, no_store=True)
        kv.alloc(ctx)
        inputs = kv.runtime_inputs([[ctx]])
        for name, fills in told.items():
            assert inputs[name].page_fills.dtype == np.int32
            fills += inputs[name].page_fills.tolist()
            assert set(inputs[name].page_fills) <= set(kv.get_cache_indices(ctx, group=name)[0])
        kv.step(ctx, counts=0)
        kv.release(ctx)
        assert kv.take_page_fills("full").tolist() == []
    assert told["full"] or told["wide"] or kv.metrics()["evictions"] == 0


# What is given


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        ("auto", {"total_num_pages": 8}, "must be a mapping of 'a', 'b' to pages"),
        ("auto", {"total_num_pages": {"a": 8}}, "names 'a', must name each of 'a', 'b'"),
        ("auto", {}, "give total_num_pages or available_bytes, one of them"),
        ("auto", {"available_bytes": 200}, "huge page"),
        ("auto", {"available_bytes": 10_000, "buffers": {"a": [], "b": []}}, "buffers: must be None"),
        ("jenga", {"total_num_pages": {"a": 8, "b": 8}}, "must be None, with layout='jenga'"),
        ("paged", {"available_bytes": 200}, "makes pages of the groups 'a' 0, 'b' 0 beside their null pages"),
    ],
)
def test_memory_that_is_not_stated_as_it_must_be_is_refused(layout: Any, given: Any, message: str) -> None:
    shape: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 4, "page_size": 4}
    params = pk.MultiKVCacheParams({"a": layers(1, **shape), "b": layers(1, **shape)}, layout=layout)
    with pytest.raises(ValueError, match=message):
        pk.PagedKVCacheManager(params, max_batch_size=1, allocate_pools=False, **given)


def test_groups_with_pages_by_name_have_memory_of_their_own() -> None:
    kv = pk.PagedKVCacheManager(
        tiny(full={}, wide={"head_dim": 8}),
        total_num_pages={"full": 6, "wide": 3},
        max_batch_size=1,
        allocate_pools=False,
    )
    assert [kv.block_count(group=name).total for name in ("full", "wide")] == [6, 3]
    assert kv.block_count() == pk.BlockCount(free=3, total=3)


# Tables that say where pages lie in memory


def entries_of_a_page(kv: pk.PagedKVCacheManager, group: str) -> int:
    """How far one page is from the next, by what the table says of a request's only page."""
    ctx = claimed(kv, range(4))
    kv.alloc(ctx)
    out = np.zeros((1, 1, 2, 1), np.int32)
    assert kv.copy_block_offsets(out, 0, ctx, group) == 1
    ((keys,), (values,)), ((page,),) = out[0, 0].tolist(), kv.get_cache_indices(ctx, group)
    assert (values, keys % page) == (keys + 1, 0)
    return int(keys // page)


def test_block_offsets_count_the_padding_between_pages() -> None:
    # A layer has 64 bytes of keys and 64 of values in a page. Pages of 257 x 128 bytes lie as far apart as
    # those of 263 x 128: the first size that both divide has more pages than a huge page may have.
    params = pk.MultiKVCacheParams(
        {
            name: layers(count, n_kv_heads=1, head_dim=4, page_size=4)
            for name, count in (("small", 257), ("large", 263))
        }
    )
    for group in params:
        assert entries_of_a_page(manager(params, 1 << 20), group) == 2 * 263


def test_block_offsets_of_pages_that_no_offset_leads_to_are_refused() -> None:
    params = tiny(small={"n_kv_heads": 257}, large={"n_kv_heads": 263})
    assert entries_of_a_page(manager(params, 1 << 20), "large") == 2
    with pytest.raises(ValueError, match=r"pages are 33664 bytes apart .*, no multiple of the 16448 bytes"):
        entries_of_a_page(manager(params, 1 << 20), "small")
