"""How long a request's blocks are kept: priorities for ranges of tokens, with or without a time limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

from pagekeeper.errors import shown
from pagekeeper.params import Priority, parse_priority, whole_number

__all__ = ["RetentionConfig", "TokenRangeRetention"]


@dataclass(frozen=True, slots=True)
class TokenRangeRetention:
    """A priority for the blocks of a prompt whose first token is in `start` to `end`.

    Args:
        start: first token.
        end: one past the last token; None: to the end of the prompt.
        priority: 0 (evicted first) to 100, or "low" (20), "medium" (35), "high" (80).
        duration_ms: milliseconds that it lasts after the last release, by the clock of
            `begin_step(now=...)`. Tell it once a step, from the start: while no time is told no duration
            ends. None: for ever.
        expires_at: instead of a duration: when it ends, in seconds on the same clock. Afterwards a
            block has the cache's default priority.

    Raises:
        ValueError: what is out of range, or both limits.

    >>> TokenRangeRetention(0, 128, priority="high").priority
    80
    """

    start: int
    end: int | None = None
    priority: Priority = 35
    duration_ms: float | None = None
    expires_at: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        keep = partial(object.__setattr__, self)  # past the freeze
        keep("start", whole_number(self.start, "start", least=0))
        if self.end is not None:
            keep("end", whole_number(self.end, "end", least=0))
            if self.end <= self.start:
                raise ValueError(f"end={self.end}: must be after start={self.start}")
        keep("priority", _priority(self.priority, "priority"))
        keep("duration_ms", _time(self.duration_ms, "duration_ms", least=0))
        keep("expires_at", _time(self.expires_at, "expires_at", least=-math.inf))
        if self.duration_ms is not None and self.expires_at is not None:
            raise ValueError("duration_ms and expires_at: give one of them, not both")

    def native(self) -> tuple[int, float | None]:
        """Priority, and seconds after the last release."""
        return parse_priority(self.priority), _seconds(self.duration_ms)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """Which blocks of one request are kept longer, or less long, than others.

    A block takes the range that covers its first token; a block of the prompt in no range is treated like
    those of other requests. A later request without a retention leaves a block's priority as it was.

    Args:
        ranges: sorted and disjoint; only the last may be open.
        decode_priority: for the blocks that are generated.
        decode_duration_ms: milliseconds that it lasts after the last release. None: for ever.

    Raises:
        ValueError: ranges that are not sorted, or what is out of range. Whether they are inside the prompt is
            checked when a `TextContext` gets them.
    """

    ranges: Sequence[TokenRangeRetention] = ()
    decode_priority: Priority = 35
    decode_duration_ms: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        keep = partial(object.__setattr__, self)  # past the freeze
        if not isinstance(self.ranges, Sequence):
            raise TypeError(f"ranges: got {type(self.ranges).__name__}, must be a list")
        keep("ranges", tuple(self.ranges))
        keep("decode_priority", _priority(self.decode_priority, "decode_priority"))
        keep("decode_duration_ms", _time(self.decode_duration_ms, "decode_duration_ms", least=0))
        for index, one in enumerate(self.ranges):
            if not isinstance(one, TokenRangeRetention):
                raise TypeError(f"ranges[{index}]: got {type(one).__name__}, must be a TokenRangeRetention")
        for index, (before, after) in enumerate(zip(self.ranges, self.ranges[1:], strict=False)):
            if before.end is None:
                raise ValueError(f"ranges[{index}]: has no end, which only the last may do")
            if after.start < before.end:
                raise ValueError(f"ranges[{index + 1}]: starts before ranges[{index}] ends, at {before.end}")

    def native_ranges(self) -> list[tuple[int, int | None, int, float | None, float | None]]:
        """The ranges as (start, end, priority, seconds after the last release, time of expiry)."""
        return [
            (one.start, one.end, parse_priority(one.priority), _seconds(one.duration_ms), one.expires_at)
            for one in self.ranges
        ]

    def native_decode(self) -> tuple[int, float | None]:
        """Priority and seconds after the last release of generated blocks."""
        return parse_priority(self.decode_priority), _seconds(self.decode_duration_ms)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _priority(value: Priority, name: str) -> int:
    try:
        return parse_priority(value)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: {error}") from None


def _time(value: object, name: str, least: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {type(value).__name__}, must be a number")
    try:
        time = float(value)
    except OverflowError:
        time = math.inf
    if not math.isfinite(time) or time < least:
        allowed = "a finite number" if least else "a finite number, at least 0"
        raise ValueError(f"{name}={shown(value)}: must be {allowed}")
    return time
