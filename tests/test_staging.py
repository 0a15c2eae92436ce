"""Memory for tables (TAB-2): addresses never change, and copies on a device equal what was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, TextContext
from pagekeeper.offsets import OffsetLayout
from pagekeeper.staging import DeviceStaging
from pagekeeper.tables import TableWriter

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def make(device: str) -> tuple[PagedKVCacheManager, TableWriter, list[TextContext]]:
    params = MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=2, num_layers=1, page_size=2)
    kv = PagedKVCacheManager(params=params, total_num_pages=20, max_batch_size=3, allocate_pools=False)
    writer = TableWriter(
        kv._core,
        3,
        46,
        lambda: DeviceStaging(torch.device(device)),
        offset_layout=lambda: OffsetLayout.of(params, 20, None),
    )
    batch = [TextContext(f"r{i}", [10 * i + k for k in range(3 + i)]) for i in range(3)]
    for ctx in batch:
        kv.claim(ctx)
    return kv, writer, batch


def arrays(tables: Any) -> dict[str, Any]:
    fields = {name: getattr(tables, name) for name in tables.__slots__}
    return {name: value for name, value in fields.items() if not isinstance(value, int)}


@pytest.mark.parametrize("form", ["max", "vllm", "flashinfer"])
@pytest.mark.parametrize("device", DEVICES)
def test_device_tables_equal_host_tables_at_every_step(device: str, form: Any) -> None:
    kv, writer, batch = make(device)
    for step in range(5):
        kv.alloc(batch)
        on_host = arrays(kv.runtime_inputs([batch], form=form)[0])
        on_device = arrays(writer.write(batch, form)[0])
        assert on_host.keys() == on_device.keys()
        for name, array in on_host.items():
            copy = on_device[name].cpu().numpy()
            assert copy.dtype == array.dtype
            assert copy.tolist() == array.tolist(), name
        kv.step(batch, [step] * 3)


@pytest.mark.parametrize("device", DEVICES)
def test_device_tables_are_at_two_addresses_in_turn(device: str) -> None:
    kv, writer, batch = make(device)
    addresses = []
    for step in range(4):
        kv.alloc(batch)
        tables: Any = writer.write(batch, "max")[0]
        addresses.append(tables.lookup_table.data_ptr())
        kv.step(batch, [step] * 3)
    assert addresses[0] != addresses[1]
    assert addresses[2:] == addresses[:2]


def test_tables_of_the_step_before_stay_while_the_next_is_written() -> None:
    kv, writer, batch = make("cpu")
    kv.alloc(batch)
    tables: Any = writer.write(batch, "max")[0]
    first = tables.lookup_table
    before = first.numpy().copy()
    kv.step(batch, [1, 2, 3])
    kv.alloc(batch)
    writer.write(batch[::-1], "max")
    assert np.array_equal(first.numpy(), before)
