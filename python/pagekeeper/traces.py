"""Request traces: files of several formats, read into one form.

A trace says how long each prompt is and which parts of it equal parts of other prompts; it seldom holds the
tokens. Tokens are therefore made when they are asked for: a named part from its name, so that equal names
give equal tokens, and a part without a name from a name of its own, so that nothing is found in the cache
that the trace does not show to be equal.

- `mooncake`: JSON lines `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`, one id
  for each block of 512 tokens of the prompt, the last one often partial.
- `agent`: a JSON object per file, one coding session: `{"block_size": 64, "requests": [{"t": s, "in": n,
  "out": n, "hash_ids": [...]}, ...]}`, one id for each whole block; the rest of the prompt has no id. An
  entry of type "subagent" holds `requests` of its own, whose times count from its `t`.
- `tokens`: JSON lines `{"tokens": [...], "output_length": n}`, and optionally `"timestamp"` in ms, `"salt"`
  (a string) and `"output_tokens"`.

Ids are local to their file, unless an agent file says `"hash_id_scope": "global"`. Other fields are ignored.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["FORMATS", "KnownTokens", "NamedTokens", "TokenSource", "TraceError", "TraceRequest", "read_trace"]

FORMATS = ("mooncake", "agent", "tokens")
"""The names of the trace formats."""

_MOONCAKE_BLOCK = 512
_AGENT_BLOCK = 64
_GLOBAL_SPACE = -1
_REST, _OUTPUT = range(2)
_TOKEN_RANGE = (-(2**31), 2**31 - 1)
_ID_RANGE = (0, 2**63 - 1)
_LONGEST = 2**31 - 1
_LATEST = 1e15


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the line and the field, and what is allowed."""


class TokenSource(Protocol):
    """Tokens that are made when they are asked for."""

    def __len__(self) -> int:
        """How many tokens there are, without making them."""

    def array(self) -> npt.NDArray[np.int32]:
        """The tokens, int32[len]; equal at every call."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTokens:
    """Tokens that are given, int32[n]."""

    tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)

    def array(self) -> npt.NDArray[np.int32]:
        """The tokens themselves, int32[len]."""
        return self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class NamedTokens:
    """Tokens made from names: part i is the beginning of the endless pseudo-random text `ids[i]`.

    Args:
        space: what the ids are local to; equal ids of two spaces are different texts.
        ids: int64[n].
        lengths: int64[n], the tokens of each part.
    """

    space: int
    ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, space: int, *parts: tuple[int, int]) -> NamedTokens:
        """The parts, each an id and a length in tokens, one after the other."""
        ids, lengths = np.array(parts, np.int64).reshape(-1, 2).T
        return cls(space, ids, lengths)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def array(self) -> npt.NDArray[np.int32]:
        """The tokens, int32[len], 0 to 2**31 - 1."""
        position = np.arange(len(self)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        texts = mixed(mixed(_spread(np.array([self.space]))) + _spread(self.ids))
        return (mixed(np.repeat(texts, self.lengths) + _spread(position)) >> np.uint64(33)).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the start of its file; merged files are ordered by it.
        prompt: the tokens of the prompt, at least one.
        output: the tokens that the model answers with, possibly none.
        session: what the request belongs to; requests of one session are served one after the other.
        salt: the cache salt; requests of different salts share nothing.
    """

    arrival_s: float
    prompt: TokenSource
    output: TokenSource
    session: str | None = None
    salt: str | None = None


def read_trace(
    paths: Sequence[Path], *, format: str | None = None, hash_block_size: int | None = None
) -> Iterator[TraceRequest]:
    """Read trace files, merged by arrival time; one request of a JSON lines file is held at a time.

    Args:
        paths: files, or directories of which every `.json` and `.jsonl` file is read.
        format: one of :data:`FORMATS`; `None` recognises each file by its content.
        hash_block_size: tokens that one hash id names, for exports that differ from their format's usual size
            (Mooncake 512; an agent file names its own, else 64).

    Raises:
        TraceError: a file cannot be read, or holds something that its format does not allow.
    """
    streams = [
        _read_file(file, index, format or _recognise(file), hash_block_size)
        for index, file in enumerate(_files(paths))
    ]
    return heapq.merge(*streams, key=attrgetter("arrival_s"))


def _spread(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return numbers.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every bit counts."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
            if not inside:
                raise TraceError(f"{path}: the directory holds no .json or .jsonl file")
            files += inside
        else:
            files.append(path)
    return files


def _recognise(file: Path) -> str:
    """A file's format, told by the keys of its first JSON object."""
    line, content = next(_lines(file), (1, b"null"))
    try:
        record = _parse(file, line, content)
    except TraceError:
        if file.suffix == ".json":  # an object over several lines
            return "agent"
        raise
    keys = set(record) if isinstance(record, dict) else set()
    for format, marks in (
        ("agent", {"requests"}),
        ("tokens", {"tokens"}),
        ("mooncake", {"input_length", "hash_ids"}),
    ):
        if marks & keys:
            return format
    raise TraceError(
        f"{file}:{line}: no known format; allowed is a JSON object with 'input_length' and 'hash_ids' "
        "(mooncake), 'requests' (agent) or 'tokens' (tokens)"
    )


def _read_file(file: Path, index: int, format: str, hash_block_size: int | None) -> Iterator[TraceRequest]:
    if format == "agent":
        yield from _read_agent(file, index, hash_block_size or _AGENT_BLOCK)
        return
    previous = 0.0
    for number, content in _lines(file):
        row = _Row(f"{file}:{number}", _parse(file, number, content))
        if format == "mooncake":
            request = _mooncake_request(row, index, number, hash_block_size or _MOONCAKE_BLOCK)
        else:
            request = _token_request(row, index, number, previous)
        if request.arrival_s < previous:
            row.refuse(
                "timestamp", f"at least {previous * 1000:g}, the line above's; a trace is in order of time"
            )
        previous = request.arrival_s
        yield request


def _mooncake_request(row: _Row, file_index: int, line: int, block: int) -> TraceRequest:
    arrival_s = row.time("timestamp") / 1000
    length = row.length("input_length", 1)
    ids = row.integers("hash_ids", _ID_RANGE, np.int64)
    if len(ids) != -(-length // block):
        row.refuse(
            "hash_ids",
            f"{-(-length // block)} ids for {length} tokens in blocks of {block}",
            f"{len(ids)} ids",
        )
    prompt = _prompt(file_index, ids, block, length, _unnamed(file_index, line, _REST))
    return TraceRequest(arrival_s, prompt, _output(file_index, line, row.length("output_length", 0)))


def _token_request(row: _Row, file_index: int, line: int, previous_s: float) -> TraceRequest:
    prompt = row.integers("tokens", _TOKEN_RANGE, np.int32)
    if not len(prompt):
        row.refuse("tokens", "at least one token")
    output: TokenSource
    if "output_tokens" in row.values:
        output = KnownTokens(row.integers("output_tokens", _TOKEN_RANGE, np.int32))
        if row.length("output_length", 0, len(output)) != len(output):
            row.refuse("output_length", f"{len(output)}, the length of output_tokens")
    else:
        output = _output(file_index, line, row.length("output_length", 0))
    arrival_s = row.time("timestamp", previous_s * 1000) / 1000
    return TraceRequest(arrival_s, KnownTokens(prompt), output, salt=row.text("salt"))


def _read_agent(file: Path, index: int, default_block: int) -> Iterator[TraceRequest]:
    with _opened(file) as opened:
        session = _Row(str(file), _parse(file, 1, opened.read()))
    scope = session.text("hash_id_scope") or "local"
    if scope not in ("local", "global"):
        session.refuse("hash_id_scope", "'local' or 'global'")
    block = session.length("block_size", 1, default_block)
    requests: list[TraceRequest] = []
    unread = [(session, 0.0, str(file))]
    while unread:
        owner, start_s, thread = unread.pop()
        for row in owner.rows("requests"):
            arrival_s = start_s + row.time("t")
            if row.text("type") == "subagent":
                unread.append((row, arrival_s, row.where))
                continue
            length = row.length("in", 1)
            ids = row.integers("hash_ids", _ID_RANGE, np.int64)
            if not length // block <= len(ids) <= -(-length // block):
                allowed = f"{length // block} ids for the whole blocks of {block} in {length} tokens"
                row.refuse("hash_ids", allowed, f"{len(ids)} ids")
            space = _GLOBAL_SPACE if scope == "global" else index
            prompt = _prompt(space, ids, block, length, _unnamed(index, len(requests), _REST))
            output = _output(index, len(requests), row.length("out", 0))
            requests.append(TraceRequest(arrival_s, prompt, output, thread))
    yield from sorted(requests, key=attrgetter("arrival_s"))


def _prompt(space: int, ids: npt.NDArray[np.int64], block: int, length: int, rest: int) -> NamedTokens:
    """Named blocks, the last cut to fit `length` tokens; what no id covers is the text `rest`."""
    lengths = np.minimum(block, length - block * np.arange(len(ids)))
    uncovered = length - block * len(ids)
    if uncovered > 0:
        ids, lengths = np.append(ids, rest), np.append(lengths, uncovered)
    return NamedTokens(space, ids, lengths)


def _output(file_index: int, request: int, length: int) -> NamedTokens:
    return NamedTokens.of(file_index, (_unnamed(file_index, request, _OUTPUT), length))


def _unnamed(file_index: int, request: int, part: int) -> int:
    """The id of a text that the trace does not name: below every id that it does, and no other request's."""
    return -1 - (file_index << 40 | request << 1 | part)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    with _opened(file) as opened:
        for number, content in enumerate(opened, 1):
            if stripped := content.strip():
                yield number, stripped


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as opened:
            yield opened
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from None


def _parse(file: Path, first_line: int, content: bytes) -> Any:
    """The JSON value of `content`, whose first line is line `first_line` of the file."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise TraceError(f"{file}:{line}: not JSON: {error.msg} at column {error.colno}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, a number of thousands of digits, nested too deeply
        raise TraceError(f"{file}:{first_line}: not JSON: {error}") from None


class _Row:
    """A JSON object of a trace, whose fields are checked as they are read; `where` names it in errors."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise TraceError(f"{where}: {_shown(values)} given; allowed is a JSON object")
        self.where = where
        self.values: dict[str, Any] = values

    def length(self, field: str, least: int, default: int | None = None) -> int:
        """A number of tokens."""
        allowed = f"an integer from {least} to {_LONGEST}"
        value = self._get(field, default, allowed)
        if type(value) is not int or not least <= value <= _LONGEST:
            self.refuse(field, allowed)
        return value

    def time(self, field: str, default: float | None = None) -> float:
        """A time in the trace's own unit."""
        allowed = f"a number from 0 to {_LATEST:g}"
        value = self._get(field, default, allowed)
        if type(value) not in (int, float) or not 0 <= value <= _LATEST:
            self.refuse(field, allowed)
        return float(value)

    def text(self, field: str) -> str | None:
        """A string, or None where there is none."""
        value = self.values.get(field)
        if not isinstance(value, str | None):
            self.refuse(field, "a string")
        return value

    def integers(self, field: str, limits: tuple[int, int], dtype: type[Any]) -> npt.NDArray[Any]:
        """A list of integers from limits[0] to limits[1], as an array."""
        low, high = limits
        values = self._get(field, None, "a list of integers")
        if not isinstance(values, list):
            self.refuse(field, "a list of integers")
        for index, value in enumerate(values):
            if type(value) is not int or not low <= value <= high:
                self.refuse(f"{field}[{index}]", f"an integer from {low} to {high}", _shown(value))
        return np.array(values, dtype)

    def rows(self, field: str) -> Iterator[_Row]:
        """A list of JSON objects, each named by its index."""
        values = self._get(field, None, "a list of JSON objects")
        if not isinstance(values, list):
            self.refuse(field, "a list of JSON objects")
        for index, value in enumerate(values):
            yield _Row(f"{self.where}: {field}[{index}]", value)

    def refuse(self, field: str, allowed: str, given: str | None = None) -> NoReturn:
        """Raise the error for a field; `given` is its value unless something else says it better."""
        given = _shown(self.values.get(field)) if given is None else given
        raise TraceError(f"{self.where}: {field}: {given} given; allowed is {allowed}")

    def _get(self, field: str, default: Any, allowed: str) -> Any:
        if field in self.values:
            return self.values[field]
        if default is None:
            raise TraceError(f"{self.where}: {field}: missing; needed is {allowed}")
        return default


def _shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
