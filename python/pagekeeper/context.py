"""Requests: their ids and their tokens. `TextContext` itself is native."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from pagekeeper._native import normalize_tokens

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["RequestID", "TokenBuffer"]


class RequestID(str):
    """Names a request; without a value, a new one that nobody else has.

    >>> RequestID("turn-7")
    'turn-7'
    >>> RequestID() == RequestID()
    False
    """

    __slots__ = ()

    def __new__(cls, value: str | None = None) -> RequestID:
        """A request id: `value`, or a new one."""
        return super().__new__(cls, uuid.uuid4().hex if value is None else value)


class TokenBuffer:
    """Token ids of one sequence, checked: int32, one dimension.

    Args:
        tokens: a 1-D array of integers, or a list of ints, each -2**31 to 2**31 - 1.

    Raises:
        ValueError: a value out of range, a float or a bool; the message names its index.

    >>> TokenBuffer([5, 6, 7]).all
    array([5, 6, 7], dtype=int32)
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: ArrayLike) -> None:
        self._tokens = normalize_tokens(tokens)

    @property
    def all(self) -> NDArray[np.int32]:
        """The token ids; int32, [len]."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is None or dtype == self._tokens.dtype:
            return self._tokens.copy() if copy else self._tokens
        return self._tokens.astype(dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBuffer) and np.array_equal(self._tokens, other._tokens)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenBuffer({self._tokens!r})"
