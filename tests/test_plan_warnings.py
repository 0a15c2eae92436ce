"""What plans warn of (case 57): prefixes that are found in large steps alone, where groups keep states."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pagekeeper as pk
from model.engine import claimed, compute, hit
from model.grouped import grouped
from pagekeeper.cli.app import app
from pagekeeper.params import FullAttention, Recurrent, Scratch, SlidingWindow
from pagekeeper.planning import plan_cache
from real_models import MODELS


def each(interval: int | None, *, last: bool = False) -> Recurrent:
    return Recurrent(interval, save_last_snapshot=last)


def manager(*states: Recurrent, page_size: int = 4, **options: Any) -> pk.PagedKVCacheManager:
    """Full attention beside groups of states, which are called "s0", "s1" and so on."""
    kinds = {"full": FullAttention()} | {f"s{number}": kind for number, kind in enumerate(states)}
    return grouped(kinds, 64, page_size, **options)


def warnings(kv: pk.PagedKVCacheManager) -> tuple[str, ...]:
    return plan_cache(kv.params, 2**22, 1).warnings


def stored(kv: pk.PagedKVCacheManager, length: int) -> None:
    """A prompt of so many tokens, in the chunks that the manager asks for."""
    ctx = claimed(kv, range(length))
    while ctx.processed_length < length:
        compute(kv, ctx, num_tokens=kv.chunk_tokens(ctx))
    kv.release(ctx)


def test_case_57_a_plan_says_that_prefixes_are_found_only_in_steps_of_4096_tokens() -> None:
    states = {f"s{interval}": each(interval) for interval in (128, 4096, 32, 8)}
    pages = {"full": 2100} | dict.fromkeys(states, 40)
    kv = grouped({"full": FullAttention()} | states, pages, page_size=2, max_seq_len=8192)
    assert warnings(kv) == (
        "prefixes are found only in steps of 4096 tokens: 's4096' keeps a state each 4096 tokens; a smaller "
        "snapshot_interval, or save_last_snapshot=True in all groups of states, would let more be found",
    )
    stored(kv, 2048)
    assert hit(kv, range(5000)) == 0
    stored(kv, 4097)
    assert {length: hit(kv, range(length)) for length in (4096, 4097, 5000)} == {
        4096: 0,
        4097: 4096,
        5000: 4096,
    }


ENDS = "at the last page boundary of an earlier prompt"


@pytest.mark.parametrize(
    ("states", "found", "at"),
    [
        # A prompt of 31 tokens: its last page boundary before its last token is at 28.
        ([each(8)], "in steps of 8 tokens", {8, 16, 24}),
        ([each(8), each(12)], "in steps of 24 tokens", {24}),
        ([each(12, last=True)], f"in steps of 12 tokens and {ENDS}", {12, 24, 28}),
        ([each(8, last=True), each(12, last=True)], f"in steps of 24 tokens and {ENDS}", {24, 28}),
        ([each(4), each(8, last=True)], f"in steps of 8 tokens and {ENDS}", {8, 16, 24, 28}),
        ([each(None, last=True)], ENDS, {28}),
        ([each(None, last=True), each(4)], ENDS, {28}),
        ([each(None, last=True), each(8)], f"{ENDS}, if that is a multiple of 8", set()),
        ([each(None, last=True), each(14 * 2)], f"{ENDS}, if that is a multiple of 28", {28}),
        (
            [each(8, last=True), each(12)],
            f"in steps of 24 tokens and {ENDS}, if that is a multiple of 12",
            {24},
        ),
        (
            [each(16, last=True), each(28)],
            f"in steps of 112 tokens and {ENDS}, if that is a multiple of 28",
            {28},
        ),
    ],
)
def test_prefixes_are_found_where_the_warning_says(states: list[Recurrent], found: str, at: set[int]) -> None:
    kv = manager(*states)
    (warning,) = warnings(kv)
    assert warning.split(":")[0] == f"prefixes are found only {found}"
    stored(kv, 31)
    assert {hit(kv, range(length)) for length in range(1, 40)} - {0} == at


def test_states_without_any_snapshot_are_told_of() -> None:
    kv = manager(each(None), each(8, last=True))
    assert warnings(kv) == (
        "no prefix is ever found: 's0' has no snapshot_interval; a snapshot_interval, or "
        "save_last_snapshot=True in all groups of states, would let more be found",
    )
    stored(kv, 31)
    assert {hit(kv, range(length)) for length in range(1, 40)} == {0}


@pytest.mark.parametrize(
    ("states", "said"),
    [
        # Who keeps a state often enough for another's interval is not named.
        (
            [each(4, last=True), each(16, last=True), each(8, last=True)],
            "'s1' keeps a state each 16 tokens; a smaller snapshot_interval would let more be found",
        ),
        (
            [each(4, last=True), each(8, last=True), each(12, last=True)],
            "'s1' keeps a state each 8 tokens, 's2' keeps a state each 12 tokens; snapshot intervals "
            "that divide one another would let more be found",
        ),
        (
            [each(16, last=True), each(16)],
            "'s0' keeps a state each 16 tokens, 's1' keeps a state each 16 tokens; a smaller "
            "snapshot_interval, or save_last_snapshot=True in all groups of states, would let more be found",
        ),
        (
            [each(None, last=True), each(8, last=True)],
            "'s0' has no snapshot_interval; a snapshot_interval would let more be found",
        ),
    ],
)
def test_a_warning_names_the_groups_that_make_it_so_and_what_would_help(
    states: list[Recurrent], said: str
) -> None:
    (warning,) = warnings(manager(*states))
    assert warning.partition(": ")[2] == said


@pytest.mark.parametrize("states", [[each(4)], [each(4, last=True), each(4)], []])
def test_where_every_page_is_found_nothing_is_said(states: list[Recurrent]) -> None:
    assert warnings(manager(*states)) == ()


def test_where_nothing_is_kept_for_others_nothing_is_said_of_it() -> None:
    assert warnings(manager(each(64), each(None), enable_prefix_caching=False)) == ()
    kinds = {"full": FullAttention(), "window": SlidingWindow(64), "scratch": Scratch()}
    assert warnings(grouped(kinds)) == ()


def test_a_single_group_of_states_goes_by_its_type() -> None:
    kv = manager(each(64, last=True))
    plan = plan_cache(kv.params["s0"], 2**20, 1)  # type: ignore[index]
    assert plan.warnings == (
        f"prefixes are found only in steps of 64 tokens and {ENDS}: 'recurrent' keeps a state each 64 "
        "tokens; a smaller snapshot_interval would let more be found",
    )


# From a shell

STEPS = (
    f"prefixes are found only in steps of 1024 tokens and {ENDS}: 'states' keeps a state each 1024 tokens; a "
    "smaller snapshot_interval would let more be found"
)
NO_STEPS = (
    f"prefixes are found only {ENDS}: 'states' has no snapshot_interval; a snapshot_interval would let more "
    "be found"
)


@pytest.fixture
def jamba(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Jamba-v0.1"].config))
    return file


def run(*arguments: object) -> Result:
    given = [*map(str, arguments), "--kv-memory", "40GiB", "--max-model-len", "4096"]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["plan", *given])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], [NO_STEPS]),
        (["--snapshot-interval", 1024], [STEPS]),
        (["--snapshot-interval", 1024, "--enable-partial-reuse", "no"], [STEPS]),
        (["--snapshot-interval", 128], []),
        (["--snapshot-interval", 1024, "--enable-prefix-caching", "no"], []),
    ],
)
def test_the_command_prints_warnings_and_has_them_in_json(
    options: list[object], said: list[str], jamba: Path
) -> None:
    told = run(jamba, *options, "--json")
    assert json.loads(told.stdout)["warnings"] == said, told.output
    printed = " ".join(run(jamba, *options).stdout.split())
    assert printed.count("Warning: ") == len(said)
    assert all(f"Warning: {warning}." in printed for warning in said)


def test_an_interval_that_is_no_multiple_of_the_page_size_is_refused(jamba: Path) -> None:
    result = run(jamba, "--snapshot-interval", 100)
    assert result.exit_code == 2
    assert "snapshot_interval=100: must be a multiple of page_size=128" in result.stderr
