"""`pagekeeper plan` (PLAN-8): what an operator is told, and how soon."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagekeeper import KVCacheConfig
from pagekeeper.cli.app import app
from pagekeeper.models.weights import estimate_weights, weights_on_disk

GIB = 2**30
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 201_088,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "max_position_embeddings": 131_072,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KV_CACHE_PAGE_SIZE", "KV_CACHE_FORMAT", "DEVICE_MEMORY_UTILIZATION", "LAYOUT", "KV_LAYOUT"):
        monkeypatch.delenv(f"PAGEKEEPER_{name}", raising=False)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A model of 147,456 bytes a token, 18,874,368 a page of 128."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments: object, exit_code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


# What it says


def test_it_tells_of_memory_pages_and_requests_at_a_time(qwen: Path) -> None:
    result = run(qwen, "--memory", "24GiB", "--weights", "8GiB")
    assert result.exit_code == 0, result.output
    # 21.6 GiB less 8 are 773 pages of 18 MiB and some, one of them null; a request of 4,096 tokens has 32
    for line in (
        "KV cache of qwen3",
        "Memory that is free 24.00 GiB",
        "may be used 21.60 GiB 0.9 of it",
        "weights 8.00 GiB as given",
        "Memory of the cache 13.60 GiB",
        "Bytes per token 147,456 in pages of 128 tokens",
        "full 36 18,874,368 772",
        "4,096 tokens 576.00 MiB 24",
        "A request of 40,960 tokens fits.",
    ):
        assert line in lines(result)
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_json_has_the_same_for_scripts(qwen: Path) -> None:
    told = planned(qwen, "--kv-memory", 100 * 18_874_368, "--lengths", "128,129", "--max-model-len", "1280")
    assert (told["bytes_per_token"], told["bytes_per_token_kept"]) == (147_456, 147_456)
    assert told["memory"] == {
        "free": None,
        "utilization": 0.9,
        "weights": 0,
        "weights_from": "none",
        "cache": 100 * 18_874_368,
    }
    (group,) = told["groups"]
    assert (group["reads"], group["layers"], group["pages"]) == ("full", 36, 99)
    assert [(it["tokens"], it["requests"]) for it in told["lengths"]] == [(128, 99), (129, 49)]
    assert [it["bytes_per_request"] for it in told["lengths"]] == [18_874_368, 2 * 18_874_368]
    assert (told["fits"], told["longest"], told["capacity_tokens"]) == (True, 1280, 9 * 1280)


def test_devices_divide_heads_and_weights(qwen: Path) -> None:
    told = planned(qwen, "--memory", "24GiB", "--weights", "8GiB", "--tp", "2")
    assert (told["devices"], told["bytes_per_token"]) == (2, 147_456 // 2)
    assert told["memory"]["weights"] == 4 * GIB
    assert told["memory"]["cache"] == int(24 * GIB * 0.9) - 4 * GIB


def test_windows_and_what_a_request_has_beside_what_grows_are_told(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT_OSS_20B))
    limits = ["--kv-memory", "8GiB", "--max-num-input-tokens", "128"]
    told = planned(file, *limits)
    # 12 layers of each kind, of 8 heads of 64: 24,576 bytes a token. A window of 128 with two chunks of 128
    # lies on four pages of 128 at most.
    assert (told["bytes_per_token"], told["bytes_per_token_kept"]) == (49_152, 24_576)
    assert told["fixed_bytes_per_request"] == 4 * 128 * 24_576
    assert {group["reads"] for group in told["groups"]} == {"full", "sliding_window(128)"}
    assert told["is_shared"]
    assert "that a request keeps 24,576 the rest leaves its window" in lines(run(file, *limits))


def test_an_unknown_type_and_what_was_assumed_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"model_type": "qwen99"}))
    result = run(tmp_path, "--kv-memory", "8GiB")
    assert "KV cache of qwen99, a type that is not known" in lines(result)
    assert any(line.startswith("Note: model_type='qwen99' is not known") for line in lines(result))


def test_latents_are_stored_once_in_tiers_whatever_the_devices(tmp_path: Path) -> None:
    deepseek = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(deepseek))
    told = planned(tmp_path, "--kv-memory", 1000 * 70_272 * 128, "--tp", "8")
    assert told["bytes_per_token"] == 70_272
    assert told["host_gb"] == round(1.5 * 1000 * 70_272 * 128 / GIB, 1)


def test_an_encoders_tokens_are_the_models(tmp_path: Path) -> None:
    """Case 140: Whisper large v3 has 1,500 positions, and 448 of its decoder."""
    whisper = {
        "model_type": "whisper",
        "d_model": 1280,
        "decoder_layers": 32,
        "decoder_attention_heads": 20,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(whisper))
    told = planned(tmp_path, "--kv-memory", "8GiB", "--max-model-len", "448", "--kv-cache-page-size", "16")
    # 94 pages of 16 tokens, of 32 layers of 2 x 20 heads x 64 values x 2 bytes
    assert told["fixed_bytes_per_request"] == 94 * 16 * 32 * 2 * 20 * 64 * 2 == 246_415_360


# Settings


def test_settings_are_options_and_come_from_the_environment_and_a_file_too(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("kv_cache_page_size: 16\ndevice_memory_utilization: 0.5\n")
    monkeypatch.setenv("PAGEKEEPER_KV_CACHE_PAGE_SIZE", "32")
    options = ["--config", file, "--kv-cache-format", "float8_e4m3fn", "--weights", "1GiB"]
    told = planned("--memory", "24GiB", *options, qwen)
    assert (told["page_size"], told["bytes_per_token"]) == (32, 147_456 // 2)
    assert told["memory"]["cache"] == 11 * GIB


def test_a_bad_setting_is_told_with_where_it_comes_from(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_KV_CACHE_PAGE_SIZE", "0")
    result = run(qwen, "--kv-memory", "8GiB")
    assert result.exit_code == 2
    assert "kv_cache_page_size=0: must be a whole number" in result.stderr
    assert "(from PAGEKEEPER_KV_CACHE_PAGE_SIZE)" in result.stderr


# What does not fit


def test_what_does_not_fit_is_told_with_what_does(qwen: Path) -> None:
    result = run(qwen, "--kv-memory", 11 * 18_874_368)
    assert result.exit_code == 1
    assert "A request of 40,960 tokens does not fit; --max-model-len 1280 does." in lines(result)
    told = planned(qwen, "--kv-memory", 11 * 18_874_368, exit_code=1)
    assert (told["fits"], told["longest"]) == (False, 1280)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--kv-memory", "1MiB"],
            "it does not fit: available_bytes=1048576: makes 0 pages of 18874368 bytes",
        ),
        (
            ["--memory", "8GiB", "--weights", "16GiB"],
            "it does not fit: weights of 17179869184 bytes on each device",
        ),
    ],
)
def test_a_machine_that_is_too_small_is_told_so(qwen: Path, options: list[str], said: str) -> None:
    result = run(qwen, *options)
    assert (result.exit_code, said in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either --memory"),
        (["--memory", "1GiB", "--kv-memory", "1GiB"], "give either --memory"),
        (["--kv-memory", "1GiB", "--weights", "1GiB"], "--weights goes with --memory"),
        (["--kv-memory", "many"], "'many' is no size from 1 byte, such as 80GiB"),
        (["--kv-memory", "0"], "'0' is no size from 1 byte"),
        (["--kv-memory", "1GiB", "--tp", "3"], "8 KV heads do not divide among so many"),
        (
            ["--kv-memory", "1GiB", "--lengths", "1,x"],
            "--lengths 1,x: must be numbers of tokens from 1 to 40960",
        ),
        (["--kv-memory", "0.9"], "'0.9' is no size from 1 byte"),
        (["--kv-memory", "1GiB", "--lengths", "40961"], "must be numbers of tokens from 1 to 40960"),
        (["--kv-memory", "1GiB", "--kv-cache-pagesize", "1"], "No such option"),
    ],
)
def test_what_cannot_be_planned_with_is_an_error_of_its_own(
    qwen: Path, options: list[str], said: str
) -> None:
    result = run(qwen, *options)
    assert (result.exit_code, said in " ".join(result.stderr.split())) == (2, True), result.stderr


def test_a_directory_without_a_configuration_is_told_so(tmp_path: Path) -> None:
    result = run(tmp_path, "--kv-memory", "1GiB")
    assert (result.exit_code, "there is no config.json in it" in result.stderr) == (2, True)


# Weights


def test_weights_are_those_of_the_files(qwen: Path) -> None:
    assert weights_on_disk(qwen) is None
    (qwen / "model-1.safetensors").write_bytes(b"a" * 1000)
    (qwen / "consolidated.safetensors").write_bytes(b"a" * 5000)
    assert weights_on_disk(qwen / "config.json") == 6000
    index = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"},
        "metadata": {"total_size": 9},
    }
    (qwen / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_on_disk(qwen) == 1000
    told = planned(qwen, "--memory", "8GiB")["memory"]
    assert (told["weights"], told["weights_from"]) == (1000, "files")


def test_an_index_tells_of_files_that_are_not_there(qwen: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}, "metadata": {"total_size": 8 * GIB}}
    (qwen / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_on_disk(qwen) == 8 * GIB


def test_an_index_that_is_none_is_refused(qwen: Path) -> None:
    (qwen / "model.safetensors.index.json").write_text("{}")
    result = run(qwen, "--memory", "8GiB")
    assert (result.exit_code, "is no index of safetensors files" in result.stderr) == (2, True)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "vocab_size": 32_000,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (QWEN3_4B, 4.02e9 * 2),
        (LLAMA_8B, 8.03e9 * 2),
        (MIXTRAL, 46.7e9 * 2),
        (DEEPSEEK_V3, 671e9),
        (GPT_OSS_20B, 20.9e9 * 4.25 / 8),
        (LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 8.03e9 / 2),
    ],
    ids=["Qwen3-4B", "Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3", "gpt-oss-20b", "Llama-3.1-8B in 4 bits"],
)
def test_an_estimate_is_near_what_is_published(config: dict[str, Any], published: float) -> None:
    assert estimate_weights(config) == pytest.approx(published, rel=0.03)


def test_an_estimate_is_marked_and_where_there_is_none_weights_are_asked_for(qwen: Path) -> None:
    assert planned(qwen, "--memory", "24GiB")["memory"]["weights_from"] == "estimated"
    assert any("estimated: give --weights" in line for line in lines(run(qwen, "--memory", "24GiB")))
    (qwen / "config.json").write_text(json.dumps({k: v for k, v in QWEN3_4B.items() if k != "vocab_size"}))
    result = run(qwen, "--memory", "24GiB")
    assert (result.exit_code, "--weights: missing" in result.stderr) == (2, True)


def test_without_settings_a_plan_is_that_of_the_default_ones(qwen: Path) -> None:
    plain = planned(qwen, "--memory", "24GiB")
    assert plain == planned(qwen, "--memory", "24GiB", "--kv-cache-page-size", "128")
    assert plain["memory"]["utilization"] == KVCacheConfig().device_memory_utilization


# Help, and time


def test_help_has_examples_and_all_settings() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "pagekeeper plan models/qwen3-32b --memory 80GiB --tp 2" in result.stdout
    assert "--kv-cache-page-size" in result.stdout


def test_a_plan_loads_neither_torch_nor_transformers_nor_what_reads_settings_that_are_not_there(
    qwen: Path,
) -> None:
    program = f"""
import sys
from pagekeeper.cli.app import app
try:
    app(["plan", {str(qwen)!r}, "--memory", "80GiB"])
except SystemExit as ended:
    late = {{"torch", "transformers", "pydantic", "pydantic_settings", "yaml", "pagekeeper.cli.replay"}}
    print("ended", ended.code, sorted(sys.modules.keys() & late), file=sys.stderr)
"""
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True, env=environment | PYTHON
    )
    assert done.stderr == "ended 0 []\n"


PYTHON = {"PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_the_environments_layout_counts_where_no_option_says_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    arguments = (tmp_path, "--kv-memory", "8GiB", "--json")
    monkeypatch.setenv("PAGEKEEPER_KV_LAYOUT", "paged")
    assert not json.loads(run(*arguments).stdout)["is_shared"]
    assert json.loads(run(*arguments, "--layout", "jenga").stdout)["is_shared"]
    monkeypatch.setenv("PAGEKEEPER_KV_LAYOUT", "heap")
    refused = run(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "PAGEKEEPER_KV_LAYOUT='heap': must be one of" in refused.stderr


@pytest.mark.parametrize("memory", ["1KiB", "20MiB"])
def test_json_says_what_is_needed_where_there_is_not_one_page(qwen: Path, memory: str) -> None:
    result = run(qwen, "--kv-memory", memory, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["fits"], told["longest"]) == (1, False, 0)
    assert told["needed"] == (40_960 // 128 + 1) * 18_874_368
    assert told["error"] in result.stderr
    assert planned(qwen, "--kv-memory", told["needed"])["fits"]


def test_a_length_beyond_all_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"max_position_embeddings": 2**31 - 1}))
    refused = run(tmp_path, "--kv-memory", "8GiB")
    assert refused.exit_code == 2
    assert "--max-model-len: must be up to 16777216; 2147483647 cannot be planned for" in refused.stderr
    assert run(tmp_path, "--kv-memory", "8GiB", "--max-model-len", "4096").exit_code == 0


@pytest.mark.parametrize("model_type", ["\udc80", "a\x1b[31mb", "a\nb", "x" * 10_000])
def test_a_type_that_cannot_be_printed_is_told_as_python_writes_it(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"model_type": model_type}))
    result = run(tmp_path, "--kv-memory", "8GiB")
    assert result.exit_code == 0
    assert model_type not in result.stdout
    assert "KV cache of '" in " ".join(result.stdout.split())


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_narrow_terminal_loses_no_number(columns: str, qwen: Path) -> None:
    arguments = ["plan", str(qwen), "--kv-memory", "8GiB"]
    narrow, usual = (CliRunner(env={"COLUMNS": it}).invoke(app, arguments).stdout for it in (columns, "80"))
    assert narrow == usual
    assert "147,456" in usual


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to write to")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_is_told_in_a_line(options: list[str], qwen: Path) -> None:
    command = [sys.executable, "-m", "pagekeeper", "plan", str(qwen), "--kv-memory", "8GiB", *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "pagekeeper: No space left on device\n")
