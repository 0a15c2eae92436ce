"""Kinds of groups, groups of states, and what both say of growth, chunks, shards (MGR-9, MGR-12, MGR-13)."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVCacheGroupId,
    MHAKVCacheParams,
    MLAKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    Scratch,
    SlidingWindow,
)

SSM = RecurrentState("ssm", (32, 128, 128), "float32")
CONV = RecurrentState("conv", (3, 8192), "bfloat16")


def attention(**changes: Any) -> MHAKVCacheParams:
    given: dict[str, Any] = dict(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=2, page_size=16)
    return MHAKVCacheParams(**(given | changes))


def states(**changes: Any) -> RecurrentKVCacheParams:
    given: dict[str, Any] = dict(states=[SSM], num_layers=2, page_size=16, kind=Recurrent())
    return RecurrentKVCacheParams(**(given | changes))


# Kinds


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (FullAttention(), "full"),
        (SlidingWindow(1024, sink_tokens=4), "sliding_window(1024)"),
        (ChunkedLocal(8192), "chunked_local(8192)"),
        (CrossAttention(), "cross"),
    ],
)
def test_a_group_is_called_by_its_type_and_its_window(kind: Any, said: str) -> None:
    group_id = attention(kind=kind).group_id
    assert str(group_id) == said
    assert group_id == KVCacheGroupId(kind.type, group_id.window_size)


@pytest.mark.parametrize(("kind", "said"), [(Recurrent(64), "recurrent"), (Scratch(), "scratch")])
def test_a_group_of_states_has_no_window(kind: Any, said: str) -> None:
    assert states(kind=kind).group_id == KVCacheGroupId(said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sliding",), r"^type='sliding': must be one of 'full', 'sliding_window', "),
        (("full", 1024), r"^window_size=1024: must be -1, a full group has no window"),
        (("sliding_window",), r"^window_size=-1: must be a whole number from 1"),
    ],
)
def test_a_group_id_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheGroupId(*arguments)


def test_numpy_integers_are_kept_as_plain_ones() -> None:
    window = SlidingWindow(np.int64(1024), sink_tokens=np.uint8(4))  # type: ignore[arg-type]
    assert (type(window.window_size), type(window.sink_tokens)) == (int, int)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), r"^window_size=0: must be a whole number from 1"),
        (lambda: SlidingWindow(8, sink_tokens=-1), r"^sink_tokens=-1: must be a whole number from 0"),
        (lambda: ChunkedLocal(1.0), r"^chunk_size=1.0: must be"),  # type: ignore[arg-type]
        (lambda: Recurrent(0), r"^snapshot_interval=0: must be a whole number from 1"),
        (lambda: Recurrent(save_last_snapshot=1), r"^save_last_snapshot=1: "),  # type: ignore[arg-type]
    ],
)
def test_a_kind_checks_its_numbers(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_attention_layers_are_of_a_kind_that_reads_tokens() -> None:
    with pytest.raises(
        ValueError, match=r"^kind=Recurrent\(.*\): must be a FullAttention, a SlidingWindow, "
    ):
        attention(kind=Recurrent())


def test_states_are_of_a_kind_that_has_them() -> None:
    with pytest.raises(ValueError, match=r"^kind=FullAttention\(\): must be a Recurrent, a Scratch"):
        states(kind=FullAttention())


def test_the_kind_is_part_of_what_makes_parameters_equal() -> None:
    assert attention(kind=SlidingWindow(8)) == attention(kind=SlidingWindow(8))
    assert attention(kind=SlidingWindow(8)) != attention(kind=ChunkedLocal(8))


# Growth


def test_full_attention_keeps_what_a_token_takes() -> None:
    params = attention()
    # 2 layers x key and value x 8 heads x 128 values x 2 bytes
    assert (params.bytes_per_token, params.bytes_per_token_kept) == (8192, 8192)


@pytest.mark.parametrize("kind", [SlidingWindow(64), ChunkedLocal(64), CrossAttention()])
def test_a_group_that_gives_pages_back_or_never_takes_more_does_not_grow_for_ever(kind: Any) -> None:
    params = attention(kind=kind)
    assert (params.bytes_per_token, params.bytes_per_token_kept) == (8192, 0)


# States


def test_a_page_of_states_holds_those_of_all_layers() -> None:
    # Gated linear attention in 36 layers: 32 x 128 x 128 x 4 + 3 x 8192 x 2 = 2,097,152 + 49,152 bytes each
    params = states(states=[SSM, CONV], num_layers=36, page_size=128, kind=Recurrent(1024))
    assert params.bytes_per_page == 36 * 2_146_304 == 77_266_944
    assert [(region.name, region.shape, region.offset) for region in params.page_layout.regions] == [
        ("ssm", (36, 32, 128, 128), 0),
        ("conv", (36, 3, 8192), 75_497_472),
    ]


def test_states_take_as_much_in_pages_of_any_size_and_nothing_for_a_token() -> None:
    params = states(page_size=512)
    assert (params.bytes_per_page, params.bytes_per_token, params.bytes_per_token_kept) == (4_194_304, 0, 0)


def test_snapshots_lie_at_page_boundaries() -> None:
    assert states(kind=Recurrent(48)).kind == Recurrent(48)
    with pytest.raises(ValueError, match=r"^kind.snapshot_interval=40: must be a multiple of page_size=16"):
        states(kind=Recurrent(40))


def test_a_copy_with_other_pages_checks_its_snapshots_again() -> None:
    with pytest.raises(ValueError, match="must be a multiple of page_size=32"):
        dataclasses.replace(states(kind=Recurrent(48)), page_size=32)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (states(kind=Recurrent(64)), 64),
        (states(kind=Recurrent()), 0),
        (states(kind=Recurrent(64), enable_prefix_caching=False), 0),
        (states(kind=Scratch()), 0),
        (attention(), 0),
    ],
)
def test_chunks_end_where_snapshots_are_taken(params: Any, tokens: int) -> None:
    assert params.chunk_alignment_tokens == tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": []}, r"^states=\[\]: must be a list of RecurrentState, of one at least"),
        ({"states": SSM}, r"^states=RecurrentState.*: must be a list of RecurrentState"),
        ({"states": [SSM, "conv"]}, r"^states=.*: must be a list of RecurrentState and of nothing else"),
        ({"states": [SSM, SSM]}, r"^states=.*: must have names that differ"),
    ],
)
def test_states_that_are_none_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        states(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", (1,), "float32"), r"^name='': must be a str that is not empty"),
        (("ssm", (), "float32"), r"^shape=\(\): must be a list of whole numbers, of one at least"),
        (("ssm", (4, 0), "float32"), r"^shape=\(4, 0\): must be a whole number from 1"),
        (("ssm", (4,), "float4_e2m1fn"), r"^dtype='float4_e2m1fn': must hold one value an element"),
    ],
)
def test_a_state_that_makes_no_tensor_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecurrentState(*arguments)


def test_parameters_of_states_survive_pickling() -> None:
    params = states(states=[SSM, CONV], kind=Recurrent(64))
    assert pickle.loads(pickle.dumps(params)) == params


# Shards


def test_shards_divide_the_heads() -> None:
    assert attention(n_kv_heads=8).shard(4) == attention(n_kv_heads=2)


def test_shards_divide_the_heads_of_each_layer() -> None:
    assert attention(n_kv_heads=[8, 4]).shard(4) == attention(n_kv_heads=[2, 1])


@pytest.mark.parametrize(("heads", "shards"), [(4, 8), (2, 4)])
def test_with_more_shards_than_heads_each_head_is_stored_twice(heads: int, shards: int) -> None:
    whole = attention(n_kv_heads=heads, allow_kv_head_replication=True)
    one = whole.shard(shards)
    assert one.n_kv_heads == 1
    assert one.bytes_per_token * shards == 2 * whole.bytes_per_token


def test_a_head_is_given_to_several_shards_only_if_that_is_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_degree=8: 4 KV heads .*allow_kv_head_replication"
    ):
        attention(n_kv_heads=4).shard(8)


def test_heads_and_shards_of_which_neither_divides_the_other_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_degree=4: 6 KV heads do not divide among so many$"
    ):
        attention(n_kv_heads=6, allow_kv_head_replication=True).shard(4)


def test_each_shard_of_latents_holds_all_of_them() -> None:
    params = MLAKVCacheParams(
        dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, num_layers=61, num_q_heads=128
    )
    shard = params.shard(8)
    assert (shard.num_q_heads, params.bytes_per_token, shard.bytes_per_token) == (16, 70_272, 70_272)
    assert params.replicated
    assert not attention().replicated


def test_query_heads_that_are_not_given_are_not_divided() -> None:
    params = MLAKVCacheParams(dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, num_layers=61)
    assert params.shard(8) == params


def test_query_heads_have_to_divide() -> None:
    params = MLAKVCacheParams(
        dtype="bfloat16", kv_lora_rank=8, qk_rope_head_dim=0, num_layers=1, num_q_heads=6
    )
    with pytest.raises(ValueError, match=r"^tensor_parallel_degree=4: num_q_heads=6 do not divide"):
        params.shard(4)
