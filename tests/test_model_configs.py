"""Bytes of real models: what their configurations give is what the common formulas say."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pagekeeper.models import HuggingFaceModel
from pagekeeper.params import KVCacheParams, MHAKVCacheParams, MLAKVCacheParams, RecurrentKVCacheParams
from real_models import MODELS, Heads, Latent, Real, State

PAGE = 16
DEGREES = range(1, 17)


def groups_of(real: Real, **wishes: Any) -> Mapping[str, KVCacheParams]:
    params = HuggingFaceModel.read(real.config).to_params(page_size=PAGE, **wishes)
    return {next(iter(real.groups)): params} if isinstance(params, KVCacheParams) else params


def attention_of(real: Real) -> dict[str, Heads | Latent]:
    return {name: group for name, group in real.groups.items() if not isinstance(group, State)}


def states_of(real: Real) -> dict[str, State]:
    return {name: group for name, group in real.groups.items() if isinstance(group, State)}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_token_and_of_a_page_are_those_of_the_formulas(name: str) -> None:
    real = MODELS[name]
    groups = groups_of(real)
    assert set(groups) == set(real.groups)
    for group, told in attention_of(real).items():
        assert groups[group].bytes_per_token == told.token_bytes(16)
        assert groups[group].bytes_per_page == told.token_bytes(16) * PAGE
    for group, state in states_of(real).items():
        assert (groups[group].bytes_per_token, groups[group].bytes_per_page) == (0, state.request_bytes())


@pytest.mark.parametrize("name", MODELS)
def test_layers_read_the_tokens_that_the_model_card_says(name: str) -> None:
    real = MODELS[name]
    assert {group: str(params.group_id) for group, params in groups_of(real).items()} == {
        group: real.kinds.get(group, "full") for group in real.groups
    }


def divides(real: Real, degree: int) -> bool:
    """Whether so many shards can be made: each has whole heads, or one that others have too."""
    return all(
        group.heads % degree == 0 or degree % group.heads == 0
        if isinstance(group, Heads)
        else group.shared % degree == 0
        for group in real.groups.values()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "bits"),
    # one scale, a byte, for each 16 values of 4 bits
    [("bfloat16", 16), ("float8_e4m3fn", 8), ("float4_e2m1fn", 4 + 8 / 16)],
)
def test_each_of_up_to_16_shards_has_its_part_of_the_heads_or_at_least_one_in_every_type(
    name: str, dtype: str, bits: float
) -> None:
    real = MODELS[name]
    possible = [degree for degree in DEGREES if divides(real, degree)]
    assert {1, 2, 4} & set(possible) >= ({1, 2} if name in ("Phi-4",) else {1, 2, 4})
    for degree in possible:
        groups = groups_of(real, tensor_parallel_degree=degree, dtype=dtype)
        expected = {
            group: (told.token_bytes(bits, degree), told.token_bytes(bits, degree) * PAGE)
            for group, told in attention_of(real).items()
        } | {group: (0, state.request_bytes(degree)) for group, state in states_of(real).items()}
        assert {
            group: (params.bytes_per_token, params.bytes_per_page) for group, params in groups.items()
        } == expected, f"{degree} shards"


@pytest.mark.parametrize("name", MODELS)
def test_shards_among_which_heads_do_not_divide_are_refused(name: str) -> None:
    for degree in DEGREES:
        if not divides(MODELS[name], degree):
            with pytest.raises(ValueError, match=f"tensor_parallel_degree={degree}: .* do not divide"):
                groups_of(MODELS[name], tensor_parallel_degree=degree)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("Qwen3-4B", 147_456),  # not 92,160, as hidden size over heads would give
        ("DeepSeek-V3", 70_272),
        ("Llama-2-7B", 524_288),
        ("Llama-2-70B", 327_680),
        ("Llama-3.1-8B", 131_072),
        ("Llama-3.1-405B", 516_096),
        ("Qwen2-7B", 57_344),
        ("Mistral-Nemo-12B", 163_840),
        ("DeepSeek-V3.2", 85_888),
    ],
)
def test_bytes_of_a_token_are_as_published(name: str, bytes_per_token: int) -> None:
    assert HuggingFaceModel.read(MODELS[name].config).to_params().bytes_per_token == bytes_per_token


def test_latents_weigh_the_same_on_each_of_eight_shards() -> None:
    model = HuggingFaceModel.read(MODELS["DeepSeek-V3"].config)
    shard = model.to_params(tensor_parallel_degree=8)
    assert isinstance(shard, MLAKVCacheParams)
    assert (shard.bytes_per_token, shard.num_q_heads, shard.replicated) == (70_272, 16, True)


@pytest.mark.parametrize(("heads", "degree"), [(4, 8), (2, 4), (1, 16)])
def test_more_shards_than_kv_heads_have_one_head_each(heads: int, degree: int) -> None:
    config = MODELS["Qwen2-7B"].config | {"num_key_value_heads": heads}
    shard = HuggingFaceModel.read(config).to_params(tensor_parallel_degree=degree)
    assert isinstance(shard, MHAKVCacheParams)
    assert shard.n_kv_heads == 1


def test_heads_that_do_not_divide_either_way_are_refused() -> None:
    model = HuggingFaceModel.read(MODELS["Qwen2-7B"].config | {"num_key_value_heads": 6})
    with pytest.raises(ValueError, match="tensor_parallel_degree=4: 6 KV heads do not divide"):
        model.to_params(tensor_parallel_degree=4)


def test_every_family_of_the_table_that_is_wide_spread_has_a_real_model_here() -> None:
    read = {HuggingFaceModel.read(real.config).family for real in MODELS.values()}
    assert len(MODELS) >= 30
    assert len(read) >= 25
    assert "generic" not in read


def test_each_of_the_models_is_read_without_a_doubt() -> None:
    notes = {name: HuggingFaceModel.read(real.config).notes for name, real in MODELS.items()}
    assert {name: text for name, text in notes.items() if text} == {
        "gpt-oss-20b": ("the config names no dtype: bfloat16 is taken",)
    }


def test_a_configuration_says_the_same_in_a_file_a_directory_and_a_dict(tmp_path: Any) -> None:
    config = MODELS["Gemma-3-27B"].config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    read = [HuggingFaceModel.read(given) for given in (config, file, str(file), tmp_path, str(tmp_path))]
    assert read == [read[0]] * 5


def test_states_of_a_hybrid_have_the_type_that_is_asked_for() -> None:
    model = HuggingFaceModel.read(MODELS["Nemotron-H-8B"].config)
    types = {}
    for given in (None, "bfloat16", "float32"):
        params = model.to_params(state_dtype=given, layers=range(2))
        assert isinstance(params, RecurrentKVCacheParams)
        types[given] = [str(state.dtype) for state in params.states]
    assert types == {
        None: ["bfloat16", "float32"],
        "bfloat16": ["bfloat16", "bfloat16"],
        "float32": ["float32", "float32"],
    }
