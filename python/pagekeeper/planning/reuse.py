"""Which prefixes a cache can find at all, where its groups of states take snapshots far apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagekeeper.params import KVCacheParams, Recurrent

__all__ = ["reuse_warnings"]


def reuse_warnings(groups: Mapping[str, KVCacheParams]) -> tuple[str, ...]:
    """What users should know before they wonder why little is reused; nothing, where every page counts.

    A prefix is found where all groups of states have a snapshot. So what counts is the least common multiple
    of their intervals, which may be much larger than each.

    Args:
        groups: those of a cache, by name.
    """
    kinds = {
        name: group.kind
        for name, group in groups.items()
        if isinstance(group.kind, Recurrent) and group.enable_prefix_caching
    }
    page_size = next(iter(groups.values())).page_size
    # The least common multiple with 0, of a group that has no interval, is 0: nowhere.
    intervals = {name: kind.snapshot_interval or 0 for name, kind in kinds.items()}
    step = math.lcm(*intervals.values())
    if not kinds or 0 < step <= page_size:
        return ()
    ends = math.lcm(*(intervals[name] for name, kind in kinds.items() if not kind.save_last_snapshot))
    places = [f"in steps of {step} tokens"] if step else []
    if ends != step:
        at_multiples = f", if that is a multiple of {ends}" if ends > page_size else ""
        places.append(f"at the last page boundary of an earlier prompt{at_multiples}")
    found = f"prefixes are found only {' and '.join(places)}" if places else "no prefix is ever found"
    if not step:
        remedy = "a snapshot_interval"
    elif step in intervals.values():
        remedy = "a smaller snapshot_interval"
    else:
        remedy = "snapshot intervals that divide one another"
    if not 0 < ends <= page_size:
        remedy += ", or save_last_snapshot=True in all groups of states,"
    return (f"{found}: {', '.join(_reasons(intervals))}; {remedy} would let more be found",)


def _reasons(intervals: Mapping[str, int]) -> list[str]:
    """The groups that make it so: who has no interval, or else whose interval divides no other."""
    if 0 in intervals.values():
        return [f"{name!r} has no snapshot_interval" for name, interval in intervals.items() if not interval]
    return [
        f"{name!r} keeps a state each {interval} tokens"
        for name, interval in intervals.items()
        if all(other == interval or other % interval for other in intervals.values())
    ]
