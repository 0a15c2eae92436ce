"""What stands in the pages: a forward writes f(prefix) into each cell, so no wrong hit looks right."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def prefix_values(namespace: object, atoms: Sequence[object]) -> npt.NDArray[np.int64]:
    """Gives f of every prefix: a number that depends on the namespace and on all its tokens."""
    values = np.empty(len(atoms), np.int64)
    value = hash(("namespace", namespace))
    for index, atom in enumerate(atoms):
        value = hash((value, atom))
        values[index] = value
    return values


class PageMemory:
    """One int64 a token, `cells[page, offset]`; page 0 is the null page and is never touched."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.cells = np.zeros((pages + 1, page_size), np.int64)

    def read(self, row: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """The first `length` cells of the sequence whose blocks lie in the pages of `row`."""
        return self.cells[np.asarray(row, np.intp)].reshape(-1)[:length]

    def write(self, row: Sequence[int], start: int, values: npt.NDArray[np.int64]) -> None:
        """Writes the cells of tokens [start, start + len(values))."""
        positions = np.arange(start, start + len(values))
        pages = np.asarray(row, np.intp)[positions // self.page_size]
        self.cells[pages, positions % self.page_size] = values
