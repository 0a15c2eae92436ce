"""Which tokens a token sees, by the kind of its layer, and what follows from that for blocks.

All of it is asked of the mask, token by token. The closed forms that the cache computes with are held to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Full:
    """Every token before it and itself."""

    def sees(self, query: Any, token: Any) -> Any:
        """Whether the token at `query` sees the one at `token`: positions, or numpy arrays of them."""
        return token <= query


@dataclass(frozen=True)
class Window:
    """The last `tokens`, itself among them, and the first `sinks` of the sequence."""

    tokens: int
    sinks: int = 0

    def sees(self, query: Any, token: Any) -> Any:
        return (token <= query) & ((query - token < self.tokens) | (token < self.sinks))


@dataclass(frozen=True)
class Chunked:
    """Those of its own chunk up to itself: the sequence is cut into chunks of `tokens`."""

    tokens: int

    def sees(self, query: Any, token: Any) -> Any:
        return (token <= query) & (query // self.tokens == token // self.tokens)


@dataclass(frozen=True)
class Recurrent:
    """Of those before it, the state that they went into: the token before it stands for them.

    States after multiples of `interval` tokens are kept for others, and with `last` the one at the end of a
    prompt's last block that does not have its last token.
    """

    interval: int = 0
    last: bool = False

    def sees(self, query: Any, token: Any) -> Any:
        return (token <= query) & (query - token < 2)

    def keeps(self, position: int, prompt: int, page_size: int) -> bool:
        """Whether the state after so many tokens is for others, of a request with so long a prompt."""
        if position == 0 or position % page_size:
            return False
        end = (prompt - 1) // page_size * page_size
        return bool(self.interval and position % self.interval == 0) or (self.last and position == end)


@dataclass(frozen=True)
class Lasting(ABC):
    """Itself: the request takes pages once that have nothing to do with its tokens."""

    def sees(self, query: Any, token: Any) -> Any:
        return token == query

    @abstractmethod
    def lasting(self, encoder: int, page_size: int) -> int:
        """How many, where an encoder has made so many tokens for it."""


@dataclass(frozen=True)
class Scratch(Lasting):
    """A page to work in."""

    def lasting(self, encoder: int, page_size: int) -> int:
        return 1


@dataclass(frozen=True)
class Cross(Lasting):
    """Pages with all tokens of an encoder."""

    def lasting(self, encoder: int, page_size: int) -> int:
        return -(-encoder // page_size)


@dataclass(frozen=True)
class Everything:
    """All that an encoder made, wherever it is."""

    def sees(self, query: Any, token: Any) -> Any:
        return token >= 0


Kind: TypeAlias = Full | Window | Chunked | Recurrent | Scratch | Cross


@cache
def needed_blocks(kind: Kind, e: int, page_size: int) -> frozenset[int]:
    """The blocks that must be there to compute the token at position `e`; its own is one of them."""
    return frozenset(token // page_size for token in range(e + 1) if kind.sees(e, token))


def is_usable(kind: Kind, present: Set[int], blocks: int, page_size: int) -> bool:
    """Whether a request may start behind a prefix of so many blocks, of which `present` are there."""
    return needed_blocks(kind, blocks * page_size, page_size) - {blocks} <= present


def blocks_behind(kind: Kind, n: int, page_size: int) -> set[int]:
    """The full blocks that no token from position `n` on will see: those that `n` itself does not."""
    return set(range(n // page_size)) - needed_blocks(kind, n, page_size)


def release_order(kind: Kind, blocks: int, page_size: int) -> list[int]:
    """So many blocks of a request in the order in which it gives them back: those that hits need come last.

    Where all blocks are needed, the first ones are needed most. In a window those at the end are, and more
    than these the sinks.
    """
    if isinstance(kind, Full):
        return list(reversed(range(blocks)))
    sinks = min(blocks, -(-kind.sinks // page_size)) if isinstance(kind, Window) else 0
    return [*range(sinks, blocks), *range(sinks)]
