"""Configurations of connectors (CFG-2, CONN-5): what they accept and keep, and what they say of the rest."""

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pagekeeper import KVConnectorConfig, KVConnectorType, MHAKVCacheParams

ENDPOINT = "redis://:secret@store:6379"
FULL: dict[str, Any] = {
    "type": "dkv",
    "host_offload_max_gb": 0.5,
    "disk_offload_dir": "/var/cache/kv",
    "disk_offload_max_gb": 100.0,
    "disk_rank": 3,
    "num_disk_workers": 8,
    "fsync": "always",
    "block_store_endpoint": ENDPOINT,
    "num_copy_lanes": 2,
    "host_pin_memory": True,
    "host_numa_node": 1,
}
"""Every field with another value than its default."""


def make(**given: Any) -> KVConnectorConfig:
    return KVConnectorConfig(**given)


def refusals(given: Mapping[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        make(**given)
    return [refusal["msg"] for refusal in refused.value.errors()]


def params(**given: Any) -> MHAKVCacheParams:
    return MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1, **given)


# What is kept


def test_without_arguments_every_field_has_its_default() -> None:
    assert KVConnectorConfig().model_dump() == {
        "type": "null",
        "host_offload_max_gb": None,
        "disk_offload_dir": None,
        "disk_offload_max_gb": None,
        "disk_rank": 0,
        "num_disk_workers": 32,
        "fsync": "batch",
        "block_store_endpoint": None,
        "num_copy_lanes": 1,
        "host_pin_memory": False,
        "host_numa_node": None,
    }


def test_every_field_is_kept_as_it_was_given() -> None:
    assert make(**FULL).model_dump() == FULL


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, KVConnectorType.null),
        ("null", KVConnectorType.null),
        ("rust_tiered", KVConnectorType.rust_tiered),
        (KVConnectorType.rust_tiered, KVConnectorType.rust_tiered),
        (np.str_("rust_tiered"), KVConnectorType.rust_tiered),
    ],
)
def test_a_type_is_a_member_or_its_name_and_none_is_null(given: Any, kept: KVConnectorType) -> None:
    assert make(type=given).type is kept


def test_a_dkv_with_an_endpoint_is_accepted() -> None:
    assert make(type="dkv", block_store_endpoint="ipc:///run/dkv").type is KVConnectorType.dkv


@pytest.mark.parametrize("given", ["tiered", KVConnectorType.tiered])
def test_the_deprecated_name_gives_rust_tiered_and_warns_where_it_was_given(given: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"^type='tiered' .* 'rust_tiered'") as warned:
        config = make(type=given)
    assert config.type is KVConnectorType.rust_tiered
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    "build",
    [
        KVConnectorConfig.of,
        lambda name: KVConnectorConfig.model_validate_json(json.dumps({"type": name})),
        lambda name: params(kv_connector_config=name),
    ],
    ids=["of", "json", "params"],
)
def test_the_warning_leads_to_the_users_line_whichever_way_the_name_goes(
    build: Callable[[str], object],
) -> None:
    with pytest.warns(DeprecationWarning, match="rust_tiered") as warned:
        build("tiered")
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("host_offload_max_gb", math.ulp(0.0)),
        ("disk_offload_max_gb", 0),
        ("num_disk_workers", 1),
        ("disk_rank", 0),
        ("num_copy_lanes", 1),
        ("host_numa_node", 0),
    ],
)
def test_the_least_value_of_a_range_is_accepted(field: str, least: float) -> None:
    assert getattr(make(**{field: least}), field) == least


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("host_offload_max_gb", sys.float_info.max),
        ("disk_offload_max_gb", sys.float_info.max),
        ("num_disk_workers", 2**31 - 1),
        ("disk_rank", 2**31 - 1),
        ("num_copy_lanes", 64),
        ("host_numa_node", 2**31 - 1),
    ],
)
def test_the_greatest_value_of_a_range_is_accepted(field: str, most: float) -> None:
    assert getattr(make(**{field: most}), field) == most


@pytest.mark.parametrize("field", ["host_offload_max_gb", "disk_offload_max_gb"])
@pytest.mark.parametrize("given", [2, np.int32(2), np.uint8(2), np.float16(2), np.float32(2), np.float64(2)])
def test_a_size_is_kept_as_a_float_whatever_number_it_was(field: str, given: Any) -> None:
    kept = getattr(make(**{field: given}), field)
    assert (type(kept), kept) == (float, 2.0)


@pytest.mark.parametrize("field", ["disk_rank", "num_disk_workers", "num_copy_lanes", "host_numa_node"])
def test_numpy_integers_are_kept_as_plain_ones(field: str) -> None:
    kept = getattr(make(**{field: np.uint16(7)}), field)
    assert (type(kept), kept) == (int, 7)


@pytest.mark.parametrize("given", ["kv/blocks", Path("kv/blocks"), PurePosixPath("kv/blocks")])
def test_a_directory_is_kept_as_a_string(given: Any) -> None:
    kept = make(disk_offload_dir=given).disk_offload_dir
    assert (type(kept), kept) == (str, "kv/blocks")


@pytest.mark.parametrize("fsync", ["batch", "none", "always"])
def test_a_way_to_sync_is_one_of_three(fsync: Any) -> None:
    assert make(fsync=fsync).fsync == fsync


def test_fields_that_a_type_has_no_use_for_are_accepted() -> None:
    assert make(**(FULL | {"type": "null"})).block_store_endpoint == ENDPOINT


def test_a_configuration_cannot_be_changed() -> None:
    config = make(type="rust_tiered")
    with pytest.raises(ValidationError, match="frozen"):
        config.num_copy_lanes = 2  # type: ignore[misc]
    assert config.num_copy_lanes == 1


def test_a_refused_change_shows_no_value() -> None:
    config = KVConnectorConfig()
    with pytest.raises(ValidationError, match="frozen") as refused:
        config.block_store_endpoint = "tcp://me:secret@host"  # type: ignore[misc]
    assert "secret" not in str(refused.value)
    with pytest.raises(ValidationError, match="frozen"):
        del config.fsync


def test_the_endpoint_does_not_show_in_the_printed_form() -> None:
    assert "secret" not in repr(make(**FULL)) + str(make(**FULL))


# What is refused

ABOVE_0 = "a finite number of GiB above 0, or None"
FROM_0 = "a finite number of GiB from 0, or None"
WHOLE = "a whole number from 1 to 2**31 - 1"
RANK = "a whole number from 0 to 2**31 - 1"
NODE = "a whole number from 0 to 2**31 - 1, or None"
PATH = "a path (a str that is not empty, an os.PathLike), or None"
NO_NUMBERS: list[object] = [True, np.True_, "3", b"3", [3], 3j]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("type", "ssd", "one of 'null', 'rust_tiered', 'dkv'"),
        ("type", "", "one of 'null', 'rust_tiered', 'dkv'"),
        ("type", 0, "one of 'null', 'rust_tiered', 'dkv'"),
        ("type", ["dkv"], "one of 'null', 'rust_tiered', 'dkv'"),
        *(("host_offload_max_gb", value, ABOVE_0) for value in [0, -0.0, -1, math.nan, math.inf]),
        *(("host_offload_max_gb", value, ABOVE_0) for value in [np.float32("nan"), *NO_NUMBERS]),
        *(("disk_offload_max_gb", value, FROM_0) for value in [-math.ulp(0.0), -1, math.nan, -math.inf]),
        *(("disk_offload_max_gb", value, FROM_0) for value in NO_NUMBERS),
        *(("disk_offload_dir", value, PATH) for value in ["", "kv\0", "\udcff", b"kv", 3, True, ["kv"]]),
        *(("num_disk_workers", value, WHOLE) for value in [0, -1, 2**31, 8.0, None, *NO_NUMBERS]),
        *(("disk_rank", value, RANK) for value in [-1, 2**31, 1.0, None, *NO_NUMBERS]),
        *(("num_copy_lanes", value, "a whole number from 1 to 64") for value in [0, 65, None, *NO_NUMBERS]),
        *(("host_numa_node", value, NODE) for value in [-1, 2**31, 1.0, *NO_NUMBERS]),
        *(("host_pin_memory", value, "True or False") for value in [0, 1, None, "true", np.True_]),
        *(("fsync", value, "one of 'batch', 'none', 'always'") for value in ["never", None, True, ["none"]]),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name_with_what_is(
    field: str, value: object, allowed: str
) -> None:
    assert refusals({field: value}) == [f"{field}={value!r}: must be {allowed}"]


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [("", "<0 characters>"), ("\udcff", "<1 characters>"), (b"tcp://a:1", "<bytes>"), (6379, "<int>")],
)
def test_an_endpoint_that_is_no_address_is_refused_without_showing_it(endpoint: object, told: str) -> None:
    (refusal,) = refusals({"block_store_endpoint": endpoint})
    assert refusal == f"block_store_endpoint={told}: must be an address such as 'tcp://host:port', or None"


def test_a_size_beyond_all_floats_is_refused() -> None:
    (refusal,) = refusals({"host_offload_max_gb": 10**400})
    assert refusal.startswith("host_offload_max_gb=1000")
    assert refusal.endswith(f"...: must be {ABOVE_0}")


def test_a_path_object_of_bytes_is_refused() -> None:
    class BytesPath:
        def __fspath__(self) -> bytes:
            return b"kv"

    (refusal,) = refusals({"disk_offload_dir": BytesPath()})
    assert refusal.endswith(f"must be {PATH}")


def test_a_refusal_is_a_value_error_whose_text_says_all_of_it() -> None:
    with pytest.raises(ValueError, match=r"num_copy_lanes=65: must be a whole number from 1 to 64"):
        make(num_copy_lanes=65)


def test_all_values_that_are_not_allowed_are_named_at_once() -> None:
    said = refusals({"type": "ssd", "num_disk_workers": 0, "fsync": "never", "num_copy_lanes": 1})
    assert [refusal.split("=")[0] for refusal in said] == ["type", "num_disk_workers", "fsync"]


@pytest.mark.parametrize("endpoint", [{}, {"block_store_endpoint": None}])
def test_dkv_without_an_endpoint_is_refused_with_examples(endpoint: dict[str, Any]) -> None:
    assert refusals({"type": "dkv"} | endpoint) == [
        "block_store_endpoint=None: type 'dkv' needs the address of its store, "
        "such as 'tcp://host:port' or 'ipc:///path'"
    ]


@pytest.mark.parametrize("connector", [{}, {"type": "null"}, {"type": "rust_tiered"}, {"type": "dkv"}])
def test_an_unknown_field_is_refused_with_the_one_that_was_meant(connector: dict[str, Any]) -> None:
    assert refusals(connector | {"host_offload_max_gib": 8}) == [
        "host_offload_max_gib: unknown; did you mean host_offload_max_gb?"
    ]


def test_an_unknown_field_that_resembles_none_is_refused_with_all_there_are() -> None:
    assert refusals({"zzz": 1}) == [f"zzz: unknown; the fields are {', '.join(FULL)}"]


def test_several_unknown_fields_are_each_named() -> None:
    said = refusals({"fsink": "batch", "copy_lanes": 2})
    assert said == [
        "fsink: unknown; did you mean fsync?",
        "copy_lanes: unknown; did you mean num_copy_lanes?",
    ]


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\ud800", "a b", ""])
def test_a_name_that_is_no_word_is_shown_as_python_writes_it_and_short(name: str) -> None:
    (refusal,) = refusals({name: 1})
    assert refusal.startswith(f"{name!r:.20}")
    assert len(refusal) < 500


def test_a_refusal_never_shows_the_endpoint() -> None:
    with pytest.raises(ValidationError) as refused:
        make(block_store_endpoint=ENDPOINT, endpoint=ENDPOINT, num_disk_worker=3)
    assert "secret" not in str(refused.value)


# What a configuration is made of


@pytest.mark.parametrize(
    "given",
    [
        KVConnectorConfig(type="rust_tiered"),
        {"type": "rust_tiered"},
        MappingProxyType({"type": KVConnectorType.rust_tiered}),
        "rust_tiered",
        KVConnectorType.rust_tiered,
    ],
)
def test_a_configuration_is_meant_by_itself_a_mapping_or_the_name_of_a_type(given: Any) -> None:
    assert KVConnectorConfig.of(given) == KVConnectorConfig(type="rust_tiered")


def test_a_configuration_is_itself_and_no_copy() -> None:
    config = make(**FULL)
    assert KVConnectorConfig.of(config) is config


@pytest.mark.parametrize("given", [None, {}, "null", {"type": None}])
def test_nothing_means_no_connector(given: Any) -> None:
    assert KVConnectorConfig.of(given) == KVConnectorConfig()


@pytest.mark.parametrize(("given", "kind"), [(3, "int"), ([("type", "dkv")], "list"), (b"dkv", "bytes")])
def test_anything_else_is_a_type_error_that_says_what_is_accepted(given: Any, kind: str) -> None:
    with pytest.raises(
        TypeError, match=f"a KVConnectorConfig, a mapping of its fields, a type's name or None; got {kind}$"
    ):
        KVConnectorConfig.of(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ssd", "type='ssd': must be one of"),
        ("dkv", "block_store_endpoint=None: type 'dkv' needs"),
        ({"Type": "dkv"}, r"Type: unknown; did you mean type\?"),
        ({3: "dkv"}, "3: unknown; the fields are type, "),
    ],
)
def test_what_makes_no_configuration_is_refused_with_the_reason(given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        KVConnectorConfig.of(given)


# Copies and comparisons


def test_equal_configurations_in_other_spellings_are_equal_and_hash_alike() -> None:
    plain = make(type="null", host_offload_max_gb=2.0, disk_offload_dir="kv", num_disk_workers=8)
    other = make(host_offload_max_gb=2, disk_offload_dir=Path("kv"), num_disk_workers=np.int64(8))
    assert plain == other
    assert hash(plain) == hash(other)


@pytest.mark.parametrize("field", FULL)
def test_configurations_that_differ_in_one_field_are_not_equal(field: str) -> None:
    default = KVConnectorConfig.model_fields[field].default
    another = {"type": "rust_tiered", "block_store_endpoint": "tcp://other:1"}.get(field, default)
    assert make(**(FULL | {field: another})) != make(**FULL)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        KVConnectorConfig.model_copy,
        lambda config: config.model_copy(deep=True),
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: KVConnectorConfig.model_validate_json(config.model_dump_json()),
        lambda config: KVConnectorConfig(**config.model_dump()),
        lambda config: KVConnectorConfig.of(config.model_dump(mode="json")),
    ],
    ids=["copy", "deepcopy", "model_copy", "deep", "pickle", "json", "dump", "json dump"],
)
@pytest.mark.parametrize("given", [{}, FULL], ids=["defaults", "full"])
def test_a_copy_is_equal_and_hashes_alike(
    copied: Callable[[KVConnectorConfig], KVConnectorConfig], given: dict[str, Any]
) -> None:
    config = make(**given)
    assert copied(config) == config
    assert hash(copied(config)) == hash(config)


def test_json_has_plain_names_and_numbers() -> None:
    assert json.loads(make(**FULL).model_dump_json()) == FULL


def test_json_may_say_null_for_the_type() -> None:
    assert KVConnectorConfig.model_validate_json('{"type": null}').type is KVConnectorType.null


def test_json_is_as_strict_as_python() -> None:
    with pytest.raises(ValidationError, match=r"num_copy_lanes='3': must be a whole number"):
        KVConnectorConfig.model_validate_json('{"num_copy_lanes": "3"}')


def test_a_changed_copy_keeps_the_rest() -> None:
    changed = make(**FULL).model_copy(update={"num_copy_lanes": 3})
    assert changed.model_dump() == FULL | {"num_copy_lanes": 3}


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"num_copy_lanes": 0}, "num_copy_lanes=0: must be"),
        ({"lanes": 1}, "lanes: unknown; "),
        ({"block_store_endpoint": None}, "block_store_endpoint=None: type 'dkv' needs"),
    ],
)
def test_a_changed_copy_is_checked_again(update: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make(**FULL).model_copy(update=update)


def test_a_copy_tells_apart_what_was_given_and_what_is_a_default() -> None:
    config = make(type="rust_tiered", num_copy_lanes=1)
    assert config.model_copy(update={"fsync": "none"}).model_dump(exclude_unset=True) == {
        "type": "rust_tiered",
        "num_copy_lanes": 1,
        "fsync": "none",
    }


# In the parameters of a cache


@pytest.mark.parametrize(
    "given", [KVConnectorConfig(type="rust_tiered"), {"type": "rust_tiered"}, "rust_tiered"]
)
def test_parameters_keep_a_configuration_however_it_was_given(given: Any) -> None:
    assert params(kv_connector_config=given).kv_connector_config == KVConnectorConfig(type="rust_tiered")


def test_parameters_without_a_connector_have_none() -> None:
    assert params(kv_connector_config=None).kv_connector_config is None


def test_parameters_are_equal_and_hash_alike_with_equal_configurations() -> None:
    plain = params(kv_connector_config=FULL)
    other = params(kv_connector_config=make(**FULL))
    assert plain == other
    assert hash(plain) == hash(other)
    assert plain != params(kv_connector_config=FULL | {"num_copy_lanes": 3})


def test_parameters_with_a_configuration_survive_pickling() -> None:
    made = params(kv_connector_config=FULL)
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("given", ["rust_tiered", {"type": "rust_tiered", "host_offload_max_gb": 1}])
def test_rust_tiered_needs_prefix_caching(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^enable_prefix_caching=False: kv_connector_config\.type='rust_tiered' needs it"
    ):
        params(kv_connector_config=given, enable_prefix_caching=False)


@pytest.mark.parametrize("given", [None, "null", {"host_offload_max_gb": 1}])
def test_no_connector_needs_no_prefix_caching(given: Any) -> None:
    assert not params(kv_connector_config=given, enable_prefix_caching=False).enable_prefix_caching


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "kv_connector_config=3: a connector's configuration is "),
        ("ssd", "kv_connector_config.type='ssd': must be one of 'null', 'rust_tiered', 'dkv'"),
        ({"host_offload_max_gb": 0}, f"kv_connector_config.host_offload_max_gb=0: must be {ABOVE_0}"),
        ({"fsink": 1}, "kv_connector_config.fsink: unknown; did you mean fsync?"),
        (
            {"num_copy_lanes": 0, "fsync": 1},
            "kv_connector_config.fsync=1: must be one of 'batch', 'none', 'always'; "
            "kv_connector_config.num_copy_lanes=0: must be a whole number from 1 to 64",
        ),
    ],
)
def test_parameters_refuse_what_makes_no_configuration_and_name_the_field(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_config") as refused:
        params(kv_connector_config=given)
    assert str(refused.value).startswith(said)
    assert not isinstance(refused.value, ValidationError)


def test_pydantic_is_loaded_by_a_configuration_and_by_nothing_before() -> None:
    program = """
import sys
import pagekeeper as pk
print("pydantic" in sys.modules)
params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1)
pk.PagedKVCacheManager(params, total_num_pages=1, max_batch_size=1, allocate_pools=False)
print("pydantic" in sys.modules)
pk.KVConnectorConfig()
print("pydantic" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True)
    assert printed.stdout.split() == ["False", "False", "True"]
