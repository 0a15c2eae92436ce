"""Device pools (TAB-5, PAGE-8, API-2, API-9): their size, views of them, and adopted ones."""

from typing import Any

import pytest
import torch

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled
from pagekeeper.pools import DevicePool

PARAMS = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=2, head_dim=4, num_layers=3, page_size=4)
PAGE = 3 * 2 * 4 * 2 * 4 * 4
"""Bytes of a page: layers, key and value, tokens, heads, values, bytes of a float32."""


def sized(**options: Any) -> pk.PagedKVCacheManager:
    return pk.PagedKVCacheManager(PARAMS, max_batch_size=2, **options)


def pool(pages: int = 8, **options: Any) -> torch.Tensor:
    """A tensor that a manager with `pages` pages adopts."""
    return torch.ones((pages + 1, 3, 2, 4, 2, 4), **({"dtype": torch.float32} | options))


# Size


@pytest.mark.parametrize(
    ("given", "pages"), [(2 * PAGE, 1), (3 * PAGE - 1, 1), (3 * PAGE, 2), (100 * PAGE + 5, 99)]
)
def test_bytes_buy_whole_pages_and_the_null_page(given: int, pages: int) -> None:
    kv = sized(available_bytes=given, allocate_pools=False)
    assert (kv.total_num_pages, kv.block_count().total) == (pages, pages)


def test_a_pool_of_so_many_bytes_takes_no_more_than_them() -> None:
    assert sized(available_bytes=5 * PAGE + 7).pages_view().nbytes == 5 * PAGE


@pytest.mark.parametrize("given", [0, -1, PAGE, 2 * PAGE - 1, 2**31 * PAGE + PAGE, True, 1.5, "1"])
def test_bytes_that_make_no_pool_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^available_bytes="):
        sized(available_bytes=given, allocate_pools=False)


@pytest.mark.parametrize("sizes", [{}, {"total_num_pages": 4, "available_bytes": 5 * PAGE}])
def test_a_pool_has_one_size(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="total_num_pages or available_bytes"):
        sized(**sizes, allocate_pools=False)


# Views


def test_a_layer_is_a_view_of_the_pages() -> None:
    kv = manager(pages=8, allocate_pools=True)
    view = kv.get_buffers(1)
    assert tuple(view.shape) == (9, 2, 4, 2, 4)  # null page and 8; key and value; 4 tokens; 2 heads; 4 values
    assert view.dtype == torch.float32
    assert view.stride(0) * 4 == kv.pages_view().shape[1]


def test_a_page_is_one_run_of_bytes() -> None:
    kv = manager(pages=8, allocate_pools=True)
    pages = kv.pages_view()
    assert tuple(pages.shape) == (9, 3 * 2 * 4 * 2 * 4 * 4)  # layers, kv, tokens, heads, values, bytes
    assert pages.dtype == torch.uint8
    assert pages.is_contiguous()


def test_layers_and_pages_are_the_same_memory() -> None:
    kv = manager(pages=8, allocate_pools=True)
    kv.get_buffers(2)[5, 1, 3, 0, 2] = 1.5
    values = kv.pages_view()[5].view(torch.float32).reshape(3, 2, 4, 2, 4)
    assert values[2, 1, 3, 0, 2] == 1.5
    assert int(values.count_nonzero()) == 1


def test_heads_may_come_before_tokens_without_a_copy() -> None:
    kv = manager(pages=8, allocate_pools=True)
    kv.get_buffers(0)[5, 1, 3, 0, 2] = 1.5
    heads_first = kv.get_buffers(0, layout="HND")
    assert tuple(heads_first.shape) == (9, 2, 2, 4, 4)
    assert heads_first[5, 1, 0, 3, 2] == 1.5


def test_fresh_pools_hold_no_nan() -> None:
    kv = manager(pages=8, allocate_pools=True)
    assert all(bool(kv.get_buffers(layer).isfinite().all()) for layer in range(3))


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there_is_an_error(layer: int) -> None:
    kv = manager(pages=8, allocate_pools=True)
    with pytest.raises(ValueError, match=f"layer={layer}"):
        kv.get_buffers(layer)


def test_without_pools_there_are_tables_and_no_buffers() -> None:
    kv = manager(pages=8, allocate_pools=False)
    with pytest.raises(ValueError, match="allocate_pools"):
        kv.get_buffers(0)


# Adopted buffers


@pytest.mark.parametrize("allocate_pools", [True, False])
def test_an_adopted_buffer_is_the_pool_itself(allocate_pools: bool) -> None:
    tensor = pool()
    kv = sized(total_num_pages=8, buffers=[tensor], allocate_pools=allocate_pools)
    assert kv.get_buffers(0).data_ptr() == tensor.data_ptr()
    assert bool((kv.get_buffers(2) == 1).all())
    kv.get_buffers(1)[4, 0, 2, 1, 3] = 7.0
    assert tensor[4, 1, 0, 2, 1, 3] == 7.0


@pytest.mark.parametrize(
    "tensor",
    [
        pool(pages=7),
        pool(dtype=torch.float16),
        pool().transpose(3, 4).contiguous().transpose(3, 4),
        pool().flatten(),
        pool(device="meta"),
    ],
    ids=["a page too few", "dtype", "not contiguous", "shape", "device"],
)
def test_a_buffer_that_does_not_fit_is_refused_with_what_fits(tensor: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"^buffers\[0\]: .*must be \[9, 3, 2, 4, 2, 4\] of torch.float32 on cpu"
    ):
        sized(total_num_pages=8, buffers=[tensor])


def test_a_buffer_on_the_cpu_is_no_pool_of_a_gpu() -> None:
    params = pk.MHAKVCacheParams(
        dtype="float32", n_kv_heads=2, head_dim=4, num_layers=3, page_size=4, devices="cuda:0"
    )
    with pytest.raises(ValueError, match=r"on cpu, contiguous; must be .* on cuda:0"):
        DevicePool(params, 8, [pool()])


def test_the_cpu_is_one_device_with_or_without_its_number() -> None:
    assert DevicePool(PARAMS, 8, [pool(device="cpu:0")]).pages().shape[0] == 9


@pytest.mark.parametrize("count", [0, 2])
def test_one_pool_is_one_buffer(count: int) -> None:
    with pytest.raises(ValueError, match=f"buffers: {count} given, must be 1"):
        sized(total_num_pages=8, buffers=[pool()] * count)


def test_a_buffer_that_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"buffers\[0\]: got int, must be a torch.Tensor"):
        sized(total_num_pages=8, buffers=[1])


# Shutdown


def test_after_shutdown_there_are_no_views_and_no_memory_of_the_manager() -> None:
    kv = manager(pages=8, allocate_pools=True)
    kv.shutdown()
    kv.shutdown()
    with pytest.raises(ValueError, match="shut down"):
        kv.get_buffers(0)
    with pytest.raises(ValueError, match="shut down"):
        kv.pages_view()


def test_a_view_that_somebody_holds_outlives_shutdown() -> None:
    kv = manager(pages=8, allocate_pools=True)
    view = kv.get_buffers(0)
    kv.shutdown()
    view[1, 0, 0, 0, 0] = 2.5
    assert view[1, 0, 0, 0, 0] == 2.5


def test_requests_are_stepped_and_released_after_shutdown() -> None:
    kv = manager(pages=8, allocate_pools=True)
    running, planned = prefilled(kv, range(5)), claimed(kv, range(20, 25))
    kv.alloc(planned)
    kv.shutdown()
    kv.step(planned)
    compute_after = claimed(kv, [1])
    compute(kv, compute_after)
    kv.release([running, planned, compute_after])
    assert kv.block_count().used == 0
    kv.verify()
