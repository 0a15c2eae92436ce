"""Calls that no ledger may accept, whatever state it is in."""

from collections.abc import Callable
from typing import Any

import numpy as np

import pagekeeper as pk


def wrong_calls(
    kv: Any, max_batch_size: int, running: Any | None, former: tuple[Any, int] | None
) -> dict[str, Callable[[], object]]:
    """Calls by what is wrong with them.

    Args:
        kv: the manager.
        max_batch_size: the manager's.
        running: a claimed context, if there is one.
        former: a released context and the slot it had, if there is one.
    """
    stranger = context(pk.RequestID())
    wrong: dict[str, Callable[[], object]] = {
        "claim on another replica": lambda: kv.claim(stranger, replica_idx=1),
        "alloc of an unclaimed request": lambda: kv.alloc(stranger),
        "release of an unclaimed request": lambda: kv.release([stranger]),
        "preempt of an unclaimed request": lambda: kv.preempt(stranger),
        "alloc of a slot that was never given": lambda: kv.alloc(np.array([2**20 - 1], np.int32)),
        "release of a negative slot": lambda: kv.release(np.array([-1], np.int32)),
        "step of an unclaimed request": lambda: kv.step(stranger),
        "two replicas' batches": lambda: kv.runtime_inputs([[], []]),
    }
    if former is not None:
        released, slot = former
        stale = np.array([slot], np.int32)
        wrong |= {
            "alloc of a stale slot": lambda: kv.alloc(stale),
            "release of a stale slot": lambda: kv.release(stale),
            "second release": lambda: kv.release(released),
        }
    if running is not None:
        twin = context(running.request_id)
        twice = np.array([running.slot, running.slot], np.int32)
        known = len(running.tokens)
        wrong |= {
            "double claim": lambda: kv.claim(running),
            "claim of a request id that is in use": lambda: kv.claim(twin),
            "alloc of a request twice in a batch": lambda: kv.alloc([running, running]),
            "alloc of a slot twice in a batch": lambda: kv.alloc(twice),
            "release of a request twice in a batch": lambda: kv.release([running, running]),
            "preempt of a request twice in a batch": lambda: kv.preempt([running, running]),
            "alloc with a stranger in the batch": lambda: kv.alloc([running, stranger]),
            "release with a stranger in the batch": lambda: kv.release([running, stranger]),
            "alloc of no tokens": lambda: kv.alloc(running, num_tokens=0),
            "alloc with too many bounds": lambda: kv.alloc([running], num_tokens=[1, 1]),
            "step with too few counts": lambda: kv.step([running], new_tokens=[1], counts=[]),
            "step with too many tokens": lambda: kv.step([running], new_tokens=[1, 1], counts=[1]),
            "step with a negative count": lambda: kv.step([running], new_tokens=[], counts=[-1]),
            "step with a token out of range": lambda: kv.step([running], new_tokens=[2**31], counts=[1]),
            "update with a token out of range": lambda: running.update(2**31),
            "truncate to more than there is": lambda: running.truncate(known + 1),
            "truncate to a negative length": lambda: running.truncate(-1),
            "a batch over max_batch_size": lambda: kv.runtime_inputs([[running] * (max_batch_size + 1)]),
            "an unknown table form": lambda: kv.runtime_inputs([[running]], form="none"),
        }
    return wrong


def context(request_id: Any) -> pk.TextContext:
    return pk.TextContext(request_id=request_id, max_length=9, tokens=pk.TokenBuffer(np.array([1])))
