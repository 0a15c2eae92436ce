"""Parameters of caches of several groups: their order, what they have in common, what follows from all."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from pagekeeper.params import (
    CrossAttention,
    KVCacheParams,
    MHAKVCacheParams,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    SlidingWindow,
)

SEED = "0123456789abcdef" * 4


def full(**changes: Any) -> MHAKVCacheParams:
    given: dict[str, Any] = dict(dtype="bfloat16", n_kv_heads=8, head_dim=64, num_layers=18)
    return MHAKVCacheParams(**(given | changes))


def sliding(**changes: Any) -> MHAKVCacheParams:
    return full(kind=SlidingWindow(128), **changes)


def states(interval: int | None = 256, **changes: Any) -> RecurrentKVCacheParams:
    state = RecurrentState("ssm", (4, 4), "float32")
    return RecurrentKVCacheParams(states=[state], num_layers=2, kind=Recurrent(interval), **changes)


def test_groups_keep_their_order_and_are_found_by_name() -> None:
    params = MultiKVCacheParams({"sliding": sliding(), "full": full()})
    assert list(params) == ["sliding", "full"]
    assert (params["full"], len(params), "draft" in params) == (full(), 2, False)
    with pytest.raises(KeyError, match="draft"):
        params["draft"]


def test_groups_may_be_given_as_pairs() -> None:
    groups: dict[str, KVCacheParams] = {"full": full(), "sliding": sliding()}
    assert MultiKVCacheParams(list(groups.items())) == MultiKVCacheParams(groups)


def test_the_order_of_groups_is_part_of_what_makes_parameters_equal() -> None:
    one, other = {"a": full(), "b": sliding()}, {"b": sliding(), "a": full()}
    assert MultiKVCacheParams(one) != MultiKVCacheParams(other)
    assert hash(MultiKVCacheParams(one)) == hash(MultiKVCacheParams(copy.copy(one)))


def test_what_all_groups_have_is_asked_for_at_the_cache() -> None:
    params = MultiKVCacheParams({"full": full(page_size=32), "sliding": sliding(page_size=32)})
    assert (params.page_size, params.devices, params.eviction_policy) == (32, ("cpu",), "priority_lru")


def test_what_is_given_beside_the_groups_holds_for_all_of_them() -> None:
    params = MultiKVCacheParams({"full": full(), "sliding": sliding(page_size=16)}, page_size=64)
    assert [group.page_size for group in (params, *params.values())] == [64, 64, 64]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 64),
        ("devices", ("cuda:1",)),
        ("enable_prefix_caching", False),
        ("kv_hash_algo", "sha256"),
        ("on_duplicate", "private"),
        ("eviction_policy", "priority_slru"),
        ("default_retention_priority", 80),
        ("event_buffer_max_size", 10),
        ("write_policy", "on_evict"),
    ],
)
def test_groups_that_differ_where_they_may_not_are_named_with_the_field(field: str, value: Any) -> None:
    groups = {"full": full(), "sliding": sliding(**{field: value})}
    with pytest.raises(ValueError, match=rf"^groups\['sliding'\]\.{field}=.*must be as in groups\['full'\]"):
        MultiKVCacheParams(groups)


def test_seeds_that_differ_are_not_told() -> None:
    with pytest.raises(ValueError, match=r"^groups\['b'\]\.kv_hash_seed=") as refusal:
        MultiKVCacheParams({"a": full(), "b": full(kv_hash_seed=SEED)})
    assert SEED not in str(refusal.value)


def test_a_common_value_that_a_group_refuses_is_named_with_the_group() -> None:
    groups: dict[str, KVCacheParams] = {"full": full(), "states": states(256)}
    with pytest.raises(ValueError, match=r"^groups\['states'\]: kind.snapshot_interval=256: .*page_size=512"):
        MultiKVCacheParams(groups, page_size=512)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "^groups={}: must be a mapping of names to KVCacheParams, of one at least"),
        (None, "^groups=None: must be a mapping"),
        ({"": full()}, "^groups: name '' must be a str that is not empty"),
        ({1: full()}, "^groups: name 1 must be a str"),
        ({"full": "full"}, r"^groups\['full'\]: got str, must be KVCacheParams"),
        ([("full", full()), ("full", sliding())], r"^groups\['full'\]: given twice, names must differ"),
        ([full()], "^groups: name MHAKVCacheParams.* must be a str"),
    ],
)
def test_groups_that_are_none_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiKVCacheParams(groups)


def test_an_unknown_argument_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="num_layers"):
        MultiKVCacheParams({"full": full()}, num_layers=2)  # type: ignore[call-arg]


def test_the_memory_of_groups_is_laid_out_as_fits_unless_it_is_said() -> None:
    assert MultiKVCacheParams({"full": full()}).layout == "auto"
    assert MultiKVCacheParams({"full": full()}, layout="paged").layout == "paged"
    with pytest.raises(ValueError, match=r"^layout='slab': must be one of 'auto', 'jenga', 'paged'"):
        MultiKVCacheParams({"full": full()}, layout="slab")  # type: ignore[arg-type]


def test_a_token_takes_bytes_in_every_group_and_keeps_those_of_full_attention() -> None:
    params = MultiKVCacheParams({"full": full(), "sliding": sliding()})
    # 18 layers of each: key and value x 8 heads x 64 values x 2 bytes = 2,048 bytes a layer
    assert (params.bytes_per_token, params.bytes_per_token_kept) == (73_728, 36_864)


def test_states_and_an_encoders_kv_do_not_grow_with_a_request() -> None:
    groups = {"full": full(), "states": states(), "cross": full(kind=CrossAttention())}
    params = MultiKVCacheParams(groups)
    assert (params.bytes_per_token, params.bytes_per_token_kept) == (36_864, 36_864)


@pytest.mark.parametrize(("intervals", "tokens"), [((256, 384), 768), ((256, None), 0), ((None, None), 0)])
def test_chunks_end_where_all_groups_take_snapshots(intervals: Any, tokens: int) -> None:
    groups = {"full": full(), "a": states(intervals[0]), "b": states(intervals[1])}
    assert MultiKVCacheParams(groups).chunk_alignment_tokens == tokens


def test_a_changed_copy_changes_all_groups() -> None:
    params = MultiKVCacheParams({"full": full(), "sliding": sliding()})
    changed = dataclasses.replace(params, page_size=32)
    assert [group.page_size for group in (changed, *changed.values())] == [32, 32, 32]
    assert params.page_size == 128


def test_parameters_survive_pickling() -> None:
    params = MultiKVCacheParams({"full": full(), "states": states()}, layout="jenga", kv_hash_seed=SEED)
    assert pickle.loads(pickle.dumps(params)) == params
