"""A multi-turn chat: conversations share a system prompt, and a turn is sent with all that came before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .engine import Request

SYSTEM_PROMPT = (
    "You are the help desk of a small public library. Answer in a few plain sentences. Say which shelf, "
    "desk or page of the house rules you mean, so that a visitor can find it without asking again. If a "
    "question is about fees, name the fee and the day from which it counts. If you do not know, say so and "
    "name the desk that does. Never promise that a book is free before the catalogue says so, and never tell "
    "one visitor what another has on loan.\n"
)
SUBJECTS = (
    "a cookbook",
    "a road atlas",
    "an old newspaper",
    "a film",
    "a dictionary",
    "a score for two violins",
)
PLACES = (
    "the second floor",
    "the reading room",
    "the children's corner",
    "the archive",
    "the branch by the river",
)
QUESTIONS = (
    "I am looking for {subject} that a friend saw in {place}. Is it there today, and may I take it home?",
    "Thank you. If somebody in {place} has it on hold, how long do I wait, and do you write when it is back?",
    "One more thing about {subject}: I am away for three weeks. Can I extend the loan from {place} by phone?",
    "And if {subject} comes back late to {place} because of a holiday, does the fee count from day one?",
)


class Tokenizer(Protocol):
    """What the chat needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any added at its ends."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A token for each byte of the text, folded into a small vocabulary where it must be."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """One id per UTF-8 byte."""
        return [byte % self.vocab_size for byte in text.encode()]


class DirectoryTokenizer:
    """The `tokenizer.json` of a model directory."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Tokenizers

        self._tokenizer = Tokenizers.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def tokenizer_for(directory: Path | None, vocab_size: int) -> Tokenizer:
    """The directory's own tokenizer if it has one and the `tokenizers` package is there, else bytes."""
    path = directory / "tokenizer.json" if directory else None
    if path and path.exists():
        try:
            return DirectoryTokenizer(path)
        except ImportError:
            pass
    return ByteTokenizer(vocab_size)


class Chat:
    """Conversations of several turns; a turn's prompt is all that was said before, and a new question."""

    def __init__(
        self, tokenizer: Tokenizer, *, conversations: int, turns: int, max_new_tokens: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._max_new_tokens = max_new_tokens
        choose = random.Random(seed).choice
        self._questions = [
            [QUESTIONS[turn % len(QUESTIONS)].format(subject=subject, place=place) for turn in range(turns)]
            for subject, place in ((choose(SUBJECTS), choose(PLACES)) for _ in range(conversations))
        ]

    def openings(self) -> list[Request]:
        """The first request of every conversation."""
        system = self._tokenizer.encode(SYSTEM_PROMPT)
        return [self._request(system, conversation, turn=0) for conversation in range(len(self._questions))]

    def follow_up(self, answered: Request) -> Request | None:
        """The next request of the conversation, or None after its last turn."""
        if answered.turn + 1 == self._turns:
            return None
        history = answered.tokens + self._tokenizer.encode("\n")
        return self._request(history, answered.conversation, answered.turn + 1)

    def _request(self, history: list[int], conversation: int, turn: int) -> Request:
        question = f"Visitor {conversation + 1}: {self._questions[conversation][turn]}\nDesk: "
        return Request(history + self._tokenizer.encode(question), self._max_new_tokens, conversation, turn)
