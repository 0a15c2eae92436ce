"""Handles of copies in flight."""

from __future__ import annotations

from collections.abc import Generator

__all__ = ["CompletedTransfer"]


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
