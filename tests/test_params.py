"""Parameters of a cache: what they accept, what they are kept as, and what follows from them."""

import dataclasses
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from pagekeeper.dtypes import DType
from pagekeeper.params import FullAttention, KVCacheParams, MHAKVCacheParams

SEED = "0123456789abcdef" * 4
WHOLE = r"a whole number from 1 to 2\*\*31 - 1"


def make(**changes: Any) -> MHAKVCacheParams:
    given: dict[str, Any] = dict(dtype="float32", n_kv_heads=8, head_dim=128, num_layers=2, page_size=16)
    return MHAKVCacheParams(**(given | changes))


def test_only_the_geometry_has_to_be_given() -> None:
    params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32)
    assert dataclasses.asdict(params) == {
        "dtype": "bfloat16",
        "n_kv_heads": 8,
        "head_dim": 128,
        "num_layers": 32,
        "kind": {},
        "kvcache_quant_config": None,
        "indexer": None,
        "allow_kv_head_replication": False,
        "page_size": 128,
        "devices": ("cpu",),
        "data_parallel_degree": 1,
        "enable_prefix_caching": True,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "store_partial_tails": True,
        "kv_hash_algo": "ahash64",
        "kv_hash_seed": None,
        "on_duplicate": "adopt",
        "eviction_policy": "priority_lru",
        "default_retention_priority": 35,
        "event_buffer_max_size": 0,
        "write_policy": "write_through",
        "selective_min_hits": 2,
        "selective_min_priority": None,
        "secondary_offload_min_priority": 35,
        "kv_connector_config": None,
        "max_tokens": None,
    }


@pytest.mark.parametrize(
    ("dtype", "page_shape", "bytes_per_page", "bytes_per_token"),
    [
        # 2 layers x key and value x 16 tokens x 8 heads x 128 values = 65,536 values a page, 4,096 a token
        ("float32", (2, 2, 16, 8, 128), 262_144, 16_384),
        ("bfloat16", (2, 2, 16, 8, 128), 131_072, 8_192),
        ("float8_e4m3fn", (2, 2, 16, 8, 128), 65_536, 4_096),
        ("float4_e2m1fn", (2, 2, 16, 8, 64), 32_768, 2_048),
    ],
)
def test_shape_and_bytes_of_a_page_follow_from_the_geometry(
    dtype: str, page_shape: tuple[int, ...], bytes_per_page: int, bytes_per_token: int
) -> None:
    params = make(dtype=dtype)
    (kv,) = params.page_layout.regions
    assert (kv.shape, params.bytes_per_page, params.bytes_per_token) == (
        page_shape,
        bytes_per_page,
        bytes_per_token,
    )


def test_the_head_dimension_is_given_and_not_derived_from_a_hidden_size() -> None:
    # Qwen3-4B has 8 KV heads of 128, although hidden size 2,560 / 32 query heads is 80.
    # 36 layers x key and value x 8 heads x 128 values x 2 bytes
    params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=36)
    assert params.bytes_per_token == 147_456


@pytest.mark.parametrize("dtype", DType)
def test_a_torch_tensor_of_the_page_shape_has_the_bytes_of_a_page(dtype: DType) -> None:
    params = make(dtype=dtype, n_kv_heads=3, head_dim=6, page_size=5)
    (kv,) = params.page_layout.regions
    assert torch.empty(kv.shape, dtype=dtype.to_torch()).nbytes == params.bytes_per_page


def test_equal_parameters_in_other_spellings_are_equal_and_hash_alike() -> None:
    plain = make(devices=["cpu"], kv_hash_seed=SEED, default_retention_priority=80)
    other = make(
        dtype=torch.float32,
        devices=torch.device("cpu"),
        page_size=np.int64(16),
        kv_hash_seed=SEED.upper(),
        default_retention_priority="high",
    )
    assert plain == other
    assert hash(plain) == hash(other)


@pytest.mark.parametrize(
    ("name", "priority"), [("low", 20), ("medium", 35), ("high", 80), (0, 0), (100, 100)]
)
def test_a_retention_priority_is_kept_as_a_number(name: str | int, priority: int) -> None:
    assert make(default_retention_priority=name).default_retention_priority == priority


def test_the_greatest_size_is_accepted() -> None:
    assert make(page_size=2**31 - 1).page_size == 2_147_483_647


def test_numpy_integers_are_kept_as_plain_ones() -> None:
    assert type(make(page_size=np.uint16(16)).page_size) is int


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dtype", "float33", "is not one of float64, "),
        ("dtype", None, "a dtype is a DType, its name"),
        ("n_kv_heads", 0, WHOLE),
        ("head_dim", -128, WHOLE),
        ("num_layers", 2.0, WHOLE),
        ("num_layers", True, WHOLE),
        ("page_size", 0, WHOLE),
        ("page_size", "16", WHOLE),
        ("page_size", 2**31, WHOLE),
        ("n_kv_heads", 2**33, WHOLE),
        ("devices", "tpu", "is not 'cpu', 'cuda', 'cuda:<index>' or 'meta'"),
        ("devices", [None], "a device is a name, a torch.device or a DeviceRef"),
        ("devices", [], "must name one device"),
        ("devices", ["cuda:0", "cuda:1"], "one device is supported for now"),
        ("data_parallel_degree", 0, WHOLE),
        ("data_parallel_degree", 2, "one replica is supported for now"),
        ("enable_prefix_caching", 1, "True or False"),
        ("enable_partial_reuse", 1, "True or False"),
        ("copy_on_partial_reuse", 1, "True or False"),
        ("store_partial_tails", 1, "True or False"),
        ("kv_hash_algo", "md5", "one of 'ahash64', 'sha256', 'sha256_64'"),
        ("on_duplicate", "drop", "one of 'adopt', 'private'"),
        ("eviction_policy", "mru", "one of 'priority_lru'"),
        ("eviction_policy", ["priority_lru"], "one of 'priority_lru'"),
        ("eviction_policy", None, "one of 'priority_lru'"),
        ("default_retention_priority", 101, "from 0 to 100, 'low' .20., 'medium' .35. or 'high' .80."),
        ("default_retention_priority", -1, "from 0 to 100"),
        ("default_retention_priority", "urgent", "from 0 to 100"),
        ("default_retention_priority", True, "from 0 to 100"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name_with_what_is(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=allowed) as refusal:
        make(**{field: value})
    assert str(refusal.value).startswith(f"{field}={value!r}: ")


def test_a_packed_type_needs_an_even_head_dimension() -> None:
    with pytest.raises(ValueError, match=r"^head_dim=127: must be even for float4_e2m1fn"):
        make(dtype="float4_e2m1fn", head_dim=127)


def test_an_unknown_argument_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="enable_partial_reads"):
        make(enable_partial_reads=False)


def test_the_signature_names_every_argument() -> None:
    arguments = inspect.signature(MHAKVCacheParams).parameters
    assert list(arguments)[:5] == ["dtype", "n_kv_heads", "head_dim", "num_layers", "kind"]
    assert (arguments["page_size"].default, arguments["kv_connector_config"].default) == (128, None)
    assert {argument.kind for argument in arguments.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_missing_geometry_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="head_dim"):
        MHAKVCacheParams(dtype="float32", n_kv_heads=8, num_layers=2)  # type: ignore[call-arg]


def test_the_base_class_is_no_cache_of_its_own() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KVCacheParams(num_layers=2, kind=FullAttention())  # type: ignore[abstract]


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().page_size = 32  # type: ignore[misc]


def test_a_changed_copy_is_checked_again() -> None:
    params = make()
    assert dataclasses.replace(params, page_size=32) == make(page_size=32)
    with pytest.raises(ValueError, match="page_size=0"):
        dataclasses.replace(params, page_size=0)


def test_parameters_survive_pickling() -> None:
    params = make(kv_hash_seed=SEED)
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_seed_does_not_show_in_the_printed_form() -> None:
    assert SEED not in repr(make(kv_hash_seed=SEED))


@pytest.mark.parametrize("given", [SEED[:-1], SEED[:-1] + "g", SEED + "\n", SEED.encode(), bytes(32), [SEED]])
def test_a_seed_that_is_refused_does_not_show(given: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_hash_seed=<.*>: must be 64 hexadecimal digits") as refused:
        make(kv_hash_seed=given)
    assert SEED[:16] not in str(refused.value)
