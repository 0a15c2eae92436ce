"""Groups whose pages hold states: of Mamba or linear attention, or the scratch memory of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from pagekeeper.dtypes import DType, DTypeLike
from pagekeeper.params.base import CommonArguments, KVCacheParams
from pagekeeper.params.checks import keep, parse_count
from pagekeeper.params.groups import Recurrent, Scratch, StateKind
from pagekeeper.params.layout import PageLayout, Part

__all__ = ["RecurrentKVCacheParams", "RecurrentState"]


@dataclass(frozen=True, init=False)
class RecurrentState:
    """One tensor of a layer's state, such as that of a convolution or of a state-space model.

    Args:
        name: what the region of the page is called.
        shape: values along each axis, the slowest first.
        dtype: type of a value; one that packs several into a byte is not allowed.

    Raises:
        ValueError: a value is not allowed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __init__(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> None:
        keep(self, "name", name, _parse_name)
        keep(self, "shape", shape, _parse_shape)
        keep(self, "dtype", dtype, _parse_plain_dtype)


@dataclass(frozen=True, init=False)
class RecurrentKVCacheParams(KVCacheParams):
    """A cache of states: a page holds those of all layers, after some number of tokens.

    Args:
        states: what each layer's state consists of.
        num_layers: layers whose states one page holds.
        kind: `Recurrent`, or `Scratch` for memory that is not reused.

    The other arguments and the errors are those of `KVCacheParams`. A `snapshot_interval` that is no multiple
    of the page size is a `ValueError`.

    >>> state = RecurrentState("ssm", (64, 64, 128), "float32")
    >>> params = RecurrentKVCacheParams(states=[state], num_layers=24, kind=Recurrent(snapshot_interval=1024))
    >>> params.bytes_per_page  # 64 x 64 x 128 values x 4 bytes x 24 layers
    50331648
    """

    states: tuple[RecurrentState, ...]

    _kinds = (Recurrent, Scratch)

    def __init__(
        self,
        *,
        states: Sequence[RecurrentState],
        num_layers: int,
        kind: StateKind,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(num_layers=num_layers, kind=kind, **common)
        keep(self, "states", states, _parse_states)
        interval = kind.snapshot_interval if isinstance(kind, Recurrent) else None
        if interval is not None and interval % self.page_size:
            raise ValueError(
                f"kind.snapshot_interval={interval}: must be a multiple of page_size={self.page_size}"
            )

    @property
    def page_layout(self) -> PageLayout:
        """What lies where in a page: a region for each state, [layers, ...]."""
        layers = range(self.num_layers)
        return PageLayout.of(Part(state.name, layers, state.shape, state.dtype) for state in self.states)

    @property
    def bytes_per_token(self) -> int:
        """0: a state has the same size after any number of tokens."""
        return 0


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a str that is not empty")
    return value


def _parse_shape(value: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of whole numbers, of one at least")
    return tuple(parse_count(length) for length in value)


def _parse_plain_dtype(value: DTypeLike) -> DType:
    dtype = DType.parse(value)
    if dtype.values_per_element > 1:
        raise ValueError("must hold one value an element")
    return dtype


def _parse_states(value: Sequence[RecurrentState]) -> tuple[RecurrentState, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of RecurrentState, of one at least")
    if not all(isinstance(state, RecurrentState) for state in value):
        raise ValueError("must be a list of RecurrentState and of nothing else")
    if len({state.name for state in value}) < len(value):
        raise ValueError("must have names that differ")
    return tuple(value)
