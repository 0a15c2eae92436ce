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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pagekeeper._native import TextContext
from pagekeeper.connectors import BlockKey, KVConnector, NullConnector
from pagekeeper.context import RequestID
from pagekeeper.errors import InsufficientBlocksError, KVLoadFailed, KVLoadRefused, shown
from pagekeeper.transfers import COMPLETED, KVConnectorTransfer, LoadTransfer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagekeeper._native import Ledger
    from pagekeeper.calls import Batch
    from pagekeeper.groups import Groups

    _Wanted: TypeAlias = tuple[list[tuple[bytes, bytes]], int, object]
    """Keys of a prompt's blocks, how many of them are on the device, and the request's hint."""

__all__ = ["OuterTiers"]

_log = logging.getLogger("pagekeeper")


@dataclass
class _Load:
    request_id: object
    slot: int
    prefetch: TextContext | None = None
    """A request of our own that only brings blocks in: it ends with its load."""


class OuterTiers:
    """What the manager does with its connector.

    Args:
        core: the ledger.
        connector: the tiers.
        groups: the groups of layers of the cache.
        page_size: tokens a block.
        most_tokens: most tokens that one request may have.
    """

    def __init__(
        self, core: Ledger, connector: KVConnector, groups: Groups, page_size: int, most_tokens: int
    ) -> None:
        self._core = core
        self._groups = len(groups.params)
        self._is_plain = groups.is_plain
        self._page_size = page_size
        self._most_tokens = most_tokens
        self._connector = connector
        self._transfers: dict[int, KVConnectorTransfer] = {}
        """Copies in flight."""
        self._outcomes: dict[int, str] = {}
        """How those of them ended that were found complete."""
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
        wanted: Sequence[_Wanted | None] = core.wanted(batch)
        slots = core.slots(batch)
        transfers: list[KVConnectorTransfer] = [COMPLETED] * len(slots)
        if self._is_plain:
            loads = [0 if one is None else self.loadable(one[0][one[1] :], one[2]) for one in wanted]
            if not plan and not any(loads):
                return transfers
            jobs = core.alloc_with_loads(batch, num_tokens, loads)
        else:
            there = [(0, []) if one is None else self._there(one) for one in wanted]
            if not plan and not any(any(of_group) for _, lists in there for of_group in lists):
                return transfers
            jobs = core.alloc_with_blocks(batch, num_tokens, there, not plan)
        place = {slot: position for position, slot in enumerate(slots)}
        used = [0 if one is None else one[1] for one in wanted]
        ended: list[int] = []
        try:
            for slot, copy, blocks, pages in jobs:
                keys, _, hint = wanted[place[slot]] or ((), 0, None)
                self._wait_for(copy, slot)
                lists = [_keys([keys[block] for block in of_group]) for of_group in blocks]
                transfer = self._load(copy, pages, lists, hint)
                used[place[slot]] = max([used[place[slot]], *(block + 1 for of in blocks for block in of)])
                if transfer is None:
                    del self._loads[copy]
                    ended.append(slot)
                else:
                    flat = [page for of_group in pages for page in of_group]
                    transfers[place[slot]] = LoadTransfer(copy, flat, transfer)
        except BaseException:
            self._refuse_rest([job[1] for job in jobs])
            raise
        if ended and plan:
            bounds = _bounds_of(num_tokens, [place[slot] for slot in ended])
            core.alloc(np.array(ended, np.int32), bounds)
        for one, end in zip(wanted, used, strict=True):
            if one is not None and end:
                self._touch(one[0][:end])
        self.offload()
        return transfers

    def _by_group(self, lists: list[list[Any]]) -> list[Any]:
        """As a connector gets what there is one list a group of."""
        return lists if self._groups > 1 else lists[0]

    def _wait_for(self, copy: int, slot: int) -> None:
        """The request under `slot` waits for the load."""
        self._loads[copy] = _Load(self._core.request_id(slot), slot)

    def prefetch(
        self,
        tokens: NDArray[np.int32],
        on_device: int,
        reach: int,
        hint: object,
        *,
        salt: str | None,
        lora_id: str | int | None,
        lora_generation: int,
        mm_items: Sequence[tuple[bytes, int, int]],
        prompt_embeds: Sequence[tuple[bytes, int, int]],
        extra_ids: ArrayLike | None,
        overrides: Sequence[tuple[int, int]],
    ) -> KVConnectorTransfer:
        """Loads the leading blocks of a prompt that the tiers have, for a request of our own.

        It has these blocks and one token more, since the block with the last token is never loaded. It ends
        with its load.

        Args:
            tokens: the prompt, int32.
            on_device: blocks of it that are on the device.
            reach: how many leading blocks of it are there in all.
            hint: what the connector gets.
            salt: like the rest, as in `PagedKVCacheManager.prefetch`.
            lora_id: as there.
            lora_generation: as there.
            mm_items: as there.
            prompt_embeds: as there.
            extra_ids: as there.
            overrides: as there.

        Raises:
            InsufficientBlocksError: no room for them now.
        """
        blocks = min(reach, (self._most_tokens - 1) // self._page_size)
        stored = blocks * self._page_size
        items, embeds = _starting_before(stored, mm_items), _starting_before(stored, prompt_embeds)
        # A block is named by the whole length of what reaches into it.
        length = max([stored + 1, *(first + count for _, first, count in [*items, *embeds])])
        if blocks <= on_device or length > self._most_tokens:
            return COMPLETED
        ctx = TextContext(
            request_id=RequestID(),
            tokens=np.append(tokens, tokens[:1])[:length],
            cache_salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=items,
            prompt_embeds=embeds,
            extra_ids=None
            if extra_ids is None
            else np.append(np.asarray(extra_ids, np.uint64), np.uint64(0))[:length],
            token_overrides=[(token, value) for token, value in overrides if token < stored],
            dkv_cache_hint=hint,
        )
        self._core.claim(ctx)
        try:
            [transfer] = self.alloc(ctx, None, plan=False)
        except InsufficientBlocksError as error:
            self._core.unclaim(ctx)
            raise InsufficientBlocksError(
                f"prefetch: needs {error.needed} pages for {blocks - on_device} blocks to load and the token "
                f"behind them; {error.free} are free",
                needed=error.needed,
                free=error.free,
                evictable=error.evictable,
                pinned=error.pinned,
            ) from None
        except BaseException:
            self._core.unclaim(ctx)
            raise
        if isinstance(transfer, LoadTransfer):
            self._loads[transfer.id].prefetch = ctx
        else:
            self._core.unclaim(ctx)
        return transfer

    def loadable(self, missing: Sequence[tuple[bytes, bytes]], hint: object) -> int:
        """How many of these blocks, which follow those on the device, the connector has without a gap."""
        keys = _keys(missing)
        if not keys:
            return 0
        [present] = self.lookup([keys], hint)
        return sum(1 for _ in takewhile(bool, present))

    def _there(self, wanted: _Wanted) -> tuple[int, list[list[bool]]]:
        """Which blocks behind those on the device the connector has in each group, and the first of them."""
        keys, on_device, hint = wanted
        return on_device, self.lookup_all(keys[on_device:], hint)

    def lookup_all(self, keys: Sequence[tuple[bytes, bytes]], hint: object = None) -> list[list[bool]]:
        """Whether the connector has each of these blocks in each group."""
        return self.lookup([_keys(keys)] * self._groups, hint)

    def lookup(self, keys: list[list[BlockKey]], hint: object) -> list[list[bool]]:
        """Whether the connector has each of these blocks, a list a group."""
        if not any(keys):
            return [[] for _ in keys]
        try:
            given = self._connector.lookup(self._by_group(keys), 0, hint)
            answers = [given] if self._groups == 1 else list(islice(given, len(keys)))
            pairs = zip(answers, keys, strict=False)  # who answers for too few groups has nothing of the rest
            there = [[bool(one) for one in islice(answer, len(of))] for answer, of in pairs]
        except Exception:
            self._note("lookup")
            return [[] for _ in keys]
        there += [[] for _ in keys[len(there) :]]
        answered, asked = sum(map(len, there)), sum(map(len, keys))
        if answered < asked:
            self._errors += 1
            _log.error("connector: lookup answered for %d of %d blocks", answered, asked)
        return there

    def _load(
        self, copy: int, pages: list[list[int]], keys: list[list[BlockKey]], hint: object
    ) -> KVConnectorTransfer | None:
        blocks = self._by_group(pages), self._by_group(keys)
        return self._begin(copy, "load", lambda: self._connector.load(*blocks, 0, hint))

    def _touch(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            self._connector.touch(self._by_group([_keys(keys)] * self._groups), 0)
        except Exception:
            self._note("touch")

    # Offloads

    def offload(self) -> None:
        """Hands what the ledger offers since the last call to the connector."""
        jobs = self._core.take_offloads()
        try:
            for copy, pages, keys in jobs:
                self._offload(copy, pages, [_keys(of_group) for of_group in keys])
        except BaseException:
            self._refuse_rest([copy for copy, _, _ in jobs])
            raise

    def _offload(self, copy: int, pages: list[list[int]], keys: list[list[BlockKey]]) -> None:
        blocks = self._by_group(pages), self._by_group(keys)
        self._begin(copy, "offload", lambda: self._connector.offload(*blocks, 0))

    # Both

    def _begin(
        self, copy: int, call: str, begin: Callable[[], KVConnectorTransfer]
    ) -> KVConnectorTransfer | None:
        """The transfer in flight; None when it has ended already and the ledger knows how."""
        try:
            transfer = begin()
            if not isinstance(transfer, KVConnectorTransfer):
                raise TypeError(f"{call} returned {shown(transfer)}, must be a KVConnectorTransfer")
        except KVLoadRefused:
            end = "refused"
        except Exception:
            self._note(call)
            end = "failed"
        else:
            self._transfers[copy] = transfer  # from here on its end is looked for, whatever happens
            if not self._is_complete(copy):
                return transfer
            end = self._end(copy)
            self._forget(copy)
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
        if copies is None:
            loads_first = sorted(self._transfers, key=lambda copy: copy not in self._loads)
            return [(copy, self._end(copy)) for copy in loads_first if self._is_complete(copy)]
        copies = list(copies)
        for copy in copies:
            if copy in self._transfers and not self._is_complete(copy):
                raise ValueError(f"completions: transfer {copy} is still in flight")
        return [(copy, self._end(copy)) for copy in copies]

    def _is_complete(self, copy: int) -> bool:
        """A transfer that cannot say whether it is complete has ended: `result` says how."""
        if copy in self._outcomes:
            return True
        try:
            return bool(self._transfers[copy].is_complete())
        except Exception:
            self._note("is_complete")
            self._end(copy)
            return True

    def _end(self, copy: int) -> str:
        """How a complete copy ended. A transfer is asked once, however often the call is tried."""
        if copy not in self._transfers:
            return "done"  # not a connector's
        if copy not in self._outcomes:
            self._outcomes[copy] = self._outcome(self._transfers[copy])
        return self._outcomes[copy]

    def _forget(self, copy: int) -> None:
        self._transfers.pop(copy, None)
        self._outcomes.pop(copy, None)

    def settle(self, ends: Iterable[tuple[int, str]], slots: Iterable[int]) -> None:
        """The ledger was told of `ends`; the requests under `slots` waited for them."""
        waiting = {}
        for copy, _ in ends:
            self._forget(copy)
            load = self._loads.pop(copy, None)
            if load is None:
                continue
            if load.prefetch is not None:
                if load.prefetch.slot is not None:
                    self._core.release(load.prefetch)
            else:
                waiting[load.slot] = load.request_id
        ready = {slot: waiting[slot] for slot in slots if slot in waiting}
        if ready:
            self._ready = self._claimed(self._ready | ready)

    def take_ready(self) -> list[object]:
        """Requests that wait no more and were not named before."""
        ready, self._ready = self._claimed(self._ready), {}
        return list(ready.values())

    def _claimed(self, requests: dict[int, object]) -> dict[int, object]:
        """Those of the requests, by slot, that were not released meanwhile."""
        return {slot: one for slot, one in requests.items() if self._core.request_id(slot) is not None}

    # The rest of the protocol

    def flush(self, timeout: float) -> bool:
        """`PagedKVCacheManager.flush`: nothing is known of what survives."""
        del timeout
        return True

    def shutdown(self) -> None:
        """Shuts the connector down, and asks it nothing more but how its copies ended."""
        connector, self._connector = self._connector, NullConnector()
        connector.shutdown()

    def count_cached_prefix(self, keys: Sequence[tuple[bytes, bytes]]) -> tuple[int, int]:
        """Leading blocks that the tiers have, (host, disk)."""
        try:
            lists = self._by_group([_keys(keys)] * self._groups)
            host, disk = map(index, self._connector.count_cached_prefix(lists, 0, None))
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


def _starting_before(end: int, spans: Sequence[tuple[bytes, int, int]]) -> list[tuple[bytes, int, int]]:
    return [span for span in spans if span[1] < end]


def _bounds_of(num_tokens: int | ArrayLike | None, indices: list[int]) -> Any:
    """The bounds of some requests of a batch."""
    if num_tokens is None or np.ndim(num_tokens) == 0:
        return num_tokens
    bounds = np.asarray(num_tokens)
    return bounds if len(bounds) == 1 else bounds[indices]
