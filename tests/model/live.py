"""A request from the engine's side, which knows what was sampled before the ledger is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model.requests import Token


@dataclass
class Live:
    """A claimed request as the engine sees it."""

    ctx: Any
    namespace: int
    image: tuple[int, int, int] | None
    """A multimodal item (kind, start, length), or none."""
    truth: list[int]
    """Known tokens, and after them those sampled by steps whose results are not delivered."""
    sampled: list[list[int]] = field(default_factory=list)
    """For each step out, oldest first: the tokens it gave, drafts that were right first; none in a prompt."""

    def atom(self, index: int, token: Token) -> Any:
        """What makes the token's KV: the token, and the part of an image that lies on it."""
        if token is None or self.image is None:
            return token
        kind, start, length = self.image
        return (token, kind, index - start, length) if start <= index < start + length else token

    def cut_image(self, length: int) -> None:
        """Leaves what the first `length` tokens hold of the image."""
        if self.image is not None:
            kind, start, size = self.image
            self.image = (kind, start, min(size, length - start)) if start < length else None

    def atoms(self, tokens: Sequence[int]) -> list[Any]:
        return [self.atom(index, token) for index, token in enumerate(tokens)]
