"""Trace files: what each format is read as, and how a line that breaks it is named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagekeeper.traces import TraceError, TraceRequest, read_trace


def mooncake(ids: Sequence[int], length: int, **changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": 3, "hash_ids": list(ids)} | changes


def agent(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | changes


def turn(ids: Sequence[int], length: int, **changes: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "n", "in": length, "out": 3, "hash_ids": list(ids)} | changes


class Folder:
    """A folder of trace files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, *rows: object, name: str = "trace.jsonl") -> Path:
        file = self.path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def read(self, *rows: object, name: str = "trace.jsonl", **options: Any) -> list[TraceRequest]:
        return list(read_trace([self.lines(*rows, name=name)], **options))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# Mooncake


def test_a_mooncake_line_gives_lengths_in_tokens_and_arrival_in_seconds(folder: Folder) -> None:
    (request,) = folder.read(mooncake([4, 9], 700, timestamp=1500, output_length=21))
    assert (len(request.prompt), len(request.output)) == (700, 21)
    assert (request.arrival_s, request.session, request.salt) == (1.5, None, None)


def test_tokens_are_int32_and_as_many_as_announced(folder: Folder) -> None:
    (request,) = folder.read(mooncake([4, 9], 700))
    for source, length in ((request.prompt, 700), (request.output, 3)):
        tokens = source.array()
        assert tokens.dtype == np.int32
        assert tokens.shape == (length,)
        assert tokens.min() >= 0


def test_equal_ids_give_equal_tokens_up_to_the_first_id_that_differs(folder: Folder) -> None:
    first, second = (
        request.prompt.array() for request in folder.read(mooncake([7, 8], 1024), mooncake([7, 9], 1024))
    )
    assert np.array_equal(first[:512], second[:512])
    assert not (first[512:] == second[512:]).any()


def test_one_id_at_two_places_gives_the_same_tokens(folder: Folder) -> None:
    (request,) = folder.read(mooncake([7, 7], 1024))
    assert np.array_equal(request.prompt.array()[:512], request.prompt.array()[512:])


def test_a_partial_block_is_the_beginning_of_the_whole_one(folder: Folder) -> None:
    whole, partial = folder.read(mooncake([7, 8], 1024), mooncake([7, 8], 600))
    assert np.array_equal(whole.prompt.array()[:600], partial.prompt.array())


def test_the_size_of_a_hash_block_can_be_given(folder: Folder) -> None:
    first, second = folder.read(mooncake([7, 8], 32), mooncake([7, 9], 32), hash_block_size=16)
    assert np.array_equal(first.prompt.array()[:16], second.prompt.array()[:16])
    assert not (first.prompt.array()[16:] == second.prompt.array()[16:]).any()


def test_outputs_are_of_their_request_alone(folder: Folder) -> None:
    first, second = folder.read(mooncake([7], 512, output_length=512), mooncake([7], 512, output_length=512))
    texts = [first.prompt.array(), first.output.array(), second.output.array()]
    assert not any((one == other).any() for one, other in ((texts[0], texts[1]), (texts[1], texts[2])))


def test_a_trace_read_twice_gives_the_same_tokens(folder: Folder) -> None:
    file = folder.lines(mooncake([7, 8], 600))
    (first,), (second,) = list(read_trace([file])), list(read_trace([file]))
    assert np.array_equal(first.prompt.array(), second.prompt.array())
    assert np.array_equal(first.output.array(), second.output.array())


def test_tokens_are_not_made_before_they_are_asked_for(folder: Folder) -> None:
    (request,) = folder.read(mooncake([7], 512, output_length=2**31 - 1))
    assert len(request.output) == 2**31 - 1


def test_blank_lines_are_skipped(folder: Folder) -> None:
    file = folder.path / "trace.jsonl"
    file.write_text(f"\n{json.dumps(mooncake([1], 5))}\n\n  \n{json.dumps(mooncake([2], 6))}")
    assert [len(request.prompt) for request in read_trace([file])] == [5, 6]


# Agent sessions


def test_an_agent_file_is_one_session_in_order_of_time(folder: Folder) -> None:
    requests = folder.read(agent(turn([1, 2], 130, t=9.5, out=40), turn([1], 64)), name="a.json")
    assert [(r.arrival_s, len(r.prompt), len(r.output)) for r in requests] == [(0.0, 64, 3), (9.5, 130, 40)]
    assert requests[0].session == requests[1].session is not None


def test_the_rest_of_a_prompt_beyond_its_ids_is_of_its_request_alone(folder: Folder) -> None:
    first, second = folder.read(agent(turn([1, 2], 191), turn([1, 2], 191)), name="a.json")
    assert np.array_equal(first.prompt.array()[:128], second.prompt.array()[:128])
    assert not (first.prompt.array()[128:] == second.prompt.array()[128:]).any()


def test_an_agent_file_may_name_the_partial_block_too(folder: Folder) -> None:
    first, second = folder.read(agent(turn([1, 2], 100), turn([1, 2], 100)), name="a.json")
    assert np.array_equal(first.prompt.array(), second.prompt.array())


def test_an_agent_file_says_how_large_its_blocks_are(folder: Folder) -> None:
    first, second = folder.read(agent(turn([1, 2], 20), turn([1, 3], 20), block_size=10), name="a.json")
    assert (first.prompt.array() == second.prompt.array()).sum() == 10


def test_ids_of_two_agent_files_are_different_texts(folder: Folder) -> None:
    files = [folder.lines(agent(turn([1], 64)), name=name) for name in ("a.json", "b.json")]
    first, second = read_trace(files)
    assert not (first.prompt.array() == second.prompt.array()).any()
    assert first.session != second.session


def test_global_ids_are_the_same_texts_in_every_file(folder: Folder) -> None:
    files = [
        folder.lines(agent(turn([1], 120), hash_id_scope="global"), name=name)
        for name in ("a.json", "b.json")
    ]
    first, second = (request.prompt.array() for request in read_trace(files))
    assert np.array_equal(first[:64], second[:64])
    assert not (first[64:] == second[64:]).any()


def test_a_subagent_counts_time_from_its_start_and_is_a_session_of_its_own(folder: Folder) -> None:
    inner = {"t": 10.0, "type": "subagent", "requests": [turn([1, 8], 128, t=2.0)]}
    before, inside, after = folder.read(agent(turn([1], 64), inner, turn([1, 2], 128, t=20.0)), name="a.json")
    assert [before.arrival_s, inside.arrival_s, after.arrival_s] == [0.0, 12.0, 20.0]
    assert before.session == after.session != inside.session
    assert np.array_equal(before.prompt.array(), inside.prompt.array()[:64])


def test_an_agent_file_over_several_lines_is_recognised(folder: Folder) -> None:
    file = folder.path / "a.json"
    file.write_text(json.dumps(agent(turn([1], 64)), indent=2))
    assert [len(request.prompt) for request in read_trace([file])] == [64]


# Tokens


def test_a_token_line_is_taken_as_it_stands(folder: Folder) -> None:
    (request,) = folder.read(
        {"tokens": [5, -1, 7], "output_tokens": [8, 9], "timestamp": 250, "salt": "blue"}
    )
    assert (request.prompt.array().tolist(), request.output.array().tolist()) == ([5, -1, 7], [8, 9])
    assert (request.arrival_s, request.salt) == (0.25, "blue")


def test_a_token_line_without_a_time_has_the_time_of_the_line_above(folder: Folder) -> None:
    rows = [{"tokens": [1], "output_length": 1} for _ in range(3)]
    rows[1] |= {"timestamp": 400}
    assert [request.arrival_s for request in folder.read(*rows)] == [0.0, 0.4, 0.4]


# Several files


def test_files_are_merged_by_arrival_time(folder: Folder) -> None:
    one = folder.lines(mooncake([1], 10), mooncake([1], 11, timestamp=3000), name="one.jsonl")
    two = folder.lines({"tokens": [1] * 12, "output_length": 1, "timestamp": 2000}, name="two.jsonl")
    three = folder.lines(agent(turn([], 13, t=2.5)), name="three.json")
    assert [len(request.prompt) for request in read_trace([one, two, three])] == [10, 12, 13, 11]


def test_ids_of_two_mooncake_files_are_different_texts(folder: Folder) -> None:
    files = [folder.lines(mooncake([1], 512), name=name) for name in ("a.jsonl", "b.jsonl")]
    first, second = (request.prompt.array() for request in read_trace(files))
    assert not (first == second).any()


def test_a_directory_stands_for_its_json_and_jsonl_files(folder: Folder) -> None:
    folder.lines(mooncake([1], 10), name="b.jsonl")
    folder.lines(agent(turn([], 11)), name="a.json")
    (folder.path / "README").write_text("not a trace")
    assert sorted(len(request.prompt) for request in read_trace([folder.path])) == [10, 11]


def test_a_directory_without_traces_is_an_error(folder: Folder) -> None:
    with pytest.raises(TraceError, match=r"holds no \.json or \.jsonl file"):
        list(read_trace([folder.path]))


def test_a_missing_file_is_an_error(folder: Folder) -> None:
    with pytest.raises(TraceError, match=r"gone\.jsonl: cannot be read: No such file"):
        list(read_trace([folder.path / "gone.jsonl"]))


# What is wrong, and where


@pytest.mark.parametrize(
    ("changes", "field", "what"),
    [
        ({"timestamp": -1}, "timestamp", "-1 given; allowed is a number from 0"),
        ({"timestamp": float("nan")}, "timestamp", "NaN given"),
        ({"timestamp": "0"}, "timestamp", '"0" given'),
        ({"input_length": 0}, "input_length", "0 given; allowed is an integer from 1 to 2147483647"),
        ({"input_length": 600.0}, "input_length", "600.0 given"),
        ({"input_length": True}, "input_length", "true given"),
        (
            {"input_length": 1025},
            "hash_ids",
            "2 ids given; allowed is 3 ids for 1025 tokens in blocks of 512",
        ),
        ({"input_length": 512}, "hash_ids", "2 ids given; allowed is 1 ids"),
        ({"output_length": -5}, "output_length", "-5 given; allowed is an integer from 0"),
        ({"output_length": 2**31}, "output_length", "2147483648 given"),
        ({"hash_ids": None}, "hash_ids", "null given; allowed is a list of integers"),
        ({"hash_ids": [1, "2"]}, r"hash_ids\[1\]", '"2" given; allowed is an integer from 0'),
        ({"hash_ids": [-1, 2]}, r"hash_ids\[0\]", "-1 given"),
        ({"hash_ids": [1, 2**63]}, r"hash_ids\[1\]", "9223372036854775808 given"),
        ({"timestamp": 5}, "timestamp", "5 given; allowed is at least 7000, the line above's"),
    ],
)
def test_a_bad_mooncake_field_is_named_with_its_line(
    folder: Folder, changes: dict[str, Any], field: str, what: str
) -> None:
    good = mooncake([1, 2], 600, timestamp=7000)
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {field}: {what}"):
        folder.read(good, good | changes)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_mooncake_field_is_named_with_its_line(folder: Folder, field: str) -> None:
    bad = mooncake([1, 2], 600)
    del bad[field]
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {field}: missing; needed is "):
        folder.read(mooncake([1, 2], 600), bad)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"in": 64}, "hash_ids", "2 ids given; allowed is 1 ids for the whole blocks of 64 in 64 tokens"),
        ({"in": 192}, "hash_ids", "2 ids given; allowed is 3 ids"),
        ({"in": 0}, "in", "0 given"),
        ({"out": None}, "out", "null given"),
        ({"t": -0.5}, "t", "-0.5 given"),
        ({"hash_ids": [1, 1.5]}, r"hash_ids\[1\]", "1.5 given"),
        ({"type": 3}, "type", "3 given; allowed is a string"),
        ({"type": "subagent"}, "requests", "missing; needed is a list of JSON objects"),
        ({"type": "subagent", "requests": [turn([], 0)]}, r"requests\[0\]: in", "0 given"),
        ({"type": "subagent", "requests": ["x"]}, r"requests\[0\]", '"x" given; allowed is a JSON object'),
    ],
)
def test_a_bad_agent_field_is_named_with_its_place(
    folder: Folder, changes: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(TraceError, match=rf"a\.json: requests\[1\]: {where}: {what}"):
        folder.read(agent(turn([1], 64), turn([1, 2], 130) | changes), name="a.json")


@pytest.mark.parametrize(
    ("changes", "field", "what"),
    [
        ({"hash_id_scope": "world"}, "hash_id_scope", "\"world\" given; allowed is 'local' or 'global'"),
        ({"block_size": 0}, "block_size", "0 given"),
        ({"requests": {}}, "requests", "{} given; allowed is a list of JSON objects"),
    ],
)
def test_a_bad_agent_heading_is_named(folder: Folder, changes: dict[str, Any], field: str, what: str) -> None:
    with pytest.raises(TraceError, match=rf"a\.json: {field}: {what}"):
        folder.read(agent(turn([1], 64)) | changes, name="a.json")


@pytest.mark.parametrize(
    ("row", "field", "what"),
    [
        ({"tokens": [], "output_length": 1}, "tokens", r"\[\] given; allowed is at least one token"),
        ({"tokens": [1, 2**31], "output_length": 1}, r"tokens\[1\]", "2147483648 given"),
        ({"tokens": [1.0], "output_length": 1}, r"tokens\[0\]", "1.0 given"),
        ({"tokens": [True], "output_length": 1}, r"tokens\[0\]", "true given"),
        ({"tokens": [1]}, "output_length", "missing"),
        (
            {"tokens": [1], "output_tokens": [1, 2], "output_length": 3},
            "output_length",
            "3 given; allowed is 2",
        ),
        ({"tokens": [1], "output_tokens": 5}, "output_tokens", "5 given; allowed is a list of integers"),
        ({"tokens": [1], "output_length": 1, "salt": 5}, "salt", "5 given; allowed is a string"),
    ],
)
def test_a_bad_token_field_is_named_with_its_line(
    folder: Folder, row: dict[str, Any], field: str, what: str
) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {field}: {what}"):
        folder.read({"tokens": [1], "output_length": 1}, row)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"timestamp": 0,', r"trace\.jsonl:2: not JSON: .* at column \d+"),
        (b'{"timestamp": 0\xff}', r"trace\.jsonl:2: not JSON: "),
        (b"[" * 100_000, r"trace\.jsonl:2: not JSON: "),
        (b"[1, 2]", r"trace\.jsonl:2: \[1, 2\] given; allowed is a JSON object"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(folder: Folder, content: bytes, what: str) -> None:
    file = folder.lines(mooncake([1], 5))
    file.write_bytes(file.read_bytes() + content)
    with pytest.raises(TraceError, match=what):
        list(read_trace([file]))


def test_a_json_file_that_breaks_off_is_named_with_the_line(folder: Folder) -> None:
    file = folder.path / "a.json"
    file.write_text('{\n  "requests": [\n    {"t": 0,\n')
    with pytest.raises(TraceError, match=r"a\.json:4: not JSON: "):
        list(read_trace([file]))


@pytest.mark.parametrize("row", [{"prompt": "hello"}, [1], None])
def test_a_file_of_no_known_format_is_an_error_that_lists_the_formats(folder: Folder, row: object) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: no known format; .*mooncake.*agent.*tokens"):
        folder.read(row)


def test_a_forced_format_is_not_guessed(folder: Folder) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: tokens: missing"):
        folder.read(mooncake([1], 5), format="tokens")


# Real traces, against what is published of them


def test_the_conversation_trace_has_its_published_size(shared_dir: Path) -> None:
    requests = list(read_trace([shared_dir / "traces" / "mooncake_conversation_trace.jsonl"]))
    assert len(requests) == 12_031
    assert round(sum(len(request.prompt) for request in requests) / 12_031) == 12_035
    assert round(sum(len(request.output) for request in requests) / 12_031) == 343


def test_agent_sessions_have_the_totals_that_they_state(shared_dir: Path) -> None:
    files = sorted((shared_dir / "traces" / "agent").glob("*.json"))
    assert files
    for file in files:
        stated = json.loads(file.read_text())["totals"]["parent_tokens"]
        requests = list(read_trace([file]))
        assert sum(len(request.prompt) for request in requests) == stated["input"]
        assert sum(len(request.output) for request in requests) == stated["output"]
