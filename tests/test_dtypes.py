"""Element types and devices, by every name that they go by."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from pagekeeper.dtypes import DType, parse_device

BITS_OF_ONE_VALUE = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float4_e2m1fn": 4,
    "uint8": 8,
    "int8": 8,
}


def test_the_bits_of_every_type_are_tested() -> None:
    assert set(BITS_OF_ONE_VALUE) == set(DType)


@pytest.mark.parametrize(("name", "bits"), BITS_OF_ONE_VALUE.items())
def test_an_element_has_the_bytes_of_the_values_it_holds(name: str, bits: int) -> None:
    dtype = DType(name)
    assert dtype.size_in_bytes * 8 == bits * dtype.values_per_element


@pytest.mark.parametrize("dtype", DType)
def test_torch_stores_an_element_in_as_many_bytes(dtype: DType) -> None:
    assert torch.empty(3, dtype=dtype.to_torch()).nbytes == 3 * dtype.size_in_bytes


@pytest.mark.parametrize("dtype", DType)
def test_a_type_is_found_by_itself_its_name_and_its_torch_dtype(dtype: DType) -> None:
    torch_dtype = dtype.to_torch()
    assert [DType.parse(form) for form in (dtype, dtype.value, torch_dtype, str(torch_dtype))] == [dtype] * 4


@pytest.mark.parametrize("scalar", [np.float64, np.float32, np.float16, np.uint8, np.int8])
def test_numpy_dtypes_and_scalar_types_name_the_same_type(scalar: type[np.generic]) -> None:
    assert DType.parse(np.dtype(scalar)) == DType.parse(scalar) == scalar.__name__


def test_a_type_equals_its_name_and_prints_as_it() -> None:
    assert DType.bfloat16 == "bfloat16"
    assert f"{DType.bfloat16}" == "bfloat16"


@pytest.mark.parametrize("value", ["float33", torch.int64, np.dtype("bool"), np.complex64])
def test_a_type_that_no_cache_can_have_is_refused_with_the_list_of_those_that_can(value: object) -> None:
    with pytest.raises(ValueError, match=r"is not one of float64, float32, .*, int8$"):
        DType.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 32, float, ["float32"], torch.device("cpu")])
def test_what_is_no_dtype_at_all_is_a_type_error_that_shows_it(value: object) -> None:
    with pytest.raises(TypeError, match=r"a dtype is a DType, its name, .*, not "):
        DType.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "device"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:3", "cuda:3"),
        ("gpu:3", "cuda:3"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cuda", 12), "cuda:12"),
    ],
)
def test_a_device_has_one_name_whatever_it_is_given_as(value: str | torch.device, device: str) -> None:
    assert parse_device(value) == device


@pytest.mark.parametrize(
    "name", ["", "CPU", "cpu:1", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "cuda0", "meta:0"]
)
def test_an_unknown_device_name_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^device '{name}' is not 'cpu', 'cuda', 'cuda:<index>' or 'meta'$"
    ):
        parse_device(name)


@pytest.mark.parametrize("value", [None, 0, torch.float32])
def test_what_is_no_device_at_all_is_a_type_error_that_shows_it(value: object) -> None:
    with pytest.raises(TypeError, match=r"a device is a name, a torch.device or a DeviceRef, not "):
        parse_device(value)  # type: ignore[arg-type]


def in_a_fresh_interpreter(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True).stdout


def test_types_and_devices_are_understood_without_importing_torch() -> None:
    program = """
import sys
from pagekeeper.dtypes import DType, parse_device
DType.parse("torch.bfloat16"), parse_device("cuda")
print("torch" in sys.modules)
"""
    assert in_a_fresh_interpreter(program) == "False\n"


def test_without_torch_its_dtype_is_an_import_error_that_says_what_to_install() -> None:
    program = """
import sys
from pagekeeper.dtypes import DType
sys.modules["torch"] = None
try:
    DType.float32.to_torch()
except ImportError as error:
    print(error)
"""
    assert "pip install 'pagekeeper[torch]'" in in_a_fresh_interpreter(program)
