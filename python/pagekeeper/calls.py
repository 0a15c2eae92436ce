"""What the arguments of the manager's calls are: requests and batches, replicas and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pagekeeper._native import TextContext
from pagekeeper.errors import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Batch", "Request", "Requests", "check_replica", "flag", "is_one", "text"]

Request: TypeAlias = "TextContext | int | np.integer"
"""A claimed request: its context, or the slot that `claim` returned."""

Requests: TypeAlias = "Sequence[TextContext] | NDArray[np.int32]"
"""Claimed requests: a list of contexts, or their slots as a 1-D int32 array."""

Batch: TypeAlias = "Request | Requests"
"""One claimed request, or several."""


def is_one(batch: Batch) -> bool:
    """Whether `batch` is one request, which is answered by one value instead of a list."""
    return isinstance(batch, TextContext) or (not hasattr(batch, "__len__") and hasattr(batch, "__index__"))


def check_replica(replica_idx: int) -> None:
    """There is one data-parallel replica, number 0.

    Raises:
        ValueError: another number.
    """
    if isinstance(replica_idx, (bool, float)) or replica_idx != 0:
        raise ValueError(f"replica_idx={shown(replica_idx)}: must be 0, there is one replica")


def text(given: str | None, name: str) -> str | None:
    """`given`, which is a str or None.

    Raises:
        TypeError: it is neither.
    """
    if given is not None and not isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}, must be a str")
    return given


def flag(given: bool, name: str) -> bool:
    """`given`, which is True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(given, bool):
        raise TypeError(f"{name}: got {shown(given)}, must be True or False")
    return given
