"""What stands in the pages of a replay: no KV, but numbers by which every page that is found can be checked.

A forward writes f(prefix) into the place of each token, a number that depends on all tokens up to it. So a
page that holds another block, or bytes that a copy got wrong, never looks right.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pagekeeper.traces import mixed

__all__ = ["PageContents", "WrongPageError", "prefix_numbers"]


class WrongPageError(Exception):
    """A page that the cache gave for a block does not hold that block."""


def prefix_numbers(tokens: npt.NDArray[np.int32], salt: str | None = None) -> npt.NDArray[np.uint64]:
    """Gives f of each prefix of a sequence, uint64[len(tokens)].

    Args:
        tokens: int32[n].
        salt: the sequence's cache salt.
    """
    positions = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
    placed = mixed(tokens.view(np.uint32) + positions)
    # Not `hash`, which is another one in each process: pages on disk outlive theirs.
    named = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
    start = np.frombuffer(
        blake2b(named, digest_size=8, person=b"no" if salt is None else b"salt").digest(), "<u8"
    )
    return np.cumsum(np.append(start, placed), dtype=np.uint64)[1:]


class PageContents:
    """The memory of a pool with a number of 8 bytes a token.

    Args:
        pages: usable pages; there is one more, the null page 0.
        page_size: tokens a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._cells = np.zeros((pages + 1, page_size), np.uint64)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """Every page as bytes, uint8 [pages + 1, 8 * page_size], a view."""
        return self._cells.view(np.uint8)

    def write(self, places: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint64]) -> None:
        """What a forward does.

        Args:
            places: int64[n], `page * page_size + offset` of each token.
            numbers: uint64[n].
        """
        self._cells.reshape(-1)[places] = numbers

    def check(self, row: npt.NDArray[np.int32], numbers: npt.NDArray[np.uint64]) -> None:
        """Checks the tokens that a sequence was given as computed.

        Args:
            row: int32, the pages of the sequence's blocks.
            numbers: uint64[n], what its first n tokens must have.

        Raises:
            WrongPageError: a page holds something else; the first is named.
        """
        page_size = self._cells.shape[1]
        blocks = -(-len(numbers) // page_size)
        wrong = np.flatnonzero(self._cells[row[:blocks]].reshape(-1)[: len(numbers)] != numbers)
        if len(wrong):
            block = int(wrong[0]) // page_size
            raise WrongPageError(
                f"page {row[block]} was given for block {block} of a prompt and does not hold it: "
                f"token {wrong[0]} differs"
            )
