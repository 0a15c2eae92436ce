"""Configurations that are not known, that cannot be read, or that hold anything at all."""

import json
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagekeeper.models import FAMILIES, HuggingFaceModel
from real_models import MODELS
from small_configs import LLAMA, TOKEN, read


def test_a_model_of_an_unknown_type_is_read_by_common_fields_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="pagekeeper"):
        model = read(model_type="brand_new")
    assert (model.family, model.is_known) == ("generic", False)
    assert model.to_params().bytes_per_token == TOKEN
    assert "model_type='brand_new' is not known" in model.notes[0]
    assert [record.getMessage() for record in caplog.records] == [model.notes[0]]


def test_a_known_model_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pagekeeper"):
        assert read().is_known
    assert caplog.records == []


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        ({"n_layer": 12, "n_embd": 768, "n_head": 12}, 12 * 2 * 768 * 2),
        ({"n_layer": 40, "n_embd": 6144, "n_head": 48, "multi_query": True}, 40 * 2 * 128 * 2),
        # 71 KV heads are said and one is used; then 8 are
        (
            {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71}
            | {"multi_query": True, "new_decoder_architecture": False},
            32 * 2 * 64 * 2,
        ),
        (
            {"num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8}
            | {"multi_query": True, "new_decoder_architecture": True},
            60 * 2 * 8 * 64 * 2,
        ),
        (
            {"n_layers": 40, "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8}},
            40 * 2 * 8 * 128 * 2,
        ),
        ({"n_layers": 32, "d_model": 4096, "n_heads": 32}, 32 * 2 * 4096 * 2),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
            2 * 40 * 2,
        ),
    ],
)
def test_common_fields_go_by_the_names_that_models_give_them(
    config: dict[str, Any], bytes_per_token: int
) -> None:
    assert read(config, model_type="other").to_params().bytes_per_token == bytes_per_token


def test_the_decoder_of_an_unknown_model_with_an_encoder_reads_it() -> None:
    model = read(
        model_type="other", is_encoder_decoder=True, decoder_layers=3, encoder_layers=9, num_hidden_layers=9
    )
    assert model.groups() == {"full": (0, 1, 2), "cross": (0, 1, 2)}


def test_an_unknown_model_has_the_windows_that_it_lists() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    by_list = read(model_type="other", layer_types=types, sliding_window=32)
    by_pattern = read(model_type="other", sliding_window_pattern=3, sliding_window=32)
    by_window = read(model_type="other", sliding_window=32)
    assert by_list.groups() == by_pattern.groups() == {"sliding": (0, 1, 3), "full": (2,)}
    assert by_window.groups() == {"sliding": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, r"num_hidden_layers \(or n_layer, .*\): the config has none"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number from 1 to 10000"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000: must be a whole number from 1 to 10000",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_key_value_heads": -8}, "num_key_value_heads=-8: must be a whole number"),
        ({"head_dim": "128"}, "head_dim='128': must be a whole number"),
        (
            {"hidden_size": 100},
            "head_dim: the config has none, and hidden_size=100 is no multiple of num_att",
        ),
        (
            {"layer_types": ["full_attention"]},
            "num_hidden_layers=4: the config has a word for each of 1 layers",
        ),
        ({"layer_types": ["full_attention"] * 3 + ["odd"]}, r"layer_types\[3\]='odd': must be one of 'full_"),
        ({"layer_types": ["mamba"] * 4}, "layer 0 has states, of which nothing is known in such a model"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: the config has none"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: must be less than the 4 layers"),
        ({"torch_dtype": "float5"}, "dtype='float5': dtype 'float5' is not one of"),
        ({"model_type": 3}, "model_type=3: must be a str"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*Q"},
            "hybrid_override_pattern='M.Q': must be",
        ),
        (
            {"model_type": "minimax", "attn_type_list": [0, 1, 2, 1]},
            r"attn_type_list=\[0, 1, 2, 1\]: must be a list",
        ),
        (
            {"model_type": "nemotron-nas", "block_configs": []},
            r"block_configs=\[\]: must be a list with an entry",
        ),
        (
            {"model_type": "gemma3", "sliding_window_pattern": 0},
            "sliding_window_pattern=0: must be a whole number",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_a_refusal_says_which_file_and_which_family(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"num_attention_heads": 0}))
    with pytest.raises(ValueError, match=rf"{file}, Llama model: num_attention_heads=0"):
        HuggingFaceModel.read(file)


def test_a_path_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in it"):
        HuggingFaceModel.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        HuggingFaceModel.read(tmp_path / "Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is no JSON"), (b"[1]", "must hold a JSON object"), (b"\xff", "is no JSON")],
)
def test_a_file_that_is_no_configuration_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        HuggingFaceModel.read(tmp_path)


@pytest.mark.parametrize("bits", [[8], {}, "8", None, 8.5])
def test_a_scheme_of_the_cache_that_makes_no_sense_is_noted(bits: Any) -> None:
    model = read(quantization_config={"kv_cache_scheme": {"type": "float", "num_bits": bits}})
    assert model.kv_dtype == model.dtype
    assert "kv_cache_scheme=" in model.notes[-1]


@pytest.mark.parametrize("key", ["9" * 5000, "\u00b2", "", "-1", "1.0"])
def test_a_key_that_is_no_layer_has_fields_of_none(key: str) -> None:
    assert read(per_layer_config={key: {"head_dim": 8}}).to_params().bytes_per_token == TOKEN


def test_what_is_neither_a_path_nor_a_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="config=3: must be a path or a mapping"):
        HuggingFaceModel.read(3)  # type: ignore[arg-type]


def test_a_deepseek_model_without_latents_has_keys_and_values() -> None:
    model = read(model_type="deepseek_v2", use_mla=False, kv_lora_rank=None, qk_rope_head_dim=0)
    assert model.to_params().bytes_per_token == TOKEN


JUNK: tuple[Any, ...] = (None, -1, 3, True, 1.5, 10**20, "x", [], [1], {"a": 1})
OF_EACH_FAMILY = {HuggingFaceModel.read(real.config).family: name for name, real in MODELS.items()}


@pytest.mark.parametrize("name", OF_EACH_FAMILY.values())
def test_whatever_stands_in_a_field_is_read_or_refused_in_words(name: str) -> None:
    whole = MODELS[name].config | {"quantization_config": {"kv_cache_scheme": None}}
    for key, own in [(None, whole), *((key, whole[key]) for key in whole if isinstance(whole[key], dict))]:
        for field in [*own, "layer_types", "per_layer_config", "num_kv_shared_layers", "num_mtp_layers"]:
            for junk in JUNK:
                changed = own | {field: junk}
                with suppress(ValueError):
                    HuggingFaceModel.read(changed if key is None else whole | {key: changed}).to_params()


def test_no_model_type_is_in_two_families() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(set(types)) == len(types)


def test_a_configuration_is_read_without_torch_transformers_or_pydantic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    program = (
        "import sys; from pagekeeper.models import HuggingFaceModel;"
        f"HuggingFaceModel.read({str(tmp_path)!r}).to_params();"
        "print([name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
