"""Generated multi-turn chat: a workload of any length from a few numbers, equal for equal numbers.

Every user talks in conversations of `turns` turns. A turn's prompt is the shared system prompt, all that the
conversation has said so far, answers included, and a new message. Users take turns; one whose conversation is
over starts another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pagekeeper.traces import NamedTokens, TraceRequest

__all__ = ["ChatWorkload"]

_SYSTEM = 0  # the id of the system prompt's text; messages have odd ids, answers even ones


@dataclass(frozen=True, kw_only=True)
class ChatWorkload:
    """The shape of a generated chat workload.

    Attributes:
        requests: how many requests in all, at least 0.
        users: how many conversations go on at a time, at least 1.
        turns: requests of one conversation, at least 1.
        system_tokens: length of the system prompt that all conversations share, in tokens; 0 for none.
        message_tokens: mean length of a user's message, in tokens, at least 1; lengths lie between half of it
            and one and a half.
        answer_tokens: mean length of an answer, in tokens, likewise.
        seed: decides lengths and tokens; 0 to 2**63 - 1.

    Raises:
        ValueError: a number is out of its range.
    """

    requests: int
    users: int = 64
    turns: int = 8
    system_tokens: int = 1024
    message_tokens: int = 256
    answer_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "requests": 0,
            "users": 1,
            "turns": 1,
            "system_tokens": 0,
            "message_tokens": 1,
            "answer_tokens": 1,
        }
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least {bound}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be from 0 to 2**63 - 1")

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests in order of arrival, one a second; each pass gives the same."""
        lengths = random.Random(self.seed)
        history: list[list[tuple[int, int]]] = [[] for _ in range(self.users)]
        for index in range(self.requests):
            round_, user = divmod(index, self.users)
            conversation, turn = divmod(round_, self.turns)
            if turn == 0:
                history[user] = [(_SYSTEM, self.system_tokens)]
            said = history[user]
            said.append((2 * index + 1, _around(self.message_tokens, lengths)))
            prompt = NamedTokens.of(self.seed, *said)
            said.append((2 * index + 2, _around(self.answer_tokens, lengths)))
            answer = NamedTokens.of(self.seed, said[-1])
            yield TraceRequest(
                float(index), prompt, answer, session=f"user {user}, conversation {conversation}"
            )


def _around(mean: int, random_: random.Random) -> int:
    """A length between half and one and a half of `mean`, at least 1."""
    return random_.randint(max(1, mean - mean // 2), mean + mean // 2)
