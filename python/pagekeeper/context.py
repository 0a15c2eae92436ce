"""Requests: their ids and their tokens. `TextContext` itself is native."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from pagekeeper._native import TextContext, normalize_tokens

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = ["EngineRequest", "RequestID", "TokenBuffer", "read_request"]


class RequestID(str):
    """Names a request; without a value, a new one that nobody else has.

    Args:
        value: the name; None draws 32 hexadecimal characters.

    Raises:
        TypeError: the name is no str.

    >>> RequestID("turn-7")
    'turn-7'
    >>> RequestID() == RequestID()
    False
    """

    __slots__ = ()

    def __new__(cls, value: str | None = None) -> RequestID:
        """A request id: `value`, or a new one."""
        if value is not None and not isinstance(value, str):
            raise TypeError(f"value: got {type(value).__name__}, must be a str")
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

    @overload
    def __getitem__(self, index: int) -> np.int32: ...

    @overload
    def __getitem__(self, index: slice) -> NDArray[np.int32]: ...

    def __getitem__(self, index: int | slice) -> np.int32 | NDArray[np.int32]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[np.int32]:
        return iter(self._tokens)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is None or dtype == self._tokens.dtype:
            return self._tokens.copy() if copy else self._tokens
        return self._tokens.astype(dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBuffer) and np.array_equal(self._tokens, other._tokens)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenBuffer({self._tokens!r})"


class EngineRequest(Protocol):
    """An engine's own request, as `PagedKVCacheManager.claim` reads it.

    It may have the other arguments of `TextContext` as attributes too.
    """

    @property
    def request_id(self) -> str | int:
        """Names the request."""

    @property
    def tokens(self) -> ArrayLike | TokenBuffer:
        """The prompt."""


def read_request(request: EngineRequest) -> TextContext:
    """A context with what an engine's own request says of itself.

    Args:
        request: has `request_id` and `tokens`, and may have other arguments of `TextContext` as attributes.

    Raises:
        TypeError: it has no `request_id` or no `tokens`.
    """
    try:
        request_id, tokens = request.request_id, request.tokens
    except AttributeError as error:
        given = type(request).__name__
        raise TypeError(
            f"ctx: got {given}; give a TextContext, or an object with request_id and tokens"
        ) from error
    options = {name: getattr(request, name) for name in _OPTIONS if hasattr(request, name)}
    return TextContext(request_id=request_id, tokens=tokens, **options)


# The other arguments of `TextContext`.
_OPTIONS = (
    "max_length",
    "cache_salt",
    "lora_id",
    "lora_generation",
    "mm_items",
    "prompt_embeds",
    "extra_ids",
    "token_overrides",
    "retention",
    "no_read",
    "no_store",
    "dkv_cache_hint",
    "max_new_tokens",
    "num_draft_tokens",
    "beam_width",
    "encoder_length",
)
