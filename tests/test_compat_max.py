"""The stand-ins for MAX's names."""

import enum
from types import SimpleNamespace

import pytest

from pagekeeper import dtypes
from pagekeeper.compat.max import CPU, DeviceRef, DType, InferenceSession
from pagekeeper.dtypes import parse_device
from pagekeeper.params import MHAKVCacheParams


def test_the_parameters_of_max_own_example_are_accepted() -> None:
    params = MHAKVCacheParams(
        dtype=DType.float32,
        n_kv_heads=8,
        head_dim=128,
        num_layers=2,
        page_size=128,
        devices=[DeviceRef.CPU()],
    )
    # 2 layers x key and value x 128 tokens x 8 heads x 128 values x 4 bytes = 2 MiB
    assert (params.devices, params.bytes_per_page) == (("cpu",), 2_097_152)


def test_a_device_reference_names_the_device_as_torch_does() -> None:
    assert [parse_device(device) for device in (DeviceRef.CPU(), DeviceRef.GPU(), DeviceRef.GPU(3))] == [
        "cpu",
        "cuda:0",
        "cuda:3",
    ]


def test_a_device_reference_of_max_itself_is_understood_by_its_attributes() -> None:
    DeviceKind = enum.Enum("DeviceKind", {"GPU": "gpu"})
    assert parse_device(SimpleNamespace(device_type=DeviceKind.GPU, id=1)) == "cuda:1"


def test_a_second_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="'cpu:1' is not"):
        parse_device(DeviceRef.CPU(1))


def test_the_element_types_are_pagekeepers_own() -> None:
    assert DType is dtypes.DType


def test_a_session_holds_the_devices_it_was_given() -> None:
    assert InferenceSession(devices=[CPU()]).devices == (CPU(),)
