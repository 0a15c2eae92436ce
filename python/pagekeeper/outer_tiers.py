"""Drives a connector for the manager: asks it, starts loads and offloads, and settles what has ended.

The ledger decides what may be loaded and holds the pages; the connector moves bytes. Between the two stands
the rule that scheduled is not done: a load is published when it has landed, pins end when a copy has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from pagekeeper.connectors import BlockKey, KVConnector
from pagekeeper.errors import KVLoadFailed, KVLoadRefused, shown
from pagekeeper.transfers import CompletedTransfer, KVConnectorTransfer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pagekeeper._native import Ledger, TextContext
    from pagekeeper.calls import Batch

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
    request_id: object
    slot: int
    prefetch: TextContext | None = None
    """A request of our own that only brings blocks in: it ends with its load."""


class OuterTiers:
    """What the manager does with its connector."""

    def __init__(self, core: Ledger, connector: KVConnector) -> None:
        self._core = core
        self._connector = connector
        self._transfers: dict[int, KVConnectorTransfer] = {}
        """Copies in flight."""
        self._loads: dict[int, _Load] = {}
        """Who waits, or waited, for those of them that are loads."""
        self._ready: dict[int, object] = {}
        """Requests by slot whose load ended, that nobody was told of yet."""
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
        transfers: list[KVConnectorTransfer] = [_COMPLETED] * len(slots)
        place = {slot: position for position, slot in enumerate(slots)}
        ended: list[int] = []
        try:
            for slot, first, copy, pages in jobs:
                keys, _, hint = wanted[place[slot]] or ((), 0, None)
                self._loads[copy] = _Load(core.request_id(slot), slot)
                transfer = self._load(copy, pages, _keys(keys[first : first + len(pages)]), hint)
                if transfer is None:
                    del self._loads[copy]
                    ended.append(slot)
                else:
                    transfers[place[slot]] = LoadTransfer(copy, pages, transfer)
        except BaseException:
            self._refuse_rest([copy for _, _, copy, _ in jobs])
            raise
        if ended and plan:
            bounds = _bounds_of(num_tokens, [place[slot] for slot in ended])
            core.alloc(np.array(ended, np.int32), bounds)
        for one in wanted:
            if one is not None and one[1]:
                self._touch(one[0][: one[1]])
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
            self._core.unclaim(ctx)
        return transfer

    def _loadable(self, keys: Sequence[tuple[bytes, bytes]], on_device: int, hint: object) -> int:
        """How many blocks after those on the device the connector has without a gap."""
        rest = _keys(keys[on_device:])
        if not rest:
            return 0
        try:
            present = islice(self._connector.lookup(rest, 0, hint), len(rest))
            return sum(1 for _ in takewhile(bool, present))
        except Exception:
            self._note("lookup")
            return 0

    def _load(
        self, copy: int, pages: list[int], keys: list[BlockKey], hint: object
    ) -> KVConnectorTransfer | None:
        return self._begin(copy, "load", lambda: self._connector.load(pages, keys, 0, hint))

    def _touch(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            self._connector.touch(_keys(keys), 0)
        except Exception:
            self._note("touch")

    # Offloads

    def offload(self) -> None:
        """Hands what was published since the last call to the connector."""
        jobs = self._core.take_offloads()
        try:
            for copy, pages, keys in jobs:
                self._offload(copy, pages, _keys(keys))
        except BaseException:
            self._refuse_rest([copy for copy, _, _ in jobs])
            raise

    def _offload(self, copy: int, pages: list[int], keys: list[BlockKey]) -> None:
        self._begin(copy, "offload", lambda: self._connector.offload(pages, keys, 0))

    # Both

    def _begin(
        self, copy: int, call: str, begin: Callable[[], KVConnectorTransfer]
    ) -> KVConnectorTransfer | None:
        """The transfer in flight; None when it has ended already and the ledger knows how."""
        try:
            transfer = begin()
        except KVLoadRefused:
            end = "refused"
        except Exception:
            self._note(call)
            end = "failed"
        else:
            self._transfers[copy] = transfer  # from here on its end is looked for, whatever happens
            if not _is_complete(transfer):
                return transfer
            del self._transfers[copy]
            end = self._outcome(transfer)
        self._core.end_copies([(copy, end)])
        return None

    def _refuse_rest(self, copies: list[int]) -> None:
        """After an interrupt: of these copies, those that were not begun are not waited for."""
        rest = [copy for copy in copies if copy not in self._transfers and self._core.is_copying(copy)]
        for copy in rest:
            self._loads.pop(copy, None)
        self._core.end_copies([(copy, "refused") for copy in rest])

    # What has ended

    def ends(self, copies: Iterable[int] | None) -> list[tuple[int, str]]:
        """How each of these copies ended, as the ledger is told; None: all that have ended here.

        Raises:
            ValueError: a copy is still in flight here.
        """
        if copies is not None:
            return [(copy, self._end(copy)) for copy in copies]
        loads_first = sorted(self._transfers.items(), key=lambda item: item[0] not in self._loads)
        return [(copy, self._outcome(transfer)) for copy, transfer in loads_first if _is_complete(transfer)]

    def _end(self, copy: int) -> str:
        transfer = self._transfers.get(copy)
        if transfer is None and copy not in self._loads:
            return "done"  # not a connector's
        if transfer is None or not _is_complete(transfer):
            raise ValueError(f"completions: transfer {copy} is still in flight")
        return self._outcome(transfer)

    def settle(self, ends: Iterable[tuple[int, str]], slots: Iterable[int]) -> None:
        """The ledger was told of `ends`; the requests under `slots` waited for them."""
        waited = set(slots)
        for copy, _ in ends:
            self._transfers.pop(copy, None)
            load = self._loads.pop(copy, None)
            if load is None:
                continue
            if load.prefetch is not None:
                if load.prefetch.slot is not None:
                    self._core.release(load.prefetch)
            elif load.slot in waited:
                self._ready[load.slot] = load.request_id
        if waited:
            self._ready = self._claimed(self._ready)

    def take_ready(self) -> list[object]:
        """Requests that wait no more and were not named before."""
        ready, self._ready = self._claimed(self._ready), {}
        return list(ready.values())

    def _claimed(self, requests: dict[int, object]) -> dict[int, object]:
        """Those of the requests, by slot, that were not released meanwhile."""
        return {slot: one for slot, one in requests.items() if self._core.request_id(slot) is not None}

    # The rest of the protocol

    def count_cached_prefix(self, keys: Sequence[tuple[bytes, bytes]]) -> tuple[int, int]:
        """Leading blocks that the tiers have, (host, disk)."""
        try:
            host, disk = map(index, self._connector.count_cached_prefix(_keys(keys), 0, None))
            if min(host, disk) < 0 or host + disk > len(keys):
                raise ValueError(f"({host}, {disk}) of {len(keys)} blocks")
        except Exception:
            self._note("count_cached_prefix")
            return 0, 0
        return host, disk

    def metrics(self) -> dict[str, int]:
        """The connector's, each with "connector_" before its name, and calls of it that raised."""
        try:
            own = {f"connector_{name}": value for name, value in self._connector.metrics().items()}
        except Exception:
            self._note("metrics")
            own = {}
        return {**own, "connector_errors": self._errors}

    def _outcome(self, transfer: KVConnectorTransfer) -> str:
        """How a complete transfer ended."""
        try:
            result: Callable[[], object] = transfer.result
            if (given := result()) is not None:
                raise TypeError(f"result gave {shown(given)}; it gives None or raises")
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
