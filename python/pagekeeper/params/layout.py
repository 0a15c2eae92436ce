"""What lies where in a page.

A page is one run of bytes. It holds a region for each kind of bytes that a block has: keys and values, their
scales, an indexer's keys, states; and for each set of layers whose regions have one shape and dtype. All of
them have one page id, and move together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagekeeper.dtypes import DType

__all__ = ["PageLayout", "PageRegion", "Part"]


class Part(NamedTuple):
    """A region that has no place yet; its `shape` is that of one layer."""

    name: str
    layers: Sequence[int]
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class PageRegion:
    """Some layers' bytes of one kind in each page.

    Attributes:
        name: "kv"; its companions "kv_scales" and "indexer_k"; or the name of a state.
        layers: the layers of the group that it has, ascending, a range or a tuple.
        shape: stored elements of one page along each axis, the slowest first. The first axis is `layers`.
        dtype: type of an element.
        offset: bytes from the beginning of the page, a multiple of the element's size.
    """

    name: str
    layers: Sequence[int]
    shape: tuple[int, ...]
    dtype: DType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region in one page."""
        return math.prod(self.shape) * self.dtype.size_in_bytes


@dataclass(frozen=True)
class PageLayout:
    """The regions of a page, one behind the other.

    Attributes:
        regions: in the order of their offsets.
    """

    regions: tuple[PageRegion, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> PageLayout:
        """The layout that has `parts` in their order."""
        regions: list[PageRegion] = []
        end = 0
        for part in parts:
            offset = _aligned(end, part.dtype.size_in_bytes)
            shape = (len(part.layers), *part.shape)
            regions.append(PageRegion(part.name, part.layers, shape, part.dtype, offset))
            end = offset + regions[-1].nbytes
        return cls(tuple(regions))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page: of all regions, and what aligns each of them and the next page to its elements."""
        last = self.regions[-1]
        largest = max(region.dtype.size_in_bytes for region in self.regions)
        return _aligned(last.offset + last.nbytes, largest)

    def find(self, name: str, layer: int) -> tuple[int, int] | None:
        """Where a layer's bytes of one kind are: number of the region, index on its first axis."""
        for number, region in enumerate(self.regions):
            if region.name == name and layer in region.layers:
                return number, region.layers.index(layer)
        return None


def _aligned(offset: int, size: int) -> int:
    return -(-offset // size) * size
