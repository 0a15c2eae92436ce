"""Configurations of caches (CFG-1, CFG-4, CFG-5): defaults, what is refused, and the parameters they give."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

import pagekeeper as pk
from pagekeeper import KVCacheConfig, KVConnectorConfig
from pagekeeper.config_model import Unit
from pagekeeper.models import HuggingFaceModel
from pagekeeper.params import (
    FullAttention,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
    RecurrentKVCacheParams,
    SlidingWindow,
)

SEED = "0123456789abcdef" * 4
SECRET = "me:s3cret@host"
DEFAULTS: dict[str, Any] = {
    "kv_cache_page_size": 128,
    "enable_prefix_caching": True,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "store_partial_tails": True,
    "enable_dp_cross_replica_prefix_copy": True,
    "kv_cache_format": None,
    "indexer_kv_cache_format": None,
    "state_pool_dtype": None,
    "kv_cache_hash_algo": "ahash64",
    "kv_cache_hash_seed": None,
    "on_duplicate": "adopt",
    "eviction_policy": "priority_lru",
    "default_retention_priority": 35,
    "device_memory_utilization": 0.9,
    "max_tokens": None,
    "layout": "auto",
    "window_size_shares": None,
    "kv_connector_config": None,
    "write_policy": "write_through",
    "selective_min_hits": 2,
    "selective_min_priority": None,
    "secondary_offload_min_priority": 35,
    "event_buffer_max_size": 0,
    "attention_dp_events_gather_period_ms": 5,
}
FULL: dict[str, Any] = {
    "kv_cache_page_size": 64,
    "enable_prefix_caching": True,
    "enable_partial_reuse": False,
    "copy_on_partial_reuse": False,
    "store_partial_tails": False,
    "enable_dp_cross_replica_prefix_copy": False,
    "kv_cache_format": "float8_e4m3fn",
    "indexer_kv_cache_format": "float8_e4m3fn",
    "state_pool_dtype": "float32",
    "kv_cache_hash_algo": "sha256",
    "kv_cache_hash_seed": SEED,
    "on_duplicate": "private",
    "eviction_policy": "priority_slru",
    "default_retention_priority": 20,
    "device_memory_utilization": 0.5,
    "max_tokens": 4096,
    "layout": "paged",
    "window_size_shares": (0.25, 0.75),
    "kv_connector_config": KVConnectorConfig(type="rust_tiered", host_offload_max_gb=2),
    "write_policy": "selective",
    "selective_min_hits": 3,
    "selective_min_priority": 80,
    "secondary_offload_min_priority": 40,
    "event_buffer_max_size": 100,
    "attention_dp_events_gather_period_ms": 5,
}
"""Every field with another value than its default, but for those that have to have it."""
AS_BY_DEFAULT = {"enable_prefix_caching", "attention_dp_events_gather_period_ms"}
"""Those: a tier needs prefix caching, and the period has one value that is allowed."""
SHAPE: dict[str, Any] = {"n_kv_heads": 8, "head_dim": 128, "num_layers": 2}


def refusals(**given: Any) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        KVCacheConfig(**given)
    return [refusal["msg"] for refusal in refused.value.errors()]


# What is kept


def test_without_arguments_every_field_has_its_default() -> None:
    assert KVCacheConfig().model_dump() == DEFAULTS


def test_every_field_is_kept_as_it_was_given() -> None:
    config = KVCacheConfig(**FULL)
    assert {name: getattr(config, name) for name in FULL} == FULL


def test_other_spellings_of_a_value_are_the_same_value() -> None:
    given: dict[str, Any] = {
        "kv_cache_page_size": np.int64(64),
        "default_retention_priority": "low",
        "selective_min_priority": "high",
        "device_memory_utilization": np.float32(0.5),
        "window_size_shares": "0.25, 0.75",
        "kv_cache_hash_seed": SEED.upper(),
        "kv_connector_config": {"type": "rust_tiered", "host_offload_max_gb": 2},
    }
    other = KVCacheConfig(**(FULL | given))
    assert other == KVCacheConfig(**FULL)
    assert hash(other) == hash(KVCacheConfig(**FULL))


def test_a_connector_may_be_given_by_the_name_of_its_type() -> None:
    assert KVCacheConfig(kv_connector_config="rust_tiered").kv_connector_config == KVConnectorConfig(
        type="rust_tiered"
    )


@pytest.mark.parametrize("field", sorted(FULL.keys() - AS_BY_DEFAULT))
def test_configurations_that_differ_in_one_field_are_not_equal(field: str) -> None:
    assert KVCacheConfig(**(FULL | {field: DEFAULTS[field]})) != KVCacheConfig(**FULL)


def test_a_configuration_without_prefix_caching_is_not_equal_to_one_with_it() -> None:
    given = FULL | {"kv_connector_config": None}
    assert KVCacheConfig(**(given | {"enable_prefix_caching": False})) != KVCacheConfig(**given)


def test_the_fields_with_their_defaults_cannot_have_other_values_in_a_full_configuration() -> None:
    assert {field for field in FULL if FULL[field] == DEFAULTS[field]} == AS_BY_DEFAULT
    for field, other in (("enable_prefix_caching", False), ("attention_dp_events_gather_period_ms", 6)):
        (said,) = refusals(**(FULL | {field: other}))
        assert said.startswith(f"{field}={other}: must be {DEFAULTS[field]}")


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        KVCacheConfig.model_copy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: KVCacheConfig.model_validate_json(config.model_dump_json()),
        lambda config: KVCacheConfig(**config.model_dump()),
    ],
    ids=["copy", "deepcopy", "model_copy", "pickle", "json", "dump"],
)
@pytest.mark.parametrize("given", [{}, FULL], ids=["defaults", "full"])
def test_a_copy_is_equal_and_hashes_alike(
    copied: Callable[[KVCacheConfig], KVCacheConfig], given: dict[str, Any]
) -> None:
    config = KVCacheConfig(**given)
    assert copied(config) == config
    assert hash(copied(config)) == hash(config)


def test_a_configuration_cannot_be_changed_but_copied_with_changes() -> None:
    config = KVCacheConfig(**FULL)
    with pytest.raises(ValidationError, match="frozen"):
        config.max_tokens = 1  # type: ignore[misc]
    changed = config.model_copy(update={"max_tokens": 1})
    assert (changed.max_tokens, changed.layout, config.max_tokens) == (1, "paged", 4096)


def test_the_seed_is_in_no_printed_form_and_in_no_message() -> None:
    config = KVCacheConfig(kv_cache_hash_seed=SEED)
    assert SEED not in repr(config) + str(config)
    assert refusals(kv_cache_hash_seed="secret") == [
        "kv_cache_hash_seed=<6 characters>: must be 64 hexadecimal digits (the .hex() of 32 bytes) or None"
    ]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: KVCacheConfig(kv_cache_hash_seed=SECRET),
        lambda: KVCacheConfig(kv_cache_hash_seed=[SECRET]),  # type: ignore[arg-type]
        lambda: KVCacheConfig(
            kv_cache_hash_seed=SEED, kv_connector_config="rust_tiered", enable_prefix_caching=False
        ),
        lambda: KVCacheConfig(kv_cache_hash_sed=SECRET),  # type: ignore[call-arg]
        lambda: KVCacheConfig(kv_connector_config={"type": "dkv", "block_store_endpoint": [SECRET]}),
        lambda: KVCacheConfig(kv_connector_config=[SECRET]),  # type: ignore[arg-type]
        lambda: KVCacheConfig(kv_connector_config=f"tcp://{SECRET}"),
        lambda: KVCacheConfig().model_copy(update={"kv_cache_hash_seed": SECRET}),
        lambda: KVCacheConfig.model_validate(SECRET),
        lambda: KVCacheConfig.model_validate({"kv_cache_hash_seed": SECRET}, strict=True),
        lambda: KVCacheConfig.model_validate_strings({"kv_cache_hash_seed": SECRET}),
        lambda: KVCacheConfig.model_validate_json(f'{{"kv_cache_hash_seed": "{SECRET}"'),
        lambda: KVCacheConfig.model_validate_json(f'{{"kv_cache_hash_seed": "{SECRET}"}}'),
        lambda: KVCacheConfig.model_validate_json(f'"{SECRET}"'),
        lambda: setattr(KVCacheConfig(), "kv_cache_hash_seed", SECRET),
        lambda: setattr(KVCacheConfig(), "kv_cache_hash_sed", SECRET),
        lambda: KVConnectorConfig(block_store_endpoint=f"{SECRET}\0"),
        lambda: KVConnectorConfig(block_store_endpoint=b"s3cret"),  # type: ignore[arg-type]
        lambda: KVConnectorConfig.of({"type": "dkv", "endpoint": SECRET}),
        lambda: KVConnectorConfig(type=f"tcp://{SECRET}"),
    ],
)
def test_no_form_of_a_refusal_has_a_secret(refused: Callable[[], object]) -> None:
    with pytest.raises(ValidationError) as error:
        refused()
    told = error.value
    for form in (str(told), repr(told), repr(told.errors()), told.json(), repr(told.args)):
        assert "s3cret" not in form
        assert SEED not in form


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no form")


@pytest.mark.parametrize("field", FULL)
def test_what_cannot_be_printed_is_refused_by_its_field(field: str) -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (Unprintable(), nested):
        (said,) = refusals(**{field: value})
        assert said.startswith(f"{field}=")
        assert len(said) < 300


def test_every_number_has_a_unit() -> None:
    numbers = {
        name
        for name, field in KVCacheConfig.model_fields.items()
        if {int, float} & {field.annotation, *get_args(field.annotation)}
    }
    with_units = {
        name
        for name, field in KVCacheConfig.model_fields.items()
        if any(isinstance(it, Unit) for it in field.metadata)
    }
    assert with_units == numbers | {"window_size_shares"}


# What is refused

WHOLE = "a whole number from 1 to 2**31 - 1"
PRIORITY = "a whole number from 0 to 100, 'low' (20), 'medium' (35) or 'high' (80)"
SHARES = "a list of numbers from 0 to 1, of which one at least is above 0, or None"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *(("kv_cache_page_size", value, WHOLE) for value in [0, -1, 2**31, 1.5, "128", True, None]),
        *(("selective_min_hits", value, WHOLE) for value in [0, None, "2"]),
        *(("max_tokens", value, f"{WHOLE}, or None") for value in [0, -1, 1.0, "many", False]),
        *(("event_buffer_max_size", value, "a whole number from 0 to 2**31 - 1") for value in [-1, None]),
        *(
            (
                "attention_dp_events_gather_period_ms",
                value,
                "5: there is one replica, no others' events to gather",
            )
            for value in [0, 10, 5.0, "5", None]
        ),
        *(
            (field, value, "True or False")
            for field, default in DEFAULTS.items()
            if default is True
            for value in [1, None, "true"]
        ),
        *(
            ("device_memory_utilization", value, "a number above 0 and up to 1")
            for value in [0, 0.0, -0.1, 1.01, float("nan"), "0.9", True, None, 10**400]
        ),
        *(("default_retention_priority", value, PRIORITY) for value in [-1, 101, 0.5, "urgent", None]),
        *(("secondary_offload_min_priority", value, PRIORITY) for value in [101, None]),
        *(("selective_min_priority", value, f"{PRIORITY}, or None") for value in [101, "urgent"]),
        *(
            (
                "kv_cache_format",
                value,
                "one of 'float32', 'bfloat16', 'float8_e4m3fn', 'float4_e2m1fn', or None",
            )
            for value in ["float16", "fp8", "", 8]
        ),
        *(
            ("indexer_kv_cache_format", value, "one of 'bfloat16', 'float8_e4m3fn', 'float4_e2m1fn', or None")
            for value in ["float32", 1]
        ),
        ("state_pool_dtype", "float8_e4m3fn", "one of 'bfloat16', 'float32', or None"),
        ("kv_cache_hash_algo", "md5", "one of 'ahash64', 'sha256', 'sha256_64'"),
        ("on_duplicate", "keep", "one of 'adopt', 'private'"),
        ("eviction_policy", "lru", "one of 'priority_lru', 'priority_slru'"),
        ("layout", None, "one of 'auto', 'jenga', 'paged'"),
        ("write_policy", "write_back", "one of 'write_through', 'on_evict', 'selective'"),
        *(
            ("window_size_shares", value, SHARES)
            for value in [[], [0, 0], [0.5, 1.5], [-0.1, 1], "a,b", "", [True], 0.5, [float("nan")]]
        ),
        (
            "kv_connector_config",
            3,
            "a KVConnectorConfig, a mapping of its fields, the name of its type, or None",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name_with_what_is(
    field: str, value: object, allowed: str
) -> None:
    (refusal,) = refusals(**{field: value})
    assert refusal.startswith(f"{field}={value!r:.20}")
    assert refusal.endswith(f": must be {allowed}")


def test_a_bad_field_of_the_connector_is_named_within_it() -> None:
    assert refusals(kv_connector_config={"type": "rust_tiered", "num_copy_lanes": 65}) == [
        "kv_connector_config.num_copy_lanes=65: must be a whole number from 1 to 64"
    ]


def test_an_unknown_field_is_refused_with_the_one_that_was_meant() -> None:
    assert refusals(kv_cache_pagesize=64) == ["kv_cache_pagesize: unknown; did you mean kv_cache_page_size?"]


def test_a_tier_needs_prefix_caching() -> None:
    assert refusals(enable_prefix_caching=False, kv_connector_config="rust_tiered") == [
        "enable_prefix_caching=False: must be True for kv_connector_config.type='rust_tiered', which keeps "
        "blocks that later requests reuse"
    ]
    assert not KVCacheConfig(enable_prefix_caching=False, kv_connector_config="null").enable_prefix_caching


# Parameters


def test_parameters_have_everything_that_was_configured() -> None:
    params = KVCacheConfig(**(FULL | {"kv_cache_format": None})).to_params(dtype="bfloat16", **SHAPE)
    assert isinstance(params, MHAKVCacheParams)
    assert dataclasses.asdict(params) == dataclasses.asdict(
        MHAKVCacheParams(
            dtype="bfloat16",
            **SHAPE,
            page_size=64,
            enable_partial_reuse=False,
            copy_on_partial_reuse=False,
            store_partial_tails=False,
            kv_hash_algo="sha256",
            kv_hash_seed=SEED,
            on_duplicate="private",
            eviction_policy="priority_slru",
            default_retention_priority=20,
            event_buffer_max_size=100,
            write_policy="selective",
            selective_min_hits=3,
            selective_min_priority=80,
            secondary_offload_min_priority=40,
            kv_connector_config={"type": "rust_tiered", "host_offload_max_gb": 2},
            max_tokens=4096,
        )
    )


def test_a_default_configuration_gives_default_parameters() -> None:
    assert KVCacheConfig().to_params(dtype="float32", **SHAPE) == MHAKVCacheParams(dtype="float32", **SHAPE)


@pytest.mark.parametrize(
    ("configured", "asked", "encoding", "dtype"),
    [
        (None, "float16", "gptq", "float16"),
        ("float8_e4m3fn", "float16", None, "float8_e4m3fn"),
        (None, None, "gptq", "bfloat16"),
        ("float32", None, "gptq", "float32"),
        (None, None, None, "float32"),
    ],
)
def test_the_format_goes_before_the_models_type_and_that_before_the_encoding(
    configured: Any, asked: Any, encoding: Any, dtype: str
) -> None:
    config = KVCacheConfig(kv_cache_format=configured)
    assert config.to_params(dtype=asked, quantization_encoding=encoding, **SHAPE).dtype == dtype


def test_four_bit_caches_have_their_scales() -> None:
    params = KVCacheConfig(kv_cache_format="float4_e2m1fn").to_params(**SHAPE)
    assert params.kvcache_quant_config == KVCacheQuantizationConfig.nvfp4()


def test_latents_are_made_of_the_head_dimension_and_its_key_part() -> None:
    params = KVCacheConfig(kv_cache_page_size=64).to_params(
        dtype="bfloat16", is_mla=True, head_dim=576, qk_rope_head_dim=64, num_layers=61, num_q_heads=128
    )
    assert isinstance(params, MLAKVCacheParams)
    assert (params.kv_lora_rank, params.bytes_per_token) == (512, 70_272)


def test_latents_need_query_heads_and_others_need_kv_heads() -> None:
    shape: dict[str, Any] = {"head_dim": 576, "num_layers": 2}
    with pytest.raises(ValueError, match="num_q_heads=None: must be given with is_mla=True"):
        KVCacheConfig().to_params(is_mla=True, **shape)
    with pytest.raises(ValueError, match="n_kv_heads=None: must be given"):
        KVCacheConfig().to_params(**shape)


@pytest.mark.parametrize(
    ("configured", "least", "page_size"),
    [(128, 1, 128), (128, 16, 128), (16, 64, 64), (256, 128, 256), (7, 1, 7)],
)
def test_a_page_has_what_the_kernel_asks_for_at_least(configured: int, least: int, page_size: int) -> None:
    config = KVCacheConfig(kv_cache_page_size=configured)
    assert config.to_params(page_size=least, **SHAPE).page_size == page_size


def test_a_page_that_is_no_multiple_of_the_kernels_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_page_size=100: must be a multiple of page_size=64, .*try 64 or 128"
    ):
        KVCacheConfig(kv_cache_page_size=100).to_params(page_size=64, **SHAPE)


def test_an_indexer_has_the_type_that_was_configured_for_it_and_not_the_caches() -> None:
    plain = KVCacheConfig(kv_cache_format="float8_e4m3fn").to_params(indexer_head_dim=128, **SHAPE)
    other = KVCacheConfig(indexer_kv_cache_format="float8_e4m3fn").to_params(indexer_head_dim=128, **SHAPE)
    assert plain.indexer is not None
    assert other.indexer is not None
    assert (plain.indexer.dtype, other.indexer.dtype) == ("bfloat16", "float8_e4m3fn")


HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
}


def test_a_models_cache_has_the_types_layout_and_shares_that_were_configured() -> None:
    config = KVCacheConfig(**(FULL | {"kv_connector_config": None}))
    params = config.to_model_params(HuggingFaceModel.read(HYBRID), tensor_parallel_degree=2)
    assert isinstance(params, MultiKVCacheParams)
    full, states = params["full"], params["states"]
    assert isinstance(full, MHAKVCacheParams)
    assert isinstance(states, RecurrentKVCacheParams)
    assert (full.dtype, full.n_kv_heads, full.page_size) == ("float8_e4m3fn", 1, 64)
    assert {state.dtype for state in states.states} == {"float32"}
    assert (params.layout, params.window_size_shares) == ("paged", (0.25, 0.75))


def test_groups_that_were_made_by_hand_become_one_cache_as_configured() -> None:
    config = KVCacheConfig(kv_cache_page_size=16, layout="paged", window_size_shares=[0.2, 0.8])
    groups = {
        "full": config.to_params(**SHAPE),
        "sliding": config.to_params(kind=SlidingWindow(64), **SHAPE),
    }
    params = config.to_multi_params(groups)
    assert params == MultiKVCacheParams(groups, layout="paged", window_size_shares=[0.2, 0.8])
    assert params.by_window == ("sliding", "full")


def test_shares_that_are_not_one_for_each_group_are_refused_with_the_groups() -> None:
    config = KVCacheConfig(window_size_shares=[0.2, 0.3, 0.5])
    groups = {"full": config.to_params(**SHAPE), "sliding": config.to_params(kind=SlidingWindow(64), **SHAPE)}
    with pytest.raises(
        ValueError,
        match=r"one for each of the groups 'sliding' \(sliding_window\(64\)\), 'full' \(full\)",
    ):
        config.to_multi_params(groups)


# Checks of parameters (CFG-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_parallel_degree": 2}, "data_parallel_degree=2: must be 1"),
        ({"devices": ["cpu", "cpu"]}, "devices=.*: must name one device"),
        ({"page_size": 0}, "page_size=0: must be a whole number from 1"),
        ({"kv_hash_seed": "abc"}, "kv_hash_seed=<3 characters>: must be 64 hexadecimal digits"),
        (
            {"dtype": "int8", "kvcache_quant_config": KVCacheQuantizationConfig("float32", 48)},
            "quantization_granularity=48: must divide the 128 values of a head",
        ),
    ],
)
def test_parameters_say_which_value_is_not_allowed_and_what_is(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MHAKVCacheParams(**({"dtype": "float32"} | SHAPE | given))


def test_heads_that_do_not_divide_among_shards_are_refused() -> None:
    params = MHAKVCacheParams(dtype="float32", **SHAPE)
    with pytest.raises(ValueError, match="tensor_parallel_degree=3: 8 KV heads do not divide among so many"):
        params.shard(3)


def test_a_window_of_no_token_is_refused_and_one_beyond_all_sequences_reads_all_tokens() -> None:
    with pytest.raises(ValueError, match="window_size=0: must be a whole number from 1"):
        SlidingWindow(0)
    params = MHAKVCacheParams(dtype="float32", **SHAPE, kind=SlidingWindow(512))
    kv = pk.load_kv_manager(params, 2, 512, None, 2**30, allocate_pools=False)
    assert isinstance(kv.params, MHAKVCacheParams)
    assert kv.params.kind == FullAttention()
    assert pk.load_kv_manager(params, 2, 513, None, 2**30, allocate_pools=False).params == params
