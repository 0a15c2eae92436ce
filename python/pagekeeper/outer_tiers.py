"""Drives a connector for the manager: asks it, starts loads and offloads, and settles what has ended.

The ledger decides what may be loaded and holds the pages; the connector moves bytes. Between the two stands
the rule that scheduled is not done: a load is published when it has landed, pins end when a copy has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagekeeper.connectors import BlockKey, KVConnector
from pagekeeper.errors import KVLoadFailed, KVLoadRefused
from pagekeeper.transfers import CompletedTransfer, KVConnectorTransfer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pagekeeper._native import Ledger, TextContext
    from pagekeeper.manager import Batch

__all__ = ["LoadTransfer", "OuterTiers"]

_log = logging.getLogger("pagekeeper")
_COMPLETED = CompletedTransfer()


class LoadTransfer:
    """A load in flight, as `alloc` returns it: the connector's transfer with the number of the copy.

    Attributes:
        id: the copy's number, the same on every rank; what `completions` lists.
        block_ids: the device pages that are loaded, in the order of the blocks.
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
            KVLoadFailed: the pages hold no KV; the request computes them.
        """
        self._transfer.result()

    def synchronize(self, timeout: float | None = None) -> None:
        """`result`, for at most `timeout` seconds.

        Raises:
            TimeoutError: the copy has not ended by then.
            KVLoadFailed: the pages hold no KV; the request computes them.
        """
        self._transfer.synchronize(timeout)

    def cancel(self) -> bool:
        """Asks for the copy not to be made; whether that was in time."""
        return self._transfer.cancel()

    def __await__(self) -> Any:
        return self._transfer.__await__()

    def __repr__(self) -> str:
        return f"LoadTransfer(id={self.id}, blocks={len(self.block_ids)})"


@dataclass
class _Load:
    transfer: LoadTransfer
    request_id: object
    slot: int
    prefetch: TextContext | None
    """A request of our own that only brings blocks in: it ends with its load."""


class OuterTiers:
    """What the manager does with its connector."""

    def __init__(self, core: Ledger, connector: KVConnector) -> None:
        self._core = core
        self._connector = connector
        self._loads: dict[int, _Load] = {}
        self._offloads: dict[int, KVConnectorTransfer] = {}
        self._ready: list[object] = []
        """Requests whose load ended, that nobody was told of yet."""
        self._errors = 0

    # Loads

    def alloc(
        self, batch: Batch, num_tokens: int | ArrayLike | None, *, plan: bool = True
    ) -> list[KVConnectorTransfer]:
        """`PagedKVCacheManager.alloc` of one request or several.

        Without `plan` it only begins loads.
        """
        core = self._core
        slots = core.slots(batch)
        wanted = core.wanted(batch)
        loads = [0 if one is None else self._loadable(*one) for one in wanted]
        if not plan and not any(loads):
            return [_COMPLETED] * len(slots)
        jobs = core.alloc_with_loads(batch, num_tokens, loads)
        for one in wanted:
            if one is not None and one[1]:
                self._touch(one[0][: one[1]])
        transfers: list[KVConnectorTransfer] = [_COMPLETED] * len(slots)
        place = {slot: index for index, slot in enumerate(slots)}
        ended: list[int] = []
        for number, (slot, first, copy, pages) in enumerate(jobs):
            keys, _, hint = wanted[place[slot]] or ((), 0, None)
            try:
                transfer = self._start_load(copy, pages, _keys(keys[first : first + len(pages)]), hint)
            except BaseException:  # an interrupt: what was not begun is not waited for
                core.end_copies([(job[2], "refused") for job in jobs[number:]])
                raise
            if transfer is None:
                ended.append(slot)
            else:
                self._loads[copy] = _Load(transfer, core.request_id(slot), slot, None)
                transfers[place[slot]] = transfer
        if ended and plan:
            bounds = _bounds_of(num_tokens, [place[slot] for slot in ended])
            core.alloc(np.array(ended, np.int32), bounds)
        return transfers

    def prefetch(self, ctx: TextContext) -> KVConnectorTransfer:
        """Loads what the tiers have of a request that is claimed for that alone, and ends it then."""
        try:
            [transfer] = self.alloc(ctx, None, plan=False)
        except BaseException:
            self._core.unclaim(ctx)
            raise
        if isinstance(transfer, LoadTransfer):
            self._loads[transfer.id].prefetch = ctx
        else:
            self._core.release(ctx)
        return transfer

    def _loadable(self, keys: Sequence[tuple[bytes, bytes]], on_device: int, hint: object) -> int:
        """How many blocks after those on the device the connector has without a gap."""
        rest = _keys(keys[on_device:])
        if not rest:
            return 0
        try:
            present = list(self._connector.lookup(rest, 0, hint))
        except Exception:
            self._note("lookup")
            return 0
        found = next((index for index, is_there in enumerate(present) if not is_there), len(present))
        return min(found, len(rest))

    def _start_load(
        self, copy: int, pages: list[int], keys: list[BlockKey], hint: object
    ) -> LoadTransfer | None:
        """The load in flight; None when it has ended already and the ledger knows how."""
        try:
            transfer = self._connector.load(pages, keys, 0, hint)
        except KVLoadRefused:
            self._core.end_copies([(copy, "refused")])
            return None
        except Exception:
            self._note("load")
            self._core.end_copies([(copy, "failed")])
            return None
        if not _is_complete(transfer):
            return LoadTransfer(copy, pages, transfer)
        self._core.end_copies([(copy, self._outcome(transfer))])
        return None

    def _touch(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            self._connector.touch(_keys(keys), 0)
        except Exception:
            self._note("touch")

    # Offloads

    def offload(self) -> None:
        """Hands what was published since the last call to the connector."""
        for copy, pages, keys in self._core.take_offloads():
            try:
                transfer = self._connector.offload(pages, _keys(keys), 0)
            except Exception:
                self._note("offload")
                self._core.end_copies([(copy, "failed")])
                continue
            if _is_complete(transfer):
                self._core.end_copies([(copy, self._outcome(transfer))])
            else:
                self._offloads[copy] = transfer

    # What has ended

    def completed(self) -> list[int]:
        """Copies that have ended here."""
        loads = [copy for copy, load in self._loads.items() if _is_complete(load.transfer)]
        return loads + [copy for copy, transfer in self._offloads.items() if _is_complete(transfer)]

    def ends(self, copies: Iterable[int]) -> list[tuple[int, str]]:
        """How each of these copies ended, as the ledger is told.

        Raises:
            ValueError: a copy is still in flight here.
        """
        return [(copy, self._end(copy)) for copy in copies]

    def _end(self, copy: int) -> str:
        load = self._loads.get(copy)
        transfer = self._offloads.get(copy) if load is None else load.transfer
        if transfer is None:
            return "done"  # not a connector's
        if not _is_complete(transfer):
            raise ValueError(f"completions: transfer {copy} is still in flight")
        return self._outcome(transfer)

    def settle(self, ends: Iterable[tuple[int, str]], slots: Iterable[int]) -> None:
        """The ledger was told of `ends`; the requests under `slots` waited for them."""
        waited = set(slots)
        for copy, _ in ends:
            self._offloads.pop(copy, None)
            load = self._loads.pop(copy, None)
            if load is None:
                continue
            if load.prefetch is not None:
                if load.prefetch.slot is not None:
                    self._core.release(load.prefetch)
            elif load.slot in waited:
                self._ready.append(load.request_id)

    def take_ready(self) -> list[object]:
        """Requests that wait no more and were not named before."""
        ready, self._ready = self._ready, []
        return ready

    # The rest of the protocol

    def count_cached_prefix(self, keys: Sequence[tuple[bytes, bytes]]) -> tuple[int, int]:
        """Leading blocks that the tiers have, (host, disk)."""
        try:
            host, disk = self._connector.count_cached_prefix(_keys(keys), 0, None)
        except Exception:
            self._note("count_cached_prefix")
            return 0, 0
        return host, disk

    def metrics(self) -> dict[str, int]:
        """The connector's, each with "connector_" before its name, and calls of it that raised."""
        own = {f"connector_{name}": value for name, value in self._connector.metrics().items()}
        return {**own, "connector_errors": self._errors}

    def _outcome(self, transfer: KVConnectorTransfer) -> str:
        """How a complete transfer ended."""
        try:
            transfer.result()
        except KVLoadFailed as error:
            _log.warning("a copy failed: %s", error)
            return "failed"
        except Exception:
            self._note("a transfer")
            return "failed"
        return "done"

    def _note(self, call: str) -> None:
        """Counts and logs the exception that is being handled."""
        self._errors += 1
        _log.exception("connector: %s raised", call)


def _keys(keys: Sequence[tuple[bytes, bytes]]) -> list[BlockKey]:
    return [BlockKey(*key) for key in keys]


def _is_complete(transfer: KVConnectorTransfer) -> bool:
    """A transfer that cannot say whether it is complete has ended: `result` says how."""
    try:
        return bool(transfer.is_complete())
    except Exception:
        _log.exception("connector: is_complete raised")
        return True


def _bounds_of(num_tokens: int | ArrayLike | None, indices: list[int]) -> Any:
    """The bounds of some requests of a batch."""
    if num_tokens is None or np.ndim(num_tokens) == 0:
        return num_tokens
    bounds = np.asarray(num_tokens)
    return bounds if len(bounds) == 1 else bounds[indices]
