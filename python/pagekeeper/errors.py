"""What goes wrong, by name. Bad arguments are `ValueError` and `TypeError`."""

from __future__ import annotations

__all__ = [
    "CacheTooSmallError",
    "InsufficientBlocksError",
    "KVLoadFailed",
    "KVLoadRefused",
    "LedgerCorruptError",
    "RequestTooLargeError",
    "TransferMetadataError",
    "TransferMismatchError",
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


class TransferMetadataError(ValueError):
    """What came from the other side of a transfer is no description of a cache that this version reads."""


class TransferMismatchError(ValueError):
    """Two sides of a transfer do not fit each other.

    Attributes:
        field: what differs.
        group: the name of the group where it does; None if it is the cache's.
        values: of one side and of the other, in the order in which the message has them.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        group: str | None = None,
        values: tuple[object, object] = (None, None),
    ) -> None:
        super().__init__(message)
        self.field = field
        self.group = group
        self.values = values

    @classmethod
    def of(
        cls,
        field: str,
        group: str | None,
        values: tuple[object, object],
        sides: tuple[str, str] = ("the source", "the destination"),
        why: str = "",
    ) -> TransferMismatchError:
        """The error whose message names the field, the group, and the values of both `sides`."""
        where = field if group is None else f"groups[{shown(group)}].{field}"
        (one, other), (here, there) = values, sides
        return cls(
            f"{where}: {shown(one)} of {here}, {shown(other)} of {there}; must be alike on both sides{why}",
            field=field,
            group=group,
            values=values,
        )


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
