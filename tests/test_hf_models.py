"""`serve.py --model` gives the greedy tokens that transformers gives for the same directory."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import serve
from serving.engine import Engine, Request
from serving.loader import UnsupportedModelError, load_config, load_model
from serving_options import options

with warnings.catch_warnings():
    # What transformers says about its own imports is not about this project.
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama with llama3 positions": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama with stretched positions": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama with its own head size": (LlamaConfig, LlamaForCausalLM, {"head_dim": 12}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2 tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
}
PROMPTS = [[7], list(range(40)), [3, 1, 4, 1, 5, 9, 2, 6] * 12, list(range(100, 20, -1))]
NEW_TOKENS = 12
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"transformers\..*")
        yield
    logger.setLevel(level)


def write_model(name: str, directory: Path, **save: Any) -> PreTrainedModel:
    """A tiny model of random float32 weights, biases and norms too, saved as transformers saves models."""
    config_type, model_type, changes = MODELS[name]
    torch.manual_seed(11)
    model: PreTrainedModel = model_type(config_type(**(SHAPE | changes))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory, **save)
    return model


def transformers_tokens(model: PreTrainedModel, prompt: list[int], **settings: Any) -> list[int]:
    prompts = torch.tensor([prompt])
    generate: Any = model.generate
    output: torch.Tensor = generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        **settings,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def served_tokens(directory: Path) -> list[list[int]]:
    """What the example's engine answers to all prompts at once, in chunks of 32 tokens over pages of 16."""
    model = load_model(directory)
    kv = serve.make_cache(model.config, options(pages=64, max_batch=4), reuse=True)
    engine = Engine(model, kv, max_batch_size=4, max_num_input_tokens=32)
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path)
    expected = [transformers_tokens(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert served_tokens(tmp_path) == expected


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert served_tokens(tmp_path) == [transformers_tokens(model, prompt) for prompt in PROMPTS]


def test_positions_in_the_older_way_of_writing_them_mean_the_same(tmp_path: Path) -> None:
    model = write_model("llama with llama3 positions", tmp_path)
    fields = read_config(tmp_path)
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    fields["rope_scaling"] = scaling
    write_config(tmp_path, fields)
    assert served_tokens(tmp_path) == [transformers_tokens(model, prompt) for prompt in PROMPTS]


def test_an_end_token_of_the_directory_ends_the_answer(tmp_path: Path) -> None:
    model = write_model("qwen2", tmp_path)
    end = transformers_tokens(model, PROMPTS[1])[4]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [119, end]}))
    expected = [transformers_tokens(model, prompt, eos_token_id=[119, end]) for prompt in PROMPTS]
    assert len(expected[1]) <= 5
    assert served_tokens(tmp_path) == expected


def test_the_program_serves_the_directory_as_transformers_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model("llama", tmp_path)
    arguments = ["--model", str(tmp_path), "--conversations", "1", "--turns", "1", "--json"]
    fields = read_config(tmp_path)
    write_config(tmp_path, fields | {"max_position_embeddings": 2048})
    assert serve.main([*arguments, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert request["output"] == transformers_tokens(model, request["prompt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2': must be 'llama' or 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True: must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\]='sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}: must be None"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters of type 'yarn': must be 'default', 'linear'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of type 'linear' lacks 'factor'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size=None: must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8: must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    write_config(tmp_path, read_config(tmp_path) | changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_config(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    write_config(tmp_path, read_config(tmp_path) | {"num_hidden_layers": 4})
    with pytest.raises(
        UnsupportedModelError, match=r"the weights lack model\.layers\.3\.input_layernorm\.weight"
    ):
        load_model(tmp_path)


def test_a_tensor_that_the_config_does_not_know_is_named(tmp_path: Path) -> None:
    write_model("llama with biases", tmp_path)
    write_config(tmp_path, read_config(tmp_path) | {"mlp_bias": False})
    with pytest.raises(
        UnsupportedModelError, match=r"mlp\.\w+_proj\.bias is no part of the model in config\.json"
    ):
        load_model(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    write_config(tmp_path, read_config(tmp_path) | {"vocab_size": 121})
    with pytest.raises(
        UnsupportedModelError, match=r"embed_tokens.weight has shape \(120, 64\): .* \(121, 64\)"
    ):
        load_model(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: cannot be read"):
        load_model(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"has neither model\.safetensors nor"):
        load_model(tmp_path)


def read_config(directory: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return fields


def write_config(directory: Path, fields: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(fields))
