"""What two sides of a transfer tell each other before the first page, and what they refuse of each other."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pagekeeper.errors import TransferMetadataError, TransferMismatchError
from pagekeeper.models import HuggingFaceModel
from pagekeeper.params import (
    IndexerKCache,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    SlidingWindow,
)
from pagekeeper.planning import plan_cache
from pagekeeper.replica_transfer import plan_copies
from pagekeeper.replica_transfer.metadata import MAX_BYTES, VERSION, KVTransferEngineMetadata

FIXTURES = Path(__file__).parent / "fixtures"

GQA = MHAKVCacheParams(
    dtype="bfloat16",
    n_kv_heads=4,
    head_dim=8,
    num_layers=2,
    page_size=16,
    allow_kv_head_replication=True,
)
LATENTS = MLAKVCacheParams(dtype="bfloat16", kv_lora_rank=6, qk_rope_head_dim=2, num_layers=3, page_size=16)


def told(name: str, params: Any, degree: int = 1, pages: Any = 100) -> KVTransferEngineMetadata:
    """What one side tells whose shards divide a group."""
    return KVTransferEngineMetadata.of(
        name, params.shard(degree), pages, tensor_parallel_degree=degree, whole=params
    )


# What is told


def test_a_side_tells_pages_and_bytes_of_each_group_and_which_are_replicated() -> None:
    params = MultiKVCacheParams({"target": LATENTS, "draft": GQA}, layout="paged")
    side = KVTransferEngineMetadata.of("prefill", params, {"target": 10, "draft": 30})
    # 3 layers x 16 tokens x 8 values x 2 bytes; 2 layers x (key, value) x 16 tokens x 4 heads x 8 values x 2
    assert side.bytes_per_group == (768, 4096)
    assert side.bytes_per_page == 4864
    assert side.num_pages_per_group == (10, 30)
    assert side.replicated_per_group == (True, False)
    assert side.version == VERSION


def test_a_side_tells_what_was_planned() -> None:
    windows = MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=4, head_dim=8, num_layers=2, page_size=16, kind=SlidingWindow(64)
    )
    for params in (GQA, MultiKVCacheParams({"full": GQA, "sliding": windows})):
        plan = plan_cache(params, 2**20, 4)
        side = KVTransferEngineMetadata.of("decode", plan.params, plan.num_pages)
        assert {group.name: group.num_pages for group in side.groups} == plan.num_pages
        assert [(group.type, group.window_size) for group in side.groups] == [
            ("full", -1),
            ("sliding_window", 64),
        ][: len(plan.num_pages)]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_side_tells_of_a_models_cache_by_its_configuration(degree: int) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}
    model = HuggingFaceModel.read(config | {"num_key_value_heads": 2, "torch_dtype": "bfloat16"})
    whole, shard = model.to_params(), model.to_params(tensor_parallel_degree=degree)
    side = KVTransferEngineMetadata.of("a", shard, 1, tensor_parallel_degree=degree, whole=whole)
    assert side.shards["full"].kv_heads == (2, 2)
    assert side.bytes_per_page * min(degree, 2) == 2 * 2 * 128 * 2 * 8 * 2  # 2 layers, K and V, tokens, heads
    side.check_peer(KVTransferEngineMetadata.of("b", whole, 1))


def test_what_is_told_arrives_as_it_was() -> None:
    for side in (told("a", GQA, 8), told("b", LATENTS, 2), the_first_version()):
        data = side.to_bytes()
        for form in (data, bytearray(data), memoryview(data)):
            arrived = KVTransferEngineMetadata.from_bytes(form)
            assert arrived == side
            assert arrived.shards.keys() == side.shards.keys()


def test_what_arrives_is_enough_to_plan_copies() -> None:
    source, destination = told("prefill", GQA, 4), told("decode", GQA, 2)
    there = KVTransferEngineMetadata.from_bytes(source.to_bytes())
    destination.check_peer(there)
    copies = plan_copies(there.shards["full"], destination.shards["full"])
    assert copies == plan_copies(source.shards["full"], destination.shards["full"])
    assert [[copy.source_rank for copy in each] for each in copies] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(name=""), "name='': must be a str that is not empty"),
        (dict(name=7), "name=7: must be a str"),
        (dict(num_pages=0), "num_pages of 'full'=0: must be a whole number from 1"),
        (dict(num_pages={"draft": 1}), r"num_pages: of the groups \['draft'\], must be of 'full'"),
        (dict(tensor_parallel_degree=0), "tensor_parallel_degree=0: must be a whole number from 1"),
        (dict(whole=MultiKVCacheParams({"a": GQA})), r"whole: of the groups \['a'\], must be of 'full'"),
        (
            dict(params=MultiKVCacheParams({"a": GQA, "b": GQA})),
            "num_pages=100: must be a mapping, a number for each group",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"name": "a", "params": GQA, "num_pages": 100} | arguments
    with pytest.raises(ValueError, match=said):
        KVTransferEngineMetadata.of(**given)


def test_parameters_of_no_cache_are_refused() -> None:
    with pytest.raises(TypeError, match="params: got dict, must be a KVCacheParams or MultiKVCacheParams"):
        KVTransferEngineMetadata.of("a", {}, 1)  # type: ignore[arg-type]


# Whether two sides fit


def test_sides_may_differ_in_pages_and_in_how_many_shards_divide_the_heads() -> None:
    sides = [told("a", GQA, degree, pages) for degree, pages in ((1, 5), (2, 50), (4, 500), (8, 5000))]
    for one in sides:
        for other in sides:
            one.check_peer(other)
    told("a", LATENTS, 8).check_peer(told("b", LATENTS, 2))


@pytest.mark.parametrize(
    ("other", "field", "values"),
    [
        (dict(page_size=32), "page_size", (16, 32)),
        (dict(n_kv_heads=8), "layers[0].kv_heads", (4, 8)),
        (dict(head_dim=16), "layers[0].kv.head_size", (8, 16)),
        (dict(dtype="float8_e4m3fn"), "layers[0].kv.dtype", ("bfloat16", "float8_e4m3fn")),
        (dict(num_layers=4), "num_layers", (2, 4)),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_field_the_group_and_both_values(
    other: dict[str, Any], field: str, values: tuple[object, object]
) -> None:
    shape: dict[str, Any] = dict(dtype="bfloat16", n_kv_heads=4, head_dim=8, num_layers=2, page_size=16)
    here, there = told("here", GQA, 2), told("there", MHAKVCacheParams(**(shape | other)), 2)
    for one, two, expected in ((here, there, values), (there, here, values[::-1])):
        with pytest.raises(TransferMismatchError) as refused:
            one.check_peer(two)
        error = refused.value
        assert (error.field, error.group, error.values) == (field, "full", expected)
        assert str(error).startswith(
            f"groups['full'].{field}: {expected[0]!r} of {one.name!r}, {expected[1]!r} of {two.name!r}"
        )


def test_the_groups_have_to_be_the_same_in_the_same_order() -> None:
    one = MultiKVCacheParams({"target": GQA, "draft": GQA})
    other = MultiKVCacheParams({"draft": GQA, "target": GQA})
    pages = {"target": 1, "draft": 1}
    with pytest.raises(TransferMismatchError, match=r"^groups: \['target', 'draft'\] of 'a', \['draft', 't"):
        KVTransferEngineMetadata.of("a", one, pages).check_peer(
            KVTransferEngineMetadata.of("b", other, pages)
        )


def test_pages_that_are_padded_otherwise_are_refused_between_shards_of_as_many() -> None:
    mixed = MHAKVCacheParams(
        dtype=["int8", "float32"], n_kv_heads=1, head_dim=8, num_layers=2, page_size=1
    )  # 16 bytes, 64 bytes
    side = KVTransferEngineMetadata.of("a", mixed, 1)
    (group,) = side.groups
    first, second = group.regions
    moved = msgspec.structs.replace(second, offset=32)
    padded = msgspec.structs.replace(group, regions=(first, moved), bytes_per_page=96)
    other = msgspec.structs.replace(side, name="b", groups=(padded,))
    with pytest.raises(TransferMismatchError, match=r"\.bytes_per_page: 80 of 'a', 96 of 'b'"):
        side.check_peer(other)


# Pages whose size depends on the shards (case 146)


def aligned_page_size(state_bytes: int, bytes_per_token: int, alignment: int = 32) -> int:
    """Tokens that take at least as many bytes as a state does, a multiple of `alignment`."""
    tokens = -(-state_bytes // bytes_per_token)
    return -(-tokens // alignment) * alignment


def hybrid(degree: int, page_size: int) -> MultiKVCacheParams:
    """One shard of a layer of 2 heads, 512 bytes a token in all, and of a state of 2,134,016 bytes."""
    full = MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=max(1, 2 // degree), head_dim=64, num_layers=1, page_size=page_size
    )
    state = RecurrentState("ssm", (2_134_016 // 2 // degree,), "bfloat16")
    states = RecurrentKVCacheParams(states=[state], num_layers=1, kind=Recurrent(), page_size=page_size)
    return MultiKVCacheParams({"full": full, "states": states})


def hybrid_side(name: str, degree: int, page_size: int) -> KVTransferEngineMetadata:
    return KVTransferEngineMetadata.of(
        name,
        hybrid(degree, page_size),
        {"full": 8, "states": 8},
        tensor_parallel_degree=degree,
        whole=hybrid(1, page_size),
    )


@pytest.mark.parametrize(
    ("degree", "state_bytes", "bytes_per_token", "page_size"),
    [(1, 2_134_016, 512, 4192), (2, 1_067_008, 256, 4192), (4, 533_504, 256, 2112)],
)
def test_pages_as_large_as_a_state_have_fewer_tokens_where_heads_no_longer_divide(
    degree: int, state_bytes: int, bytes_per_token: int, page_size: int
) -> None:
    assert aligned_page_size(state_bytes, bytes_per_token) == page_size
    shard = hybrid(degree, page_size)
    assert (shard["states"].bytes_per_page, shard["full"].bytes_per_token) == (state_bytes, bytes_per_token)


@pytest.mark.parametrize("degree", [1, 4])
def test_sides_whose_pages_have_different_tokens_find_out_at_the_handshake(degree: int) -> None:
    forced, own = hybrid_side("prefill", degree, 4192), hybrid_side("decode", 4, 2112)
    with pytest.raises(TransferMismatchError) as refused:
        forced.check_peer(KVTransferEngineMetadata.from_bytes(own.to_bytes()))
    assert (refused.value.field, refused.value.group) == ("page_size", "full")
    assert refused.value.values == (4192, 2112)
    assert str(refused.value).startswith(
        "groups['full'].page_size: 4192 of 'prefill', 2112 of 'decode'; must"
    )


def test_one_page_size_that_is_forced_on_both_sides_fits() -> None:
    hybrid_side("prefill", 4, 4192).check_peer(hybrid_side("decode", 4, 4192))
    (one, four) = (
        KVTransferEngineMetadata.of(
            str(degree),
            hybrid(degree, 4192)["full"],
            8,
            tensor_parallel_degree=degree,
            whole=hybrid(1, 4192)["full"],
        )
        for degree in (1, 4)
    )
    one.check_peer(four)
    # Two shards read the first head of each token, two the other: 256 bytes a token and shard.
    copies = plan_copies(one.shards["full"], four.shards["full"])
    assert [[(copy.source_offset, copy.nbytes) for copy in each] for each in copies] == [
        [(0, 4192 * 256)],
        [(0, 4192 * 256)],
        [(128, 4192 * 256)],
        [(128, 4192 * 256)],
    ]


def test_states_that_are_divided_otherwise_are_refused_even_if_the_pages_fit() -> None:
    with pytest.raises(TransferMismatchError) as refused:
        hybrid_side("prefill", 1, 4192).check_peer(hybrid_side("decode", 4, 4192))
    assert (refused.value.group, refused.value.field) == ("states", "tensor_parallel_degree")
    assert refused.value.values == (1, 4)


# The form on the wire


def the_first_version() -> KVTransferEngineMetadata:
    """What `handshake_1.msgpack` says."""
    full = MHAKVCacheParams(
        dtype="float8_e4m3fn",
        n_kv_heads=[1, 2],
        head_dim=[8, 16],
        num_layers=2,
        page_size=16,
        kvcache_quant_config=KVCacheQuantizationConfig("float32", 8),
        indexer=IndexerKCache(head_dim=8, layer_mask=[False, True]),
        allow_kv_head_replication=True,
    )
    sliding = MHAKVCacheParams(
        dtype="float16", n_kv_heads=6, head_dim=4, num_layers=1, page_size=16, kind=SlidingWindow(64, 4)
    )
    states = RecurrentKVCacheParams(
        states=[RecurrentState("conv", (6, 3), "bfloat16"), RecurrentState("ssm", (2, 4), "float32")],
        num_layers=3,
        kind=Recurrent(),
        page_size=16,
    )
    return KVTransferEngineMetadata.of(
        "prefill-0",
        MultiKVCacheParams({"full": full.shard(2), "sliding": sliding.shard(2), "states": states}),
        {"full": 1000, "sliding": 200, "states": 30},
        tensor_parallel_degree=2,
        whole=MultiKVCacheParams({"full": full, "sliding": sliding, "states": states}),
    )


def test_the_first_version_is_read_and_written_as_it_was() -> None:
    data = (FIXTURES / "handshake_1.msgpack").read_bytes()
    assert KVTransferEngineMetadata.from_bytes(data) == the_first_version()
    assert the_first_version().to_bytes() == data


def test_another_version_is_refused_whatever_else_it_says() -> None:
    later = msgspec.msgpack.encode({"type": "kv_transfer_engine_metadata", "version": 2, "news": [1]})
    with pytest.raises(TransferMetadataError, match=r"^data: version 2, this side reads version 1$"):
        KVTransferEngineMetadata.from_bytes(later)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"no metadata", b"\x80", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", bytes(MAX_BYTES)],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TransferMetadataError, match=r"^data: no metadata of a transfer engine"):
        KVTransferEngineMetadata.from_bytes(data)


def test_a_message_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(TransferMetadataError, match=r"^data: 1048577 bytes, must be at most 1048576"):
        KVTransferEngineMetadata.from_bytes(bytes(MAX_BYTES + 1))


def test_what_is_no_bytes_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="data: got str, must be bytes"):
        KVTransferEngineMetadata.from_bytes("text")  # type: ignore[arg-type]


def test_a_message_that_is_cut_short_is_refused_wherever() -> None:
    data = told("a", GQA).to_bytes()
    for length in range(len(data)):
        with pytest.raises(TransferMetadataError):
            KVTransferEngineMetadata.from_bytes(data[:length])


def test_a_message_with_wrong_bytes_is_refused_or_says_something_that_can_be(first_seed: int) -> None:
    random, good = Random(first_seed), the_first_version().to_bytes()
    refused = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(random.randint(1, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        try:
            side = KVTransferEngineMetadata.from_bytes(data)
            assert KVTransferEngineMetadata.from_bytes(side.to_bytes()) == side
        except TransferMetadataError:
            refused += 1
    assert refused > 1000


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda message: message.update(fields)


def in_group(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda message: message["groups"][0].update(fields)


def in_region(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda message: message["groups"][0]["regions"][0].update(fields)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (change(type="another_message"), "type 'another_message', must be 'kv_transfer_engine_metadata'"),
        (change(version="1"), "Expected `int`, got `str`"),
        (change(name=""), "name='': must be a str that is not empty"),
        (change(news=1), "unknown field `news`"),
        (change(tensor_parallel_degree=0), "tensor_parallel_degree=0: must be a whole number from 1"),
        (change(tensor_parallel_degree=3), "4 KV heads do not divide among so many"),
        (change(tensor_parallel_degree=2), "does not have the 2 heads of a shard"),
        (change(groups=[]), "must be one at least, of different names"),
        (lambda message: message.update(groups=message["groups"] * 2), "of different names"),
        (in_group(page_size=0), "page_size=0: must be a whole number from 1"),
        (in_group(page_size=True), "Expected `int`, got `bool`"),
        (in_group(num_pages=0), r"num_pages=0: must be a whole number from 1"),
        (in_group(num_layers=3), "kv_heads: 2 given, must be one for each of 3 layers"),
        (in_group(bytes_per_page=8), "bytes_per_page=8: its regions take 4096"),
        (in_group(type="other"), "type='other': must be one of"),
        (in_group(window_size=4), "window_size=4: must be -1"),
        (in_group(type="recurrent"), "none for states"),
        (in_group(kv_heads=[4, 0]), "heads=0: must be a whole number from 1"),
        (in_group(replicated=True), "replicated=True: must be False where layers have more than one head"),
        (in_group(regions=[]), "regions: none given"),
        (in_region(name=""), "region '': must have a name"),
        (in_region(layers=[0, 0]), "some of 2 layers once each"),
        (in_region(layers=[0, 2]), "some of 2 layers once each"),
        (in_region(layers=[0]), "must be .1, ...., of lengths from 1"),
        (in_region(shape=[2, 2, 16, 4, -8]), "of lengths from 1"),
        (in_region(shape=[2]), "of lengths from 1"),
        (in_region(shape=[2, 4]), "does not have the 4 heads"),
        (in_region(dtype="bfloat17"), "dtype 'bfloat17' is not one of"),
        (in_region(offset=-2), "offset -2 must be at least 0"),
        (in_region(offset=1), "a multiple of its element's 2 bytes"),
    ],
)
def test_a_message_that_says_what_cannot_be_is_refused(
    alter: Callable[[dict[str, Any]], None], said: str
) -> None:
    message = msgspec.msgpack.decode(told("a", GQA).to_bytes())
    alter(message)
    with pytest.raises(TransferMetadataError, match=said) as refused:
        KVTransferEngineMetadata.from_bytes(msgspec.msgpack.encode(message))
    assert len(str(refused.value)) < 500


def test_a_message_that_leaves_something_out_is_refused() -> None:
    for place in ((), ("groups", 0), ("groups", 0, "regions", 0)):
        part = message = msgspec.msgpack.decode(told("a", GQA).to_bytes())
        for step in place:
            part = part[step]
        for field in list(part):
            left = part.pop(field)
            with pytest.raises(TransferMetadataError, match=field):
                KVTransferEngineMetadata.from_bytes(msgspec.msgpack.encode(message))
            part[field] = left


# What is loaded


def test_msgspec_is_loaded_for_metadata_alone_and_named_where_it_is_missing() -> None:
    program = """
import sys
sys.modules["msgspec"] = None
from pagekeeper.replica_transfer import HeadShards, plan_reads
print(plan_reads(HeadShards(1, 1), HeadShards(1, 1))[0][0].source_rank, "torch" in sys.modules)
try:
    import pagekeeper.replica_transfer.metadata
except ImportError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True)
    assert printed.stdout == (
        "0 False\nmsgspec is needed for a handshake: pip install 'pagekeeper[transfer]'\n"
    )
