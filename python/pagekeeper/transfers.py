"""Handles of copies in flight."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

__all__ = ["CompletedTransfer", "KVConnectorTransfer"]


@runtime_checkable
class KVConnectorTransfer(Protocol):
    """A copy between the device and another tier, in flight or ended. `await` waits for it too."""

    def is_complete(self) -> bool:
        """Whether the copy has ended, well or not. A cheap look: never waits, never raises."""
        ...

    def result(self) -> None:
        """Waits for the end of the copy.

        Raises:
            KVLoadFailed: nobody knows what the pages hold.
        """
        ...

    def synchronize(self, timeout: float | None = None) -> None:
        """`result`, for at most `timeout` seconds.

        Raises:
            TimeoutError: the copy has not ended by then.
            KVLoadFailed: nobody knows what the pages hold.
        """
        ...

    def cancel(self) -> bool:
        """Asks for the copy not to be made; whether that was in time."""
        ...

    def __await__(self) -> Generator[Any, None, None]:
        """As `result`."""
        ...


class CompletedTransfer:
    """A transfer that moved nothing, or whose copies are ordered before the forward: complete at once."""

    __slots__ = ()

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
