"""A small recurrent layer: its state after some tokens, in whole numbers, so that equal means equal.

And groups that keep such states, or memory to work in, as the caches of `model.drawn` have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from pagekeeper.params import Recurrent, RecurrentKVCacheParams, RecurrentState, Scratch

FACTORS = np.array([31, 37, 41], np.float32)
PRIMES = np.array([65521, 65519, 65497], np.float32)
"""Products stay below 2**24, where float32 has every whole number."""


def advance(state: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The state after some more tokens; float32 [3], whole numbers."""
    return reduce(lambda before, token: (before * FACTORS + np.float32(token)) % PRIMES, tokens, state)


def state_after(tokens: Sequence[int]) -> np.ndarray:
    """From the beginning on."""
    return advance(np.zeros(3, np.float32), tokens)


@dataclass(frozen=True)
class States:
    """A group of recurrent layers: its name, what it keeps for others, and its pages."""

    name: str
    kind: Recurrent | Scratch
    pages: int
    values: int = 3
    """Of the state; more make a page of another size."""

    def params(self, page_size: int, **common: Any) -> RecurrentKVCacheParams:
        state = RecurrentState("state", (self.values,), "float32")
        return RecurrentKVCacheParams(
            states=[state], num_layers=1, kind=self.kind, page_size=page_size, devices=["cpu"], **common
        )
