"""What goes wrong, by name. Bad arguments are `ValueError` and `TypeError`."""

from __future__ import annotations

__all__ = [
    "CacheTooSmallError",
    "InsufficientBlocksError",
    "KVLoadFailed",
    "KVLoadRefused",
    "LedgerCorruptError",
    "RequestTooLargeError",
]


class InsufficientBlocksError(RuntimeError):
    """There is no room for a request now: release or preempt another, then try again.

    Attributes:
        request_id: the first request of the batch that did not fit.
        needed: pages that it needs beyond what it holds.
        free: pages that could be handed out, never used or evictable, beside the hits of the batch.
        evictable: of `free`, pages that would be evicted.
        pinned: pages that requests and transfers hold.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: object = None,
        needed: int = 0,
        free: int = 0,
        evictable: int = 0,
        pinned: int = 0,
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.pinned = pinned


class RequestTooLargeError(InsufficientBlocksError):
    """There will never be room for a request: reject it. `needed` counts all of its pages."""


class CacheTooSmallError(ValueError):
    """A cache would be too small to serve one request of the length that it is made for.

    Attributes:
        needed: bytes that are enough for the pools, divided as they are, and few more than have to be.
        available: bytes that there are for them.
        max_seq_len_that_fits: tokens of the longest request that could be served; 0 if there is none.
    """

    def __init__(
        self, message: str, *, needed: int = 0, available: int = 0, max_seq_len_that_fits: int = 0
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.max_seq_len_that_fits = max_seq_len_that_fits


class LedgerCorruptError(RuntimeError):
    """The books of the cache do not add up. The message names what is wrong first."""


class KVLoadRefused(RuntimeError):
    """A connector declines a load before anything moved: the blocks are a plain miss."""


class KVLoadFailed(RuntimeError):
    """A transfer failed or was cancelled: what it wrote to holds no KV. The message says why."""


def shown(value: object) -> str:
    """`value` as a message tells it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:
        return "an int of thousands of digits"
    except Exception:  # of a class of the user's, or nested too deeply
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 160 else f"{text[:157]}..."


def hidden(value: object) -> str:
    """What messages tell of a value that may be a secret: how long it is, or its type."""
    return f"<{len(value)} characters>" if isinstance(value, str) else f"<{type(value).__name__}>"
