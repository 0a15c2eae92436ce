"""What is given for groups of layers: names, memory, and what is said of those that do not fit."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed

SHAPE: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 4, "num_layers": 1, "page_size": 4}
PAGE = 128
"""Bytes."""
TWO = pk.MultiKVCacheParams(
    {"full": pk.MHAKVCacheParams(**SHAPE), "win": pk.MHAKVCacheParams(**SHAPE, kind=pk.SlidingWindow(8))}
)
ONE = {
    layout: pk.MultiKVCacheParams({"full": pk.MHAKVCacheParams(**SHAPE)}, layout=layout)
    for layout in ("auto", "jenga", "paged")
}


class Name(str, enum.Enum):  # noqa: UP042
    FULL = "full"


class Line(enum.StrEnum):
    FULL = "full"


def manager(params: pk.MultiKVCacheParams = TWO, **memory: Any) -> pk.PagedKVCacheManager:
    given = memory or {"total_num_pages": {"full": 8, "win": 6}}
    options = {"max_batch_size": 2, "allocate_pools": False, "max_seq_len": 30}
    return pk.PagedKVCacheManager(params, **(options | given))


# Names


@pytest.mark.parametrize("name", [Name.FULL, Line.FULL, np.str_("full")])
def test_a_name_may_be_any_kind_of_str(name: str) -> None:
    kv = manager()
    assert kv.block_count(group=name) == pk.BlockCount(free=8, total=8)
    ctx = claimed(kv, range(4))
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]])[name] is not None
    assert kv.get_cache_indices(ctx, name) == kv.get_cache_indices(ctx, "full")


@pytest.mark.parametrize("given", [np.array(["full"]), np.array(["full", "win"]), b"full", 0, ["full"], ""])
def test_what_is_no_name_of_a_group_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'full', 'win'"):
        manager().block_count(group=given)


def test_inputs_say_which_groups_they_have() -> None:
    kv = manager()
    ctx = claimed(kv, range(4))
    kv.alloc(ctx)
    inputs = kv.runtime_inputs([[ctx]])
    with pytest.raises(KeyError, match="'x': must be one of 'full', 'win'"):
        inputs["x"]
    with pytest.raises(KeyError, match="name a group first, one of 'full', 'win'"):
        inputs[0]
    assert repr(inputs).startswith(
        "KVCacheInputs(form='max', groups={'full': KVCacheInputs(form='max', replicas=("
    )


def test_inputs_of_one_group_have_no_names() -> None:
    kv = pk.PagedKVCacheManager(
        pk.MHAKVCacheParams(**SHAPE), total_num_pages=8, max_batch_size=2, allocate_pools=False
    )
    ctx = claimed(kv, range(4))
    kv.alloc(ctx)
    with pytest.raises(KeyError, match="the cache has one group"):
        kv.runtime_inputs([[ctx]])["full"]


@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer"])
def test_a_cache_that_holds_nothing_has_inputs_of_each_group(form: Any) -> None:
    dummy = pk.DummyKVCache(TWO, total_num_pages={"full": 16, "win": 8}, max_batch_size=2)
    assert dummy.total_num_pages == 24 == manager(total_num_pages={"full": 16, "win": 8}).total_num_pages
    inputs: Any = dummy.runtime_inputs([np.arange(2, dtype=np.int32)], form)
    assert list(inputs.groups) == ["full", "win"]
    shapes = {name: type(inputs[name][0]) for name in TWO}
    assert len(set(shapes.values())) == 1


# Memory


@pytest.mark.parametrize("layout", ONE)
def test_one_group_has_its_memory_to_itself_in_any_layout(layout: str) -> None:
    by_bytes = manager(ONE[layout], available_bytes=9 * PAGE)  # the null page is one
    by_pages = manager(ONE[layout], total_num_pages={"full": 8})
    assert by_bytes.block_count() == by_pages.block_count() == pk.BlockCount(free=8, total=8)


def plain(pages: int = 9) -> np.ndarray:
    return np.zeros((pages, PAGE), np.uint8)


@pytest.mark.parametrize("missing", [{"full": [plain()]}, {"full": [plain()], "win": None}, None])
def test_each_group_needs_a_pool_when_memory_is_given(missing: Any) -> None:
    kv = manager(total_num_pages={"full": 8, "win": 8}, buffers={"full": [plain()], "win": [plain()]})
    kv.sleep()
    with pytest.raises(ValueError, match="buffers"):
        kv.wake(missing)
    kv.wake({"full": [plain()], "win": [plain()]})
    if missing is not None:
        with pytest.raises(ValueError, match="buffers"):
            manager(total_num_pages={"full": 8, "win": 8}, buffers=missing)


def test_groups_may_not_be_given_the_same_memory() -> None:
    both, pages = plain(17), {"full": 8, "win": 8}
    manager(total_num_pages=pages, buffers={"full": [plain()], "win": [both[8:]]})
    for full, win in ((both[:9], both[8:]), (both[:9], both[:9])):
        with pytest.raises(ValueError, match=r"buffers\['full'\], buffers\['win'\]: have bytes in common"):
            manager(total_num_pages=pages, buffers={"full": [full], "win": [win]})


def test_groups_may_not_be_given_the_same_tensors() -> None:
    torch = pytest.importorskip("torch")
    both, pages = torch.zeros(18, 1, 2, 4, 1, 4), {"full": 8, "win": 8}
    manager(total_num_pages=pages, buffers={"full": [both[:9]], "win": [both[9:]]})
    array = both.view(18, -1).view(torch.uint8).numpy()
    for full, win in ((both[:9], both[8:17]), (both[:9], both[:9]), (both[:9], array[8:17])):
        with pytest.raises(ValueError, match=r"buffers\['full'\], buffers\['win'\]: have bytes in common"):
            manager(total_num_pages=pages, buffers={"full": [full], "win": [win]})


def test_groups_that_share_memory_take_no_pools_of_others() -> None:
    with pytest.raises(ValueError, match="buffers: must be None where groups share memory"):
        manager(available_bytes=20 * PAGE, buffers={"full": [plain()], "win": [plain()]})
