"""Where configurations come from (CFG-3): the order of the places, and what is said of bad values."""

import json
import logging
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagekeeper import KVCacheConfig, KVConnectorConfig
from test_cache_config import DEFAULTS, FULL

CONNECTOR = {"type": "rust_tiered", "host_offload_max_gb": 2}
PLAIN: dict[str, Any] = FULL | {"window_size_shares": [0.25, 0.75], "kv_connector_config": CONNECTOR}
"""`FULL` as JSON and YAML have it."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*DEFAULTS, "kv_layout"]:
        monkeypatch.delenv(f"PAGEKEEPER_{name.upper()}", raising=False)


def as_text(value: Any) -> str:
    match value:
        case dict():
            return json.dumps(value)
        case list():
            return ",".join(map(str, value))
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def flags(given: dict[str, Any]) -> list[str]:
    return [it for name, value in given.items() for it in (f"--{name.replace('_', '-')}", as_text(value))]


def refused(argv: list[str], **given: Any) -> list[str]:
    with pytest.raises(ValueError, match=r".") as error:
        KVCacheConfig.from_args(argv, **given)
    return str(error.value).splitlines()


# The same from everywhere


def test_flags_environment_yaml_json_and_python_give_equal_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_json, in_yaml = tmp_path / "cache.json", tmp_path / "cache.yaml"
    in_json.write_text(json.dumps(PLAIN))
    in_yaml.write_text(yaml.safe_dump(PLAIN))
    found = [
        KVCacheConfig.from_args(flags(PLAIN)),
        KVCacheConfig.from_args(["--config", str(in_json)]),
        KVCacheConfig.from_args([f"--config={in_yaml}"]),
        KVCacheConfig.from_args([], **FULL),
    ]
    for name, value in PLAIN.items():
        monkeypatch.setenv(f"PAGEKEEPER_{name.upper()}", as_text(value))
    found.append(KVCacheConfig.from_args([]))
    assert found == [KVCacheConfig(**FULL)] * 5


def test_nothing_from_anywhere_gives_the_defaults() -> None:
    assert KVCacheConfig.from_args([]) == KVCacheConfig()


def test_a_configuration_made_in_python_reads_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_MAX_TOKENS", "5")
    assert KVCacheConfig().max_tokens is None


def test_the_command_line_of_the_process_is_read_without_one() -> None:
    program = "from pagekeeper import KVCacheConfig; print(KVCacheConfig.from_args().max_tokens)"
    command = [sys.executable, "-c", program, "--max-tokens", "7"]
    assert subprocess.run(command, check=True, text=True, capture_output=True).stdout == "7\n"


# The order


def test_python_goes_before_flags_before_the_environment_before_a_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.yml"
    file.write_text("{max_tokens: 1, kv_cache_page_size: 1, selective_min_hits: 1, event_buffer_max_size: 1}")
    for name in ("MAX_TOKENS", "KV_CACHE_PAGE_SIZE", "SELECTIVE_MIN_HITS"):
        monkeypatch.setenv(f"PAGEKEEPER_{name}", "2")
    argv = ["--config", str(file), "--max-tokens", "3", "--kv-cache-page-size=3"]
    config = KVCacheConfig.from_args(argv, max_tokens=4)
    assert (config.max_tokens, config.kv_cache_page_size) == (4, 3)
    assert (config.selective_min_hits, config.event_buffer_max_size) == (2, 1)
    assert config.default_retention_priority == 35


def test_of_a_flag_that_is_given_twice_the_last_one_counts() -> None:
    assert KVCacheConfig.from_args(["--max-tokens", "1", "--max-tokens", "2"]).max_tokens == 2


def test_a_connector_is_taken_whole_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache.json"
    file.write_text(json.dumps({"kv_connector_config": CONNECTOR}))
    monkeypatch.setenv("PAGEKEEPER_KV_CONNECTOR_CONFIG", '{"type": "rust_tiered", "num_copy_lanes": 2}')
    config = KVCacheConfig.from_args(["--config", str(file)])
    assert config.kv_connector_config == KVConnectorConfig(type="rust_tiered", num_copy_lanes=2)


# Text


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("--enable-prefix-caching", "no", "enable_prefix_caching", False),
        ("--enable-prefix-caching", "True", "enable_prefix_caching", True),
        ("--store-partial-tails", "0", "store_partial_tails", False),
        ("--default-retention-priority", "high", "default_retention_priority", 80),
        ("--default-retention-priority", "7", "default_retention_priority", 7),
        ("--device-memory-utilization", "1", "device_memory_utilization", 1.0),
        ("--max-tokens", "none", "max_tokens", None),
        ("--kv-cache-format", "null", "kv_cache_format", None),
        ("--window-size-shares", "[0.4, 0.6]", "window_size_shares", (0.4, 0.6)),
        ("--kv-connector-config", "none", "kv_connector_config", None),
        (
            "--kv-connector-config",
            "rust_tiered",
            "kv_connector_config",
            KVConnectorConfig(type="rust_tiered"),
        ),
    ],
)
def test_text_says_a_value_of_the_fields_type(flag: str, text: str, field: str, value: object) -> None:
    assert getattr(KVCacheConfig.from_args([flag, text]), field) == value


def test_a_variable_without_text_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_MAX_TOKENS", "")
    assert KVCacheConfig.from_args([]).max_tokens is None


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}"])
def test_a_file_may_say_nothing(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(content)
    assert KVCacheConfig.from_args(["--config", str(file)]) == KVCacheConfig()


# What is refused


def test_a_bad_value_is_told_with_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("max_tokens: many\n")
    monkeypatch.setenv("PAGEKEEPER_DEVICE_MEMORY_UTILIZATION", "1.5")
    argv = ["--config", str(file), "--kv-cache-page-size", "0"]
    assert sorted(refused(argv, layout="heap")) == [
        "device_memory_utilization=1.5: must be a number above 0 and up to 1 "
        "(from PAGEKEEPER_DEVICE_MEMORY_UTILIZATION)",
        "kv_cache_page_size=0: must be a whole number from 1 to 2**31 - 1 (from --kv-cache-page-size)",
        "layout='heap': must be one of 'auto', 'jenga', 'paged' (given in Python)",
        f"max_tokens='many': must be a whole number from 1 to 2**31 - 1, or None (from {file})",
    ]


@pytest.mark.parametrize("place", ["cache.yaml", "cache.json", "environment", "flag", "python"])
def test_a_bad_value_inside_another_is_told_by_its_full_name_with_where_it_comes_from(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = {"type": "rust_tiered", "num_disk_workers": 0}
    argv: list[str] = []
    given: dict[str, Any] = {}
    match place:
        case "cache.yaml" | "cache.json":
            file, write = tmp_path / place, yaml.safe_dump if place.endswith("yaml") else json.dumps
            file.write_text(write({"kv_connector_config": connector}))
            argv, origin = ["--config", str(file)], f"from {file}"
        case "environment":
            origin = "from PAGEKEEPER_KV_CONNECTOR_CONFIG"
            monkeypatch.setenv("PAGEKEEPER_KV_CONNECTOR_CONFIG", json.dumps(connector))
        case "flag":
            argv, origin = flags({"kv_connector_config": connector}), "from --kv-connector-config"
        case _:
            given, origin = {"kv_connector_config": connector}, "given in Python"
    said = "kv_connector_config.num_disk_workers=0: must be a whole number from 1 to 2**31 - 1"
    assert refused(argv, **given) == [f"{said} ({origin})"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "1e3"], "max_tokens='1e3': must be a whole number from 1 to 2**31 - 1, or None "),
        (["--enable-prefix-caching", "maybe"], "enable_prefix_caching='maybe': must be True or False "),
        (["--kv-cache-page-size", "none"], "kv_cache_page_size='none': must be a whole number from 1 "),
        (["--kv-connector-config", "{type: x}"], "kv_connector_config=<9 characters>: is no JSON object: "),
        (["--max-tokens", ""], "max_tokens='': must be a whole number "),
        (
            ["--kv-connector-config", '{"lanes": 1}'],
            "kv_connector_config.lanes: unknown; the fields are type",
        ),
        (["--kv-cache-hash-seed", "abc"], "kv_cache_hash_seed=<3 characters>: must be 64 hexadecimal digits"),
    ],
)
def test_text_that_says_no_value_of_the_field_is_refused(argv: list[str], said: str) -> None:
    (line,) = refused(argv)
    assert line.startswith(said)
    assert line.endswith(f"(from {argv[0]})")


@pytest.mark.parametrize("place", ["flag", "environment", "cache.yaml", "cache.json", "python"])
def test_what_would_need_replicas_is_refused_from_everywhere_and_the_default_is_not(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, variable = "attention_dp_events_gather_period_ms", "PAGEKEEPER_ATTENTION_DP_EVENTS_GATHER_PERIOD_MS"

    def asked(period: int) -> KVCacheConfig:
        argv: list[str] = []
        match place:
            case "python":
                return KVCacheConfig.from_args([], **{name: period})
            case "environment":
                monkeypatch.setenv(variable, str(period))
            case "flag":
                argv = flags({name: period})
            case file:
                (tmp_path / file).write_text(json.dumps({name: period}))
                argv = ["--config", str(tmp_path / file)]
        return KVCacheConfig.from_args(argv)

    origins = {"flag": f"from --{name.replace('_', '-')}", "environment": f"from {variable}"}
    origin = (origins | {"python": "given in Python"}).get(place, f"from {tmp_path / place}")
    assert asked(5) == KVCacheConfig()
    with pytest.raises(ValueError, match="replica") as error:
        asked(6)
    said = f"{name}=6: must be 5: there is one replica, no others' events to gather"
    assert str(error.value) == f"{said} ({origin})"


def test_fields_that_do_not_go_together_are_told_with_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_ENABLE_PREFIX_CACHING", "false")
    (line,) = refused(["--kv-connector-config", "rust_tiered"])
    assert line.startswith(
        "enable_prefix_caching=False: must be True for kv_connector_config.type='rust_tiered'"
    )
    assert line.endswith(
        "(enable_prefix_caching from PAGEKEEPER_ENABLE_PREFIX_CACHING, "
        "kv_connector_config from --kv-connector-config)"
    )


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["--kv-cache-pagesize", "64"],
            ["'--kv-cache-pagesize': unknown flag; did you mean --kv-cache-page-size?"],
        ),
        (["--kv-cache-page", "64"], ["'--kv-cache-page': unknown flag; did you mean --kv-cache-page-size?"]),
        (["--zzz=1", "--yyy"], ["'--zzz': unknown flag", "'--yyy': unknown flag"]),
        (["model"], ["'model': belongs to no flag"]),
        (["--max-tokens"], ["argument --max-tokens: expected one argument"]),
    ],
)
def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(argv: list[str], lines: list[str]) -> None:
    assert refused(argv) == lines


def test_an_engine_gets_its_own_flags_back() -> None:
    argv = ["serve", "--port", "80", "--max-tokens", "9", "--verbose"]
    config, rest = KVCacheConfig.from_known_args(argv)
    assert config == KVCacheConfig(max_tokens=9)
    assert rest == ["serve", "--port", "80", "--verbose"]


def test_an_unknown_key_of_a_file_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    file.write_text('{"page_size": 64, "kv_cache_page_sizes": 64}')
    assert refused(["--config", str(file)]) == [
        f"page_size: unknown; did you mean kv_cache_page_size? (from {file})",
        f"kv_cache_page_sizes: unknown; did you mean kv_cache_page_size? (from {file})",
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "[1, 2", "cannot be read as YAML or JSON: "),
        ("a.json", "{", "cannot be read as YAML or JSON: "),
        ("a.yaml", "[1, 2]", "must hold a mapping of fields to values"),
        ("a.json", "3", "must hold a mapping of fields to values"),
        ("a.yaml", b"\xff\xfe\x00", "cannot be read as YAML or JSON: "),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_its_name(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(["--config", str(file)])[0].startswith(f"--config '{file}': {said}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refused(["--config", f"{tmp_path}/no.yaml"]) == [
        f"--config '{tmp_path}/no.yaml': there is no such file"
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cache.yaml", "max_tokens: 3\nmax_tokens: 4\n"),
        ("cache.json", '{"max_tokens": 3, "max_tokens": 4}'),
        ("cache.yaml", "kv_connector_config:\n  max_tokens: 3\n  max_tokens: 4\n"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (line,) = refused(["--config", str(tmp_path / name)])
    assert "'max_tokens' is there twice" in line
    (line,) = refused(["--kv-connector-config", '{"type": "null", "type": "dkv"}'])
    assert line.endswith("'type' is there twice (from --kv-connector-config)")


BOMB = "a: &a [1, 2]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijkl")
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise("abcdefghijklmnop")
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", BOMB, "has more than 4096 values, those of aliases counted each time: line 5 column "),
        ("a.yaml", MERGES, "has more than 4096 values, those of aliases counted each time: line 10 column "),
        ("a.yaml", "max_tokens: &a [*a]", "an alias is in what it stands for: line 1 column 17"),
        ("a.yaml", f"max_tokens: {'[' * 32}", "is nested more than 32 deep: line 1 column 44"),
        ("a.yaml", "- " * 30_000, "is nested more than 32 deep: line 1 column "),
        ("a.json", f'{{"max_tokens": {"[" * 60_000}', "is nested too deeply"),
        ("a.json", f'{{"max_tokens": {"[" * 400}{"]" * 400}}}', "max_tokens="),
        ("a.yaml", " " * 2**16 + "x", "has more than 65536 bytes"),
        ("a.json", "[" * 2**16 + "x", "has more than 65536 bytes"),
        ("a.yaml", f"max_tokens: {':'.join(['1'] * 30_000)}", "max_tokens=an int of thousands of digits"),
        ("a.yaml", f"max_tokens: {':'.join(['1'] * 30_000)}.5", "is no float: line 1 column 13"),
        ("a.yaml", "max_tokens: !!int x", "is no int: line 1 column 13"),
        ("a.yaml", "max_tokens: !!int ''", "is no int: line 1 column 13"),
        ("a.yaml", "max_tokens: !!timestamp x", "is no timestamp: line 1 column 13"),
        ("a.yaml", "max_tokens: !!bool x", "is no bool: line 1 column 13"),
        ("a.yaml", "max_tokens: 2001-99-99", "is no timestamp: line 1 column 13"),
        ("a.yaml", "max_tokens: 3\0", "special characters are not allowed: character 14"),
        ("a.yaml", "max_tokens: *none", "found undefined alias: line 1 column 13"),
    ],
)
def test_a_file_that_would_take_long_to_read_or_says_no_value_is_refused_at_its_edge(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    began = time.perf_counter()
    (line,) = refused(["--config", str(tmp_path / name)])
    assert time.perf_counter() - began < 5
    assert said in line
    assert len(line) < 500


@pytest.mark.parametrize("number", ["5e-1", "5E-1", "0.5", "5.0e-1", "+0.05e1", "500e-3"])
def test_a_number_is_the_same_in_json_in_yaml_and_in_a_flag(number: str, tmp_path: Path) -> None:
    for name in ("cache.yaml", "cache.json"):
        (tmp_path / name).write_text(f'{{"device_memory_utilization": {number.lstrip("+")}}}')
        config = KVCacheConfig.from_args(["--config", str(tmp_path / name)])
        assert config.device_memory_utilization == 0.5
    assert KVCacheConfig.from_args(["--device-memory-utilization", number]) == config


@pytest.mark.parametrize("place", ["cache.yaml", "cache.json", "flag", "python"])
def test_no_connector_by_its_name_is_none(place: str, tmp_path: Path) -> None:
    (tmp_path / "cache.yaml").write_text("kv_connector_config: 'null'")
    (tmp_path / "cache.json").write_text('{"kv_connector_config": "null"}')
    argv = {"flag": ["--kv-connector-config", "null"], "python": []}.get(
        place, ["--config", str(tmp_path / place)]
    )
    given = {"kv_connector_config": "null"} if place == "python" else {}
    assert KVCacheConfig.from_args(argv, **given) == KVCacheConfig()


@pytest.mark.parametrize("argv", ["--max-tokens 3", ["--max-tokens", 3], [b"--max-tokens"], [None]])
def test_a_command_line_is_a_list_of_strings(argv: Any) -> None:
    with pytest.raises(TypeError, match="argv: must be a list of str"):
        KVCacheConfig.from_args(argv)


def test_a_file_may_have_as_much_as_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("max_tokens: 3".ljust(2**16))
    assert KVCacheConfig.from_args(["--config", str(file)]).max_tokens == 3
    file.write_text("{window_size_shares: [&half 0.5, *half]}")
    assert KVCacheConfig.from_args(["--config", str(file)]).window_size_shares == (0.5, 0.5)
    file.write_text(f"window_size_shares: [{', '.join(['1'] * 4093)}]")  # and the list, its key, the mapping
    assert len(KVCacheConfig.from_args(["--config", str(file)]).window_size_shares or ()) == 4093
    file.write_text(f"window_size_shares: [{', '.join(['1'] * 4094)}]")
    assert "has more than 4096 values" in refused(["--config", str(file)])[0]


def test_a_yaml_file_may_take_over_what_another_mapping_has(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("<<: {max_tokens: 3, selective_min_hits: 4}\nmax_tokens: 5\n")
    assert KVCacheConfig.from_args(["--config", str(file)]) == KVCacheConfig(
        max_tokens=5, selective_min_hits=4
    )


@pytest.mark.parametrize(
    ("name", "content"), [("cache.yaml", "max_tokens: 3"), ("cache.json", '{"max_tokens": 3}')]
)
def test_a_file_may_begin_with_a_mark_of_its_encoding(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert KVCacheConfig.from_args(["--config", str(tmp_path / name)]).max_tokens == 3


def test_a_name_that_no_file_can_have_is_refused() -> None:
    assert refused(["--config", "x" * 5000])[0].endswith("cannot be read: File name too long")
    assert refused(["--config", ""]) == ["--config '': there is no such file"]


def test_an_unknown_key_that_is_no_word_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("max-tokens: 3\n1: 2\n")
    assert [line.endswith(f"(from {file})") for line in refused(["--config", str(file)])] == [True, True]


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-cache-hash-sed=SECRET"],
        ["SECRET"],
        ["--kv-cache-hash-seed", "SECRET-"],
        ["--kv-connector-config", '{"type": "dkv", "block_store_endpoint": "tcp://me:SECRET@host"'],
        ["--kv-connector-config", '["tcp://me:SECRET@host"]'],
        ["--kv-connector-config", "tcp://me:SECRET@host"],
        ["--kv-connector-config", '{"type": "dkv", "block_store_endpoint": ["SECRET"]}'],
        ["--kv-connector-config", '{"type": "dkv", "block_store_endpoint": "SECRET\\u0000"}'],
    ],
)
def test_a_refusal_shows_no_secret(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "5ecf" * 16
    given = [it.replace("SECRET", secret) for it in argv]
    assert secret not in "".join(refused(given))
    if len(given) == 2:
        monkeypatch.setenv("PAGEKEEPER" + given[0][1:].replace("-", "_").upper(), given[1])
        assert secret not in "".join(refused([]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cache.yaml", "kv_cache_hash_seed: SECRET: x"),
        ("cache.yaml", "kv_cache_hash_seed: [SECRET\nx: }"),
        ("cache.yaml", "kv_cache_hash_seed: !odd SECRET"),
        ("cache.yaml", "kv_cache_hash_seed: *SECRET"),
        ("cache.yaml", "kv_cache_hash_seed: !SECRET x"),
        ("cache.yaml", "kv_cache_hash_seed: !SECRET!x y"),
        ("cache.yaml", "kv_cache_hash_seed: !'SECRET x"),
        ("cache.json", '{"kv_cache_hash_seed": "SECRET" x}'),
        ("cache.yaml", "kv_connector_config: [{block_store_endpoint: 'tcp://me:SECRET@host'}]"),
    ],
)
def test_a_refusal_of_a_file_shows_no_secret_of_it(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content.replace("SECRET", "5ecf" * 16))
    assert "5ecf" not in "".join(refused(["--config", str(tmp_path / name)]))


def test_a_variable_that_resembles_a_setting_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGEKEEPER_KV_CACHE_PAGESIZE", "64")
    monkeypatch.setenv("PAGEKEEPER_CPU", "portable")
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        assert KVCacheConfig.from_args([]).kv_cache_page_size == 128
    assert caplog.messages == [
        "PAGEKEEPER_KV_CACHE_PAGESIZE: no such setting; did you mean PAGEKEEPER_KV_CACHE_PAGE_SIZE?"
    ]


def test_help_tells_of_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        KVCacheConfig.from_args(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for name in [*DEFAULTS, "config"]:
        assert f"--{name.replace('_', '-')} " in said
    assert "(default: 128)" in said
