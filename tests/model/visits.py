"""Requests whose blocks have names: those of the traces, and any made of numbered texts."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NAMED = 512
"""Tokens that one id of the conversation trace names."""

LONGEST_OUTPUT = 2_000


class Visit(NamedTuple):
    """A request, each of whose ids is a text, and a name for each full block of its prompt and output."""

    number: int
    ids: list[int]
    text: int
    """Tokens of an id's text, a multiple of the page size."""
    prompt: int
    output: int
    names: list[int]

    def tokens(self) -> Any:
        """Prompt and output; outputs are negative tokens, and the request's alone."""
        named = np.array(self.ids, np.int32)[:, None] * self.text + np.arange(self.text, dtype=np.int32)
        output = -1 - self.number * LONGEST_OUTPUT - np.arange(self.output, dtype=np.int32)
        return np.concatenate([named.ravel()[: self.prompt], output])


class Names:
    """Numbers for prefixes: equal ones for blocks that have the same text and follow the same prefix."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, object], int] = {}
        self.parents: list[int] = []

    def chain(self, texts: Iterable[object]) -> list[int]:
        """Names the blocks of one sequence, each by its text and the name of the block before."""
        name, names = -1, []
        for text in texts:
            parent, name = name, self.numbers.setdefault((name, text), len(self.parents))
            if name == len(self.parents):
                self.parents.append(parent)
            names.append(name)
        return names

    def visit(
        self, number: int, ids: list[int], text: int, prompt: int, output: int, page_size: int
    ) -> Visit:
        """A request whose blocks are named by its ids, and not by its tokens."""
        pages = text // page_size
        shared = [(ids[page // pages], page % pages) for page in range(prompt // page_size)]
        alone = [("output", number)] * ((prompt + output) // page_size - len(shared))
        return Visit(number, ids, text, prompt, output, self.chain([*shared, *alone]))


def conversation(shared_dir: Path, names: Names, page_size: int) -> Iterator[Visit]:
    """The requests of the conversation trace, in order."""
    with (shared_dir / "traces" / "mooncake_conversation_trace.jsonl").open() as lines:
        for number, row in enumerate(map(json.loads, lines)):
            ids, prompt, output = row["hash_ids"], row["input_length"], row["output_length"]
            yield names.visit(number, ids, NAMED, prompt, output, page_size)
