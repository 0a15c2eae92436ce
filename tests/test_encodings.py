"""The element type of a cache, by format and by encoding of the weights (CFG-6)."""

import pytest

from pagekeeper import cache_dtype_for_encoding


@pytest.mark.parametrize("encoding", [None, "float32", "bfloat16", "gptq", "no encoding at all"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"])
def test_a_format_that_is_asked_for_is_the_type(encoding: str | None, form: str) -> None:
    assert cache_dtype_for_encoding(encoding, form) == form


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        ("float6_e2m3fn", "bfloat16"),
        ("float4_e2m1fnx2", "bfloat16"),
        ("gptq", "bfloat16"),
        ("q4_k", "float32"),
        ("q4_0", "float32"),
        ("q6_k", "float32"),
    ],
)
def test_quantized_weights_leave_the_cache_in_the_type_of_the_computation(encoding: str, dtype: str) -> None:
    assert cache_dtype_for_encoding(encoding) == dtype


def test_without_format_and_encoding_the_type_is_float32() -> None:
    assert cache_dtype_for_encoding(None) == "float32"


def test_names_may_be_in_any_case() -> None:
    assert cache_dtype_for_encoding("Q4_K", None) == "float32"
    assert cache_dtype_for_encoding(None, "BFloat16") == "bfloat16"


def test_an_unknown_format_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ValueError,
        match=r"^kv_cache_format='int4': must be one of 'float32', 'bfloat16', 'float8_e4m3fn', 'float4",
    ):
        cache_dtype_for_encoding("bfloat16", "int4")


def test_an_unknown_encoding_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"^quantization_encoding='q5': must be one of .*'gptq', 'q4_k'"):
        cache_dtype_for_encoding("q5")
