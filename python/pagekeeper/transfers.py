"""Handles of copies in flight: what waits for one, and what ends it."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pagekeeper._native import Completer, Transfer, pending_transfer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "COMPLETED",
    "CompletedTransfer",
    "Completer",
    "KVConnectorTransfer",
    "LoadTransfer",
    "Transfer",
    "pending",
]


@runtime_checkable
class KVConnectorTransfer(Protocol):
    """What a connector's `load` and `offload` return: the handle of the copies that they started.

    `isinstance` tells whether an object has the methods. A connector whose copies are ordered before the
    forward returns `CompletedTransfer`; others return the handle that `pending` makes, or their own.
    """

    @property
    def block_ids(self) -> Sequence[int]:
        """The device pages that the copies touch."""

    def is_complete(self) -> bool:
        """Whether the copies have ended, well or not: a cheap poll that never waits and never raises."""

    def result(self) -> None:
        """Waits for the end of the copies.

        Raises:
            KVLoadFailed: they failed or were cancelled; the pages hold no KV.
        """

    def synchronize(self, timeout: float | None = None) -> None:
        """Waits for the end of the copies, at most `timeout` seconds; None waits as long as it takes.

        Raises:
            KVLoadFailed: they failed or were cancelled; the pages hold no KV.
            TimeoutError: they are still in flight.
        """

    def cancel(self) -> bool:
        """Asks that the copies be given up; False when they have ended already.

        They may end in any way all the same, and may write until `is_complete()` is True.
        """

    def __await__(self) -> Generator[object, None, None]:
        """As `result()`, in a coroutine."""


def pending(block_ids: ArrayLike) -> tuple[Transfer, Completer]:
    """A transfer in flight, and the end that whoever carries it out keeps.

    Whoever copies calls `finish()`, `fail(message)` or `abandon()` on the completer, from any thread; the
    first result stands. A completer that is dropped without a result fails the transfer.

    Args:
        block_ids: the device pages that the copy touches, [pages], each 0 to 2**32 - 1.

    Raises:
        ValueError: an id out of range.

    >>> transfer, completer = pending([3, 4])
    >>> transfer.is_complete()
    False
    >>> completer.finish()
    True
    >>> transfer.result()
    >>> transfer
    Transfer(2 pages, done)
    """
    return pending_transfer(block_ids)


async def ended(transfer: Transfer) -> None:
    """Waits for the end of a transfer in asyncio's loop, without polling and without a thread.

    Raises:
        KVLoadFailed: the transfer failed or was cancelled.
    """
    if not transfer.is_complete():
        import asyncio

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        fd = transfer.wake_fd()
        try:
            loop.add_reader(fd, woken.set)
            try:
                await woken.wait()
            finally:
                loop.remove_reader(fd)
        finally:
            os.close(fd)
    transfer.result()


class CompletedTransfer:
    """A transfer that moved nothing, or whose copies are ordered before the forward: complete at once.

    Args:
        block_ids: the device pages that the copies touch.
    """

    __slots__ = ("block_ids",)

    block_ids: Sequence[int]

    def __init__(self, block_ids: Sequence[int] = ()) -> None:
        self.block_ids = block_ids

    def is_complete(self) -> bool:
        """Whether the copies have ended: True."""
        return True

    def result(self) -> None:
        """Returns at once; a failed transfer would raise here."""

    def synchronize(self, timeout: float | None = None) -> None:
        """Returns at once; a copy in flight would be waited for, at most `timeout` seconds."""

    def cancel(self) -> bool:
        """False: there is nothing left to cancel."""
        return False

    def __await__(self) -> Generator[None, None, None]:
        return
        yield

    def __repr__(self) -> str:
        return "CompletedTransfer()"


COMPLETED = CompletedTransfer()
"""A transfer of no pages."""


class LoadTransfer:
    """A copy that a request waits for, as `alloc`, `suspend` and `resume` return it: with its number.

    Attributes:
        id: the copy's number, the same on every rank; what `completions` lists.
        block_ids: the device pages that are loaded, or copied out, in the order of the blocks.
    """

    __slots__ = ("_transfer", "block_ids", "id")

    def __init__(self, id: int, block_ids: Sequence[int], transfer: KVConnectorTransfer) -> None:
        self.id = id
        self.block_ids = block_ids
        self._transfer = transfer

    def is_complete(self) -> bool:
        """Whether the copy has ended, well or not. Never waits."""
        return self._transfer.is_complete()

    def result(self) -> None:
        """Waits for the end of the copy.

        Raises:
            KVLoadFailed: the KV did not arrive; the request computes it.
        """
        self._transfer.result()

    def synchronize(self, timeout: float | None = None) -> None:
        """`result`, for at most `timeout` seconds.

        Raises:
            TimeoutError: the copy has not ended by then.
            KVLoadFailed: the KV did not arrive; the request computes it.
        """
        self._transfer.synchronize(timeout)

    def cancel(self) -> bool:
        """Asks that the copy be given up; False when it has ended already.

        It may end in any way all the same, and may write until `is_complete()` is True.
        """
        return self._transfer.cancel()

    def __await__(self) -> Generator[object, None, None]:
        return self._transfer.__await__()

    def __repr__(self) -> str:
        return f"LoadTransfer(id={self.id}, blocks={len(self.block_ids)})"
