"""The command line, through click's runner and as a process."""

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pagekeeper.cli.app import app
from pagekeeper.contents import WrongPageError
from pagekeeper.replay import CallTimes, ReplayResult, ReplaySettings


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests with the same ten tokens."""
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps({'tokens': list(range(10)), 'output_length': 2})}\n" * 2)
    return file


def test_a_generated_chat_ends_in_a_summary() -> None:
    result = run("replay", "--generate", "20")
    assert result.exit_code == 0, result.output
    for words in ("Requests served", "from the cache", "hit rate", "Preemptions", "Manager CPU"):
        assert words in result.stdout


def test_the_summary_fits_eighty_columns(trace: Path) -> None:
    result = run("replay", trace, "--no-prefix-caching", "--pages", "1048576", "--concurrency", "10")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_summary_gives_the_counts(trace: Path) -> None:
    lines = [" ".join(line.split()) for line in run("replay", trace, "--page-size", "4").stdout.splitlines()]
    assert "Prompt tokens 20 in 6 blocks" in lines
    assert "hit rate 40.0% of the tokens, 33.3% of the blocks" in lines


def test_json_is_all_that_stands_on_stdout(trace: Path) -> None:
    result = run("replay", trace, "--page-size", "4", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["requests"], report["prompt_tokens"], report["hit_tokens"]) == (2, 20, 8)


def test_json_has_every_field_of_the_result(trace: Path) -> None:
    report = json.loads(run("replay", trace, "--json").stdout)
    rates = {"token_hit_rate", "device_token_hit_rate", "block_hit_rate"}
    assert report.keys() == {field.name for field in fields(ReplayResult)} | rates
    assert report["settings"].keys() == {field.name for field in fields(ReplaySettings)}
    for kind in ("admit", "step", "release"):
        assert report[kind].keys() == {field.name for field in fields(CallTimes)}


def test_options_reach_the_replay() -> None:
    options = ["--page-size", "8", "--pages", "70", "--concurrency", "3", "--hash-algo", "sha256"]
    options += ["--policy", "priority_lru"]
    report = json.loads(
        run(
            "replay", "--generate", "3", "--system-tokens", "9", *options, "--no-prefix-caching", "--json"
        ).stdout
    )
    assert report["settings"] == {
        "page_size": 8,
        "pages": 70,
        "concurrency": 3,
        "hash_algo": "sha256",
        "eviction_policy": "priority_lru",
        "prefix_caching": False,
        "host_pages": 0,
        "disk_pages": 0,
        "disk_dir": None,
    }


@pytest.mark.parametrize(("size", "pages"), [("100", 6), ("3x", 15), ("1.5x", 7)])
def test_host_memory_is_sized_in_tokens_or_in_pools(trace: Path, size: str, pages: int) -> None:
    report = run("replay", trace, "--page-size", "16", "--pages", "5", "--host", size, "--json")
    assert json.loads(report.stdout)["settings"]["host_pages"] == pages


@pytest.mark.parametrize(("options", "pages"), [(["--disk", "100"], 6), (["--disk", "3x"], 15), ([], 10)])
def test_a_disk_is_sized_in_tokens_or_in_pools(
    trace: Path, tmp_path: Path, options: list[str], pages: int
) -> None:
    options = ["--pages", "5", "--host", "1x", "--disk-dir", str(tmp_path / "kv"), *options]
    settings = json.loads(run("replay", trace, "--page-size", "16", *options, "--json").stdout)["settings"]
    assert (settings["disk_pages"], settings["disk_dir"]) == (pages, str(tmp_path / "kv"))


def test_a_second_replay_finds_on_disk_what_the_first_one_stored(tmp_path: Path) -> None:
    # Five prompts of two full blocks and a token. Three pages and four units hold two of them.
    prompts = [[start + token for token in range(9)] for start in range(0, 500, 100)]
    trace = tmp_path / "trace.jsonl"
    rows = [{"tokens": prompt, "output_length": 1, "salt": "tenant"} for prompt in prompts]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["--page-size", "4", "--pages", "3", "--concurrency", "1", "--host", "16", "--disk", "400"]
    options += ["--disk-dir", str(tmp_path / "kv"), "--json"]
    command = ["-m", "pagekeeper", "replay", str(trace), *options]
    first, second = (json.loads(python(*command).stdout) for _ in range(2))
    assert (first["hit_tokens"], first["host_hit_tokens"], first["disk_hit_tokens"]) == (0, 0, 0)
    assert first["disk_stored_blocks"] == 10
    assert (second["hit_tokens"], second["host_hit_tokens"], second["disk_hit_tokens"]) == (0, 0, 40)
    assert (second["disk_loaded_blocks"], second["disk_stored_blocks"]) == (10, 0)


def test_what_is_found_on_disk_and_in_host_memory_is_told_apart(tmp_path: Path) -> None:
    # Prompts of two full blocks and a token on three pages: each drives the others out of the device. Four
    # units hold the newest two; the first comes from disk, after that the third from host memory.
    prompts = [[start + token for token in range(9)] for start in (0, 100, 200, 0, 200)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps({'tokens': prompt, 'output_length': 1})}\n" for prompt in prompts))
    options = ["--page-size", "4", "--pages", "3", "--concurrency", "1", "--host", "16", "--disk", "400"]
    result = run("replay", trace, *options)
    lines = [" ".join(line.replace("━", "").split()) for line in result.stdout.splitlines()]
    for line in (
        "3 pages of 4 tokens and 4 in host memory and 100 on disk, 1 requests at a time,",
        "in host memory 8",
        "on disk 8",
        "written to disk 6",
        "read from there 2",
        "loaded from the tiers 4 each page checked",
    ):
        assert line in lines, result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_directory_of_another_cache_is_refused(trace: Path, tmp_path: Path) -> None:
    options = ["--pages", "9", "--host", "1x", "--disk-dir", str(tmp_path / "kv")]
    assert run("replay", trace, "--page-size", "4", *options).exit_code == 0
    result = run("replay", trace, "--page-size", "8", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "page_size is 4 there, 8 here" in " ".join(result.stderr.split())


def test_the_summary_says_what_host_memory_gave(tmp_path: Path) -> None:
    # Three pages of four: each prompt, two full blocks and a token, drives the other out of the device.
    prompts = [list(range(9)), list(range(50, 59)), list(range(9))]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps({'tokens': prompt, 'output_length': 1})}\n" for prompt in prompts))
    result = run("replay", trace, "--page-size", "4", "--pages", "3", "--concurrency", "1", "--host", "2x")
    lines = [" ".join(line.replace("━", "").split()) for line in result.stdout.splitlines()]
    for line in (
        "in host memory 8",
        "hit rate 29.6% of the tokens, 22.2% of the blocks",
        "on the device alone 0.0% of the tokens",
        "offloaded to the host 4",
        "evicted there 0",
        "loaded from there 2 each page checked",
    ):
        assert line in lines, result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_host_memory_that_this_machine_has_not_is_explained(trace: Path) -> None:
    result = run("replay", trace, "--page-size", "1048576", "--pages", "1", "--host", "67108864x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--host 67108864x: 67108864 pages of 8388608 bytes: " in result.stderr
    assert "may still be used" in result.stderr


def test_a_wrong_page_ends_with_status_one(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: object) -> None:
        raise WrongPageError("page 3 was given for block 0")

    monkeypatch.setattr("pagekeeper.cli.replay.run", find)
    result = run("replay", trace, "--host", "2x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the cache is wrong: page 3 was given for block 0" in result.stderr


def test_a_pool_in_tokens_is_rounded_down_to_pages(trace: Path) -> None:
    report = json.loads(run("replay", trace, "--page-size", "16", "--pool-tokens", "100", "--json").stdout)
    assert report["settings"]["pages"] == 6


def test_the_number_of_requests_can_be_limited(trace: Path) -> None:
    assert json.loads(run("replay", trace, "--requests", "1", "--json").stdout)["requests"] == 1


def test_several_traces_are_served_together(trace: Path) -> None:
    assert json.loads(run("replay", trace, trace, "--json").stdout)["requests"] == 4


def test_the_seed_changes_a_generated_chat() -> None:
    one, same, other = (
        json.loads(run("replay", "--generate", "5", "--seed", seed, "--json").stdout)["prompt_tokens"]
        for seed in ("1", "1", "2")
    )
    assert one == same != other


def test_a_bad_line_is_named_and_ends_with_status_two(trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"tokens": [1, "x"], "output_length": 1}\n')
    result = run("replay", trace, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{trace}:3: tokens[1]: " in result.stderr


def test_tables_beyond_memory_are_explained(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pagekeeper.cli.replay.run", run_out)
    result = run("replay", trace, "--pages", "70")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no memory for the tables of 32 requests of up to 70 pages" in result.stderr


def test_a_trace_without_requests_is_an_error(trace: Path) -> None:
    trace.write_text("")
    result = run("replay", trace, "--format", "tokens")
    assert (result.exit_code, result.stderr.strip()) == (2, "Error: the trace holds no request")


def test_the_format_can_be_forced(trace: Path) -> None:
    result = run("replay", trace, "--format", "mooncake")
    assert result.exit_code == 2
    assert f"{trace}:1: timestamp: missing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either a TRACE or --generate N"),
        (["TRACE", "--generate", "5"], "give either a TRACE or --generate N"),
        (["TRACE", "--users", "5"], "--users goes with --generate"),
        (["--generate", "5", "--format", "tokens"], "go with a TRACE"),
        (["--generate", "5", "--pages", "9", "--pool-tokens", "9"], "give either --pages or --pool-tokens"),
        (["--generate", "5", "--pool-tokens", "100"], "--pool-tokens 100: not one page of 128 tokens"),
        (["--generate", "5", "--pages", "99999999"], "pages=99999999: must be from 1 to 67108864"),
        (["--generate", "5", "--host", "4 GB"], "--host 4 GB: must be a number of tokens, or of pools"),
        (["--generate", "5", "--host", "100"], "--host 100: not one page of 128 tokens"),
        (
            ["--generate", "5", "--host", "2x", "--disk", "4 GB"],
            "--disk 4 GB: must be a number of tokens, or of",
        ),
        (["--generate", "5", "--disk", "2x"], "--disk goes with --host"),
        (["--generate", "5", "--disk-dir", "kv"], "--disk-dir goes with --host"),
        (["--generate", "5", "--host", "2x", "--no-prefix-caching"], "--host goes with the prefix cache"),
        (["--generate", "5", "--seed", "9223372036854775808"], "seed=9223372036854775808: must be from 0"),
        (["--generate", "0"], "0 is not in the range"),
        (["--generate", "5", "--hash-algo", "md5"], "'md5' is not one of 'ahash64', 'sha256', 'sha256_64'"),
        (["--generate", "5", "--policy", "mru"], "'mru' is not "),
        (["gone.jsonl"], "'gone.jsonl' does not exist"),
    ],
)
def test_a_wrong_use_is_explained_and_ends_with_status_two(
    trace: Path, arguments: list[str], complaint: str
) -> None:
    result = run("replay", *(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())


def test_the_version_is_the_package_s() -> None:
    assert run("--version").stdout.split()[-1] == importlib.metadata.version("pagekeeper")


def test_help_lists_the_commands_and_shows_an_example() -> None:
    text = run("--help").stdout
    assert "replay  Replay a request trace" in text
    assert "doctor  Check a disk tier" in text
    assert "pagekeeper replay --generate 1000" in text


def test_help_of_replay_shows_examples() -> None:
    assert "pagekeeper replay --generate 1000" in run("replay", "--help").stdout


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    done = python("-m", "pagekeeper", "replay", "--generate", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["requests"] == 5


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_libraries_the_command_says_how_to_get_them(missing: str) -> None:
    done = python("-c", f"import sys; sys.modules['{missing}'] = None; import pagekeeper.cli as c; c.main()")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"pagekeeper: the command line needs {missing}: pip install 'pagekeeper[cli]'\n"


def test_the_command_does_without_torch() -> None:
    done = python(
        "-c",
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['replay', '--generate', '5', '--json'];"
        "import pagekeeper.cli as c; c.main()",
    )
    assert done.returncode == 0, done.stderr
