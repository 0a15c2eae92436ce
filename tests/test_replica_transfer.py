"""Which shard of one cache reads which bytes of which shard of another, where both divide heads otherwise."""

from collections import Counter
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagekeeper.errors import TransferMismatchError
from pagekeeper.params import (
    IndexerKCache,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    SlidingWindow,
)
from pagekeeper.replica_transfer import GroupShards, HeadShards, PageCopy, plan_copies, plan_reads

SHAPE: dict[str, Any] = dict(dtype="bfloat16", n_kv_heads=4, head_dim=8, num_layers=2, page_size=4)
LATENTS = MLAKVCacheParams(dtype="bfloat16", kv_lora_rank=6, qk_rope_head_dim=2, num_layers=3, page_size=4)
STATES = RecurrentKVCacheParams(
    states=[RecurrentState("conv", (6, 3), "bfloat16"), RecurrentState("ssm", (2, 4), "float32")],
    num_layers=2,
    kind=Recurrent(),
)


def attention(**given: Any) -> MHAKVCacheParams:
    return MHAKVCacheParams(**(SHAPE | {"allow_kv_head_replication": True} | given))


def shards(params: MHAKVCacheParams | MLAKVCacheParams, degree: int) -> GroupShards:
    return GroupShards.of(params.shard(degree), degree, whole=params)


def sources(heads: int, source: int, destination: int, turn: int = 0) -> list[list[int]]:
    """Of which rank each destination reads, in the order of its heads."""
    plan = plan_reads(HeadShards(heads, source), HeadShards(heads, destination), turn)
    return [[read.source_rank for read in reads] for reads in plan]


# Heads (case 134)


@pytest.mark.parametrize(
    ("heads", "degree", "of_ranks"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 8, [[0]] * 8),  # latents
    ],
)
def test_consecutive_shards_have_consecutive_heads_and_share_one_where_heads_are_few(
    heads: int, degree: int, of_ranks: list[list[int]]
) -> None:
    shards = HeadShards(heads, degree)
    assert [list(shards.heads_of(rank)) for rank in range(degree)] == of_ranks
    assert (shards.heads_per_shard, shards.replicas) == (len(of_ranks[0]), of_ranks.count(of_ranks[0]))


@pytest.mark.parametrize(
    ("heads", "degree", "said"),
    [
        (6, 4, "tensor_parallel_degree=4: 6 KV heads do not divide among so many"),
        (4, 6, "tensor_parallel_degree=6: 4 KV heads do not divide among so many"),
        (0, 1, "heads=0: must be a whole number from 1"),
        (1, 2**16 + 1, "tensor_parallel_degree=65537: must be a whole number from 1 to 65536"),
    ],
)
def test_heads_and_shards_of_which_neither_divides_the_other_are_refused(
    heads: int, degree: int, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        HeadShards(heads, degree)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_there_has_no_heads(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank}: must be a whole number from 0 to 7"):
        HeadShards(4, 8).heads_of(rank)


@pytest.mark.parametrize(
    ("heads", "source", "destination", "read"),
    [
        (4, 8, 4, [[0], [2], [4], [6]]),  # one of the two that have the head
        (4, 4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),  # both that have it read the one
        (4, 4, 2, [[0, 1], [2, 3]]),  # gathered
        (4, 2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),  # scattered, each head to two
        (4, 8, 2, [[0, 2], [4, 6]]),
        (2, 4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),  # two readers for each of two owners
        (6, 3, 2, [[0, 1], [1, 2]]),  # the middle shard is divided between both
        (1, 8, 2, [[0], [4]]),  # latents: any shard would do, but not the same one
        (1, 2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (1, 3, 2, [[0], [1]]),
    ],
)
def test_each_head_is_read_from_one_owner(
    heads: int, source: int, destination: int, read: list[list[int]]
) -> None:
    assert sources(heads, source, destination) == read


def test_heads_are_found_by_their_index_in_each_shard() -> None:
    # Of 6 heads three shards have two each, two shards three each: 0 1 | 2 3 | 4 5 and 0 1 2 | 3 4 5.
    first, second = plan_reads(HeadShards(6, 3), HeadShards(6, 2))
    told = [(read.source_rank, read.source_heads, read.destination_heads) for read in (*first, *second)]
    assert told == [
        (0, range(2), range(2)),
        (1, range(1), range(2, 3)),
        (1, range(1, 2), range(1)),
        (2, range(2), range(1, 3)),
    ]


@pytest.mark.parametrize(("heads", "degree"), [(4, 2), (4, 4), (4, 8), (1, 8)])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_between_groups_of_one_size_each_shard_reads_the_one_of_its_rank(
    heads: int, degree: int, turn: int
) -> None:
    assert sources(heads, degree, degree, turn) == [[rank] for rank in range(degree)]


def test_in_turn_every_replica_gives_where_there_are_fewer_readers() -> None:
    assert [sources(1, 8, 1, turn) for turn in range(9)] == [[[turn % 8]] for turn in range(9)]
    assert [sources(4, 8, 2, turn) for turn in range(2)] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


COUNTS = [
    (heads, source, destination)
    for heads, source, destination in product(
        (1, 2, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 16, 24), (1, 2, 3, 4, 8, 16)
    )
    if not any(heads % degree and degree % heads for degree in (source, destination))
]


@pytest.mark.parametrize(("heads", "source", "destination"), COUNTS)
def test_every_head_of_every_destination_is_read_once_and_no_source_gives_more_than_one_head_more(
    heads: int, source: int, destination: int
) -> None:
    held, wanted = heads_by_rank(heads, source), heads_by_rank(heads, destination)
    for turn in (0, 3):
        given = Counter(dict.fromkeys(range(source), 0))
        for rank, reads in enumerate(
            plan_reads(HeadShards(heads, source), HeadShards(heads, destination), turn)
        ):
            got = {}
            for read in reads:
                given[read.source_rank] += len(read.source_heads)
                for there, here in zip(read.source_heads, read.destination_heads, strict=True):
                    assert here not in got
                    got[here] = held[read.source_rank][there]
            assert [got[index] for index in range(len(got))] == wanted[rank]
        assert max(given.values()) - min(given.values()) <= 1


def heads_by_rank(heads: int, degree: int) -> list[list[int]]:
    """The heads of each rank, counted out one by one."""
    dealt = [head for head in range(heads) for _ in range(max(1, degree // heads))]
    return [dealt[rank * len(dealt) // degree : (rank + 1) * len(dealt) // degree] for rank in range(degree)]


@pytest.mark.parametrize("turn", [-1, 1.5, True])
def test_a_turn_that_is_no_number_from_0_is_refused(turn: Any) -> None:
    with pytest.raises(ValueError, match=r"turn=.*: must be a whole number from 0"):
        plan_reads(HeadShards(1, 2), HeadShards(1, 1), turn)


def test_shards_of_other_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        TransferMismatchError, match=r"^heads: 4 of the source, 8 of the destination"
    ) as refused:
        plan_reads(HeadShards(4, 2), HeadShards(8, 2))
    assert (refused.value.field, refused.value.values) == ("heads", (4, 8))


# Bytes


def test_a_shard_of_one_head_reads_its_runs_from_the_page_of_a_shard_of_two() -> None:
    # A token's head is 8 values x 2 bytes. A page has 2 layers x (key, value) x 4 tokens of such.
    copies = plan_copies(shards(attention(), 2), shards(attention(), 4))
    places = dict(source_region=0, destination_region=0, destination_offset=0)
    whole = dict(source_stride=32, destination_stride=16, run_bytes=16, runs=16)
    assert copies == tuple(
        (PageCopy(source_rank=rank, source_offset=offset, **places, **whole),)
        for rank, offset in ((0, 0), (0, 16), (1, 0), (1, 16))
    )
    assert copies[0][0].nbytes == attention().shard(4).bytes_per_page == 256


def test_shards_that_hold_the_same_are_copied_in_one_run() -> None:
    for source, destination in ((4, 4), (8, 4), (4, 8)):
        for copies in plan_copies(shards(attention(), source), shards(attention(), destination)):
            assert [(copy.runs, copy.run_bytes) for copy in copies] == [(1, 256)]


def test_latents_are_read_whole_from_one_of_the_shards() -> None:
    copies = plan_copies(shards(LATENTS, 8), shards(LATENTS, 2))
    assert [[(copy.source_rank, copy.runs, copy.run_bytes) for copy in each] for each in copies] == [
        [(0, 1, LATENTS.bytes_per_page)],
        [(4, 1, LATENTS.bytes_per_page)],
    ]


def test_states_are_read_between_shards_of_as_many() -> None:
    there = GroupShards.of(STATES, 4)
    # 2 layers x 6 x 3 values x 2 bytes, 2 layers x 2 x 4 values x 4 bytes
    expected = [[(rank, 0, 72), (rank, 1, 64)] for rank in range(4)]
    copies = plan_copies(there, there)
    assert [
        [(copy.source_rank, copy.source_region, copy.nbytes) for copy in each] for each in copies
    ] == expected


CACHES: dict[str, MHAKVCacheParams | MLAKVCacheParams] = {
    "one size": attention(),
    "fp8 and scales": attention(
        dtype="float8_e4m3fn", kvcache_quant_config=KVCacheQuantizationConfig("float32", 4)
    ),
    "packed": attention(
        dtype="float4_e2m1fn", head_dim=16, kvcache_quant_config=KVCacheQuantizationConfig.nvfp4()
    ),
    "an indexer": attention(indexer=IndexerKCache(head_dim=6, layer_mask=[False, True])),
    # On eight shards all layers have one head and lie in one region, on two in two regions.
    "layers of 8, 2 and 8 heads": attention(n_kv_heads=[8, 2, 8], num_layers=3),
    "layers of many sorts": attention(
        n_kv_heads=[4, 4, 8, 8],
        head_dim=[8, 16, 8, 8],
        dtype=["float32", "bfloat16", "int8", "int8"],
        num_layers=4,
    ),
    "one head": attention(n_kv_heads=1),
    "a window": attention(kind=SlidingWindow(64)),
    "latents": LATENTS,
    "latents and an indexer": MLAKVCacheParams(
        dtype="float8_e4m3fn",
        kv_lora_rank=6,
        qk_rope_head_dim=2,
        num_layers=3,
        page_size=3,
        indexer=IndexerKCache(head_dim=8, dtype="float8_e4m3fn", quantization_granularity=8),
    ),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("destination", [1, 2, 4, 8])
def test_pages_that_are_copied_as_planned_hold_what_they_would_have_been_given(
    cache: str, source: int, destination: int, first_seed: int
) -> None:
    params = CACHES[cache]
    model = whole_page(params, Random(f"{first_seed} {cache} {source} {destination}"))
    pages = [page(params, source, rank, model) for rank in range(source)]
    given = Counter(dict.fromkeys(range(source), 0))
    for rank, copies in enumerate(plan_copies(shards(params, source), shards(params, destination), turn=1)):
        expected = page(params, destination, rank, model)
        got = [np.zeros_like(region) for region in expected]
        written = [np.zeros(region.shape, int) for region in expected]
        for copy in copies:
            given[copy.source_rank] += copy.nbytes
            for run in range(copy.runs):
                there = copy.source_offset + run * copy.source_stride
                here = copy.destination_offset + run * copy.destination_stride
                read = pages[copy.source_rank][copy.source_region][there : there + copy.run_bytes]
                got[copy.destination_region][here : here + copy.run_bytes] = read
                written[copy.destination_region][here : here + copy.run_bytes] += 1
        for region, bytes_of, times in zip(expected, got, written, strict=True):
            assert (times == 1).all()
            assert bytes_of.tobytes() == region.tobytes()
    assert sum(given.values()) == destination * sum(
        region.nbytes for region in page(params, destination, 0, model)
    )


def whole_page(params: KVCacheParams, random: Random) -> dict[tuple[str, int], NDArray[np.uint8]]:
    """Bytes of one page of the whole model by name and layer: [..., tokens, heads, bytes of one]."""
    page = {}
    for region in params.page_layout.regions:
        for layer in region.layers:
            *axes, width = region.shape[1:]
            if region.name == "indexer_k":
                axes.append(1)
            shape = (*axes, width * region.dtype.size_in_bytes)
            values = np.frombuffer(random.randbytes(int(np.prod(shape))), np.uint8)
            page[region.name, layer] = values.reshape(shape)
    return page


def page(
    params: MHAKVCacheParams | MLAKVCacheParams,
    degree: int,
    rank: int,
    model: dict[tuple[str, int], NDArray[np.uint8]],
) -> list[NDArray[np.uint8]]:
    """The same page on one shard: the bytes of each of its regions."""
    held = []
    for region in params.shard(degree).page_layout.regions:
        of_layers = []
        for layer in region.layers:
            values = model[region.name, layer]
            of_layers.append(values[..., heads_by_rank(values.shape[-2], degree)[rank], :].ravel())
        held.append(np.concatenate(of_layers))
        assert held[-1].nbytes == region.nbytes
    return held


# What does not fit


@pytest.mark.parametrize(
    ("other", "field", "values"),
    [
        (dict(n_kv_heads=8), "layers[0].kv_heads", (4, 8)),
        (dict(n_kv_heads=[4, 2]), "layers[1].kv_heads", (4, 2)),
        (dict(head_dim=16), "layers[0].kv.head_size", (8, 16)),
        (dict(dtype="float16"), "layers[0].kv.dtype", ("bfloat16", "float16")),
        (dict(page_size=16), "page_size", (4, 16)),
        (dict(num_layers=3), "num_layers", (2, 3)),
        (dict(kind=SlidingWindow(8)), "kind", ("full", "sliding_window(8)")),
        (dict(indexer=IndexerKCache()), "layers[0].regions", (["kv"], ["indexer_k", "kv"])),
    ],
)
def test_groups_that_differ_in_more_than_their_shards_are_refused_with_both_values(
    other: dict[str, Any], field: str, values: tuple[object, object]
) -> None:
    with pytest.raises(TransferMismatchError) as refused:
        plan_copies(shards(attention(), 2), shards(attention(**other), 1))
    assert (refused.value.field, refused.value.group, refused.value.values) == (field, "full", values)
    there, here = values
    said = (
        f"groups['full'].{field}: {there!r} of the source, {here!r} of the destination; must be alike on both"
    )
    assert str(refused.value).startswith(said)


def test_latents_are_not_taken_for_keys_and_values_of_one_head() -> None:
    with pytest.raises(
        TransferMismatchError, match=r"replicated: False of the source, True of the destination"
    ):
        plan_copies(shards(attention(n_kv_heads=1, num_layers=3), 1), shards(LATENTS, 1))


def test_states_are_not_read_by_more_or_fewer_shards() -> None:
    said = r"tensor_parallel_degree: 1 of the source, 4 of the .*; states are read by shards of as many"
    with pytest.raises(TransferMismatchError, match=said):
        plan_copies(GroupShards.of(STATES, 1), GroupShards.of(STATES, 4))


def test_states_of_other_shapes_are_refused() -> None:
    other = RecurrentKVCacheParams(
        states=[STATES.states[0], RecurrentState("ssm", (2, 8), "float32")], num_layers=2, kind=Recurrent()
    )
    with pytest.raises(TransferMismatchError) as refused:
        plan_copies(GroupShards.of(STATES, 2), GroupShards.of(other, 2))
    assert (refused.value.field, refused.value.values) == ("layers[0].ssm.shape", ([2, 4], [2, 8]))


# From parameters


def test_a_shards_own_parameters_say_how_many_heads_the_model_has_where_none_is_there_twice() -> None:
    assert GroupShards.of(attention().shard(2), 2) == shards(attention(), 2)


def test_where_heads_are_there_twice_the_whole_says_how_many_there_are() -> None:
    assert GroupShards.of(attention().shard(8), 8).kv_heads == (8, 8)  # as far as one shard can tell
    assert shards(attention(), 8).kv_heads == (4, 4)
    # To be taken for the heads of eight is found out, unless both sides are: then they hold the same.
    with pytest.raises(TransferMismatchError, match=r"kv_heads: 8 of the source, 4 of the destination"):
        plan_copies(GroupShards.of(attention().shard(8), 8), shards(attention(), 4))


def test_shards_that_are_not_of_the_whole_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'kv' of layer 0: its shape .* does not have the 2 heads of a shard"
    ):
        GroupShards.of(attention().shard(4), 4, whole=attention(n_kv_heads=8))
    with pytest.raises(ValueError, match=r"whole: .* of 3 layers, must be what was divided into .* of 2"):
        GroupShards.of(attention(), 1, whole=attention(num_layers=3))
    with pytest.raises(ValueError, match="tensor_parallel_degree=0: must be a whole number from 1 to 65536"):
        GroupShards.of(attention(), 0)
