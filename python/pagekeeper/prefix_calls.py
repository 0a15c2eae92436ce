"""The manager's calls about the prefix cache: what is there, is kept, is forgotten, and is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from pagekeeper._native import DiskDirectory, Ledger, TextContext
from pagekeeper.calls import Batch, Request, check_replica, text
from pagekeeper.connectors import KVConnector
from pagekeeper.context import TokenBuffer
from pagekeeper.counts import PrefixReuseSummary
from pagekeeper.disk_tier import revise
from pagekeeper.errors import shown
from pagekeeper.events import Event, EventSnapshot, from_native
from pagekeeper.groups import Groups
from pagekeeper.outer_tiers import OuterTiers
from pagekeeper.params import KVCacheParams, MultiKVCacheParams, Priority, whole_number
from pagekeeper.retention import TokenRangeRetention
from pagekeeper.transfers import COMPLETED, KVConnectorTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

__all__ = ["PrefixCalls"]


class _What(TypedDict):
    """What a prompt is beside its tokens."""

    salt: str | None
    lora_id: str | int | None
    lora_generation: int
    mm_items: Sequence[tuple[bytes, int, int]]
    prompt_embeds: Sequence[tuple[bytes, int, int]]
    extra_ids: ArrayLike | None
    overrides: Sequence[tuple[int, int]]


class PrefixCalls:
    """The part of `PagedKVCacheManager` that is about stored prefixes."""

    params: KVCacheParams | MultiKVCacheParams
    max_seq_len: int | None
    total_num_pages: int
    _groups: Groups
    _core: Ledger
    _hash_seed: str | None
    _connector: KVConnector | None
    _disk: list[DiskDirectory]
    _tiers: OuterTiers | None
    model_name: str | None
    weights_revision: str | None

    def analyze_prefix_reuse(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
        other_namespaces: bool = False,
    ) -> PrefixReuseSummary:
        """What a prompt would reuse now. Changes nothing.

        Args:
            tokens: the prompt.
            salt: isolates those who give different ones.
            lora_id: the adapter, by name or number.
            lora_generation: tells apart adapters loaded under one id.
            mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
            prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
            extra_ids: one unsigned number a token, 0 for none.
            overrides: (token index, value): content values in place of placeholder tokens.
            replica_idx: the data-parallel replica; 0.
            other_namespaces: whether to look for a block that was never stored under other salts and adapters
                too, at most 64 of them. The answer is whether, never which. For operators: it tells of one
                tenant's prompts what salts keep from the others. Slower, and the cache waits meanwhile.

        Raises:
            ValueError: what is out of range, and where; there is no such replica.
        """
        check_replica(replica_idx)
        what: _What = {
            "salt": salt,
            "lora_id": lora_id,
            "lora_generation": lora_generation,
            "mm_items": mm_items,
            "prompt_embeds": prompt_embeds,
            "extra_ids": extra_ids,
            "overrides": overrides,
        }
        held, by_group, present, first_new, miss_reason, evicted_at, walk, rest = self._core.probe(
            tokens, other_namespaces=other_namespaces, **what
        )
        if self._tiers is None or not rest:
            return PrefixReuseSummary(
                held,
                present,
                first_new,
                present,
                miss_reason=miss_reason,
                evicted_at_step=evicted_at,
                allocated_by_group=tuple(by_group),
                walk=walk,
            )
        host, disk = self._tiers.count_cached_prefix(rest)
        if self._groups.is_plain:
            reusable = min(present + host + disk, (len(TokenBuffer(tokens)) - 1) // self.params.page_size)
        else:
            there = (present, self._tiers.lookup_all(rest))
            reusable, full = self._core.probe_with(tokens, there, **what)
            disk = min(disk, full - present)
            host = full - present - disk
        found = host + disk
        return PrefixReuseSummary(
            held,
            reusable,
            rest[found][0] if found < len(rest) else None,
            device_blocks=present,
            host_blocks=host,
            disk_blocks=disk,
            miss_reason=miss_reason if found < len(rest) else None,
            evicted_at_step=evicted_at if found < len(rest) else None,
            allocated_by_group=tuple(by_group),
            walk=walk,
        )

    def probe_prefix_match_length(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
    ) -> int:
        """Tokens that a prompt would reuse now, for routers. May be called from any thread.

        The arguments and errors are those of `analyze_prefix_reuse`, which also says why there are no more.
        """
        found = self.analyze_prefix_reuse(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
            replica_idx=replica_idx,
        )
        return found.reusable_blocks_all * self.params.page_size

    def commit_and_get_block_hashes(self, ctx: Request, group: str | None = None) -> list[bytes]:
        """Shares what is computed and full, and gives the hashes of the request's full blocks in order.

        Calling it again changes nothing. Without prefix caching there are no hashes. They are those of
        `hash_blocks` with the cache's `page_size`, `kv_hash_algo` and `hash_seed`.

        Args:
            ctx: the request.
            group: a group of layers, where there are several; all have the same hashes.

        Returns:
            8 bytes a block, or 32 for "sha256".

        Raises:
            ValueError: the request is not claimed, or there is no such group.
        """
        if group is not None:
            self._groups.index(group)
        hashes = self._core.commit(ctx)
        if self._tiers is not None:
            self._tiers.offload()
        return hashes

    def reset_prefix_cache(self, weights_revision: str | None = None) -> None:
        """Forgets every cached block, as after a change of weights.

        Requests that hold pages, or are suspended, go on, and neither reuse nor share from now on, until they
        are preempted. The cost does not grow with the cache. A disk tier is waited for; Ctrl-C ends that.

        Args:
            weights_revision: what `weights_revision` is from now on; None leaves it.

        Raises:
            TypeError: no text.
            OSError: the disk tier failed: what it held may be found again after a restart. The device forgot
                nothing.
        """
        revision = text(weights_revision, "weights_revision")
        self._core.check()  # a broken ledger refuses before the connector forgets
        if self._connector is not None:
            self._connector.reset_prefix_cache()
        if self._disk and revision is not None:
            revise(self._disk, self._groups, self.model_name, revision)
        self._core.reset_prefix_cache()
        if revision is not None:
            self.weights_revision = revision

    # What is kept, and what is forgotten on purpose.

    def pin(self, ctx: Request) -> int:
        """Keeps a request's stored blocks, also after its release, until `unpin`.

        Blocks that are not full, or not computed, are not stored yet and not pinned.

        Args:
            ctx: the request.

        Returns:
            A number for `unpin`.

        Raises:
            ValueError: the request is not claimed, or is padding.
        """
        return self._core.pin(ctx)

    def unpin(self, pin: int) -> None:
        """Ends a pin: its blocks are cached like others from now on.

        Args:
            pin: what `pin` returned.

        Raises:
            ValueError: it ended before, or never was.
        """
        self._core.unpin(whole_number(pin, "pin", least=0, most=2**64 - 1))

    def session_hint(
        self,
        batch: Batch,
        hint: Literal["resume_soon", "done"],
        *,
        priority: Priority = "high",
        duration_ms: float | None = 600_000.0,
    ) -> None:
        """Says what comes of the sessions of these requests, usually just before their release.

        "resume_soon": their stored blocks get `priority`, for `duration_ms` after the release, but for those
        that have a higher one, or the same for longer. "done": blocks that no other session shares are the
        first to be evicted; what is pinned stays as it is. Both end with the next use of a block by a request
        that has a retention of its own.

        Args:
            batch: the requests.
            hint: "resume_soon" or "done".
            priority: with "resume_soon": 0 to 100, or "low" (20), "medium" (35), "high" (80).
            duration_ms: with "resume_soon": milliseconds by the clock of `begin_step(now=...)`: tell it once
                a step, from the start. None: no end.

        Raises:
            ValueError: a request that is not claimed or is given twice, or what is out of range.
        """
        kept = TokenRangeRetention(0, priority=priority, duration_ms=duration_ms)
        if hint == "done":
            self._core.session_done(batch)
        elif hint == "resume_soon":
            self._core.resume_soon(batch, *kept.native())
        else:
            raise ValueError(f"hint={shown(hint)}: must be 'resume_soon' or 'done'")

    def truncate_prefix(
        self,
        tokens: ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        replica_idx: int = 0,
    ) -> int:
        """Forgets the stored blocks on the device that follow a prefix and that nobody uses.

        The prefix's own blocks stay. Without a full block, such as with no tokens, every unused block of that
        salt and adapter is forgotten.

        Args:
            tokens: the prefix; its full blocks count.
            salt: as in `analyze_prefix_reuse`, like the other arguments.
            lora_id: as there.
            lora_generation: as there.
            mm_items: as there.
            prompt_embeds: as there.
            extra_ids: as there.
            overrides: as there.
            replica_idx: the data-parallel replica; 0.

        Returns:
            How many blocks were forgotten.

        Raises:
            ValueError: what is out of range, and where; there is no such replica.
        """
        check_replica(replica_idx)
        return self._core.truncate_prefix(
            tokens,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
        )

    def prefetch(
        self,
        tokens: TextContext | ArrayLike,
        *,
        salt: str | None = None,
        lora_id: str | int | None = None,
        lora_generation: int = 0,
        mm_items: Sequence[tuple[bytes, int, int]] = (),
        prompt_embeds: Sequence[tuple[bytes, int, int]] = (),
        extra_ids: ArrayLike | None = None,
        overrides: Sequence[tuple[int, int]] = (),
        hint: object = None,
        replica_idx: int = 0,
    ) -> KVConnectorTransfer:
        """Brings stored blocks to the device before they are needed.

        A request that is planned before a prefetch of its tokens has been settled loads the blocks again:
        give its context instead to have it wait for this load.

        Args:
            tokens: a claimed request as its context, which then waits as after `alloc`; or tokens, whose
                stored full blocks are cached on the device when the transfer has been settled by
                `poll_transfers` or `begin_step`.
            salt: with tokens, as in `analyze_prefix_reuse`; so are the next ones.
            lora_id: as there.
            lora_generation: as there.
            mm_items: as there.
            prompt_embeds: as there.
            extra_ids: as there.
            overrides: as there.
            hint: with tokens: what connectors get as `hint`.
            replica_idx: the data-parallel replica; 0.

        Returns:
            A transfer, complete at once when there is nothing to load.

        Raises:
            InsufficientBlocksError: no room now for the blocks to load; for tokens, and for one token more.
            ValueError: as in `alloc` and `analyze_prefix_reuse`.
        """
        check_replica(replica_idx)
        if isinstance(tokens, TextContext):
            if self._tiers is None:
                self._core.slots(tokens)
                return COMPLETED
            return self._tiers.alloc(tokens, None, plan=False)[0]
        what: _What = {
            "salt": salt,
            "lora_id": lora_id,
            "lora_generation": lora_generation,
            "mm_items": mm_items,
            "prompt_embeds": prompt_embeds,
            "extra_ids": extra_ids,
            "overrides": overrides,
        }
        _, _, on_device, *_, missing = self._core.probe(tokens, other_namespaces=False, **what)
        tiers = self._tiers
        if tiers is None or not missing:
            return COMPLETED
        if self._groups.is_plain:
            reach = on_device + tiers.loadable(missing, hint)
        else:
            there = (on_device, tiers.lookup_all(missing, hint))
            _, reach = self._core.probe_with(tokens, there, **what)
        return tiers.prefetch(
            TokenBuffer(tokens).all,
            on_device,
            reach,
            hint,
            salt=salt,
            lora_id=lora_id,
            lora_generation=lora_generation,
            mm_items=mm_items,
            prompt_embeds=prompt_embeds,
            extra_ids=extra_ids,
            overrides=overrides,
        )

    # Events, for indexes elsewhere.

    def get_latest_events(self, timeout: float = 0.0) -> list[Event]:
        """Takes the events recorded since the last call, oldest first. May be called from any thread.

        There are none unless `params.event_buffer_max_size` is set. `pagekeeper.events` says what they are.

        Args:
            timeout: seconds to wait for an event when there is none. Other threads run meanwhile, and a
                `shutdown` does not end the wait.

        Raises:
            ValueError: a timeout below 0, or above 0 where there will never be an event.
        """
        rows = self._core.take_events(timeout)
        if timeout > 0 and not self.params.event_buffer_max_size:
            raise ValueError(f"timeout={timeout}: events are off; set event_buffer_max_size in the params")
        return from_native(rows, self._groups.kinds)

    def event_snapshot(self) -> EventSnapshot:
        """What is cached now, as events, for whoever missed some. May be called from any thread.

        It takes no event: those up to `last_event_id` are included, later ones go on from there. The cost
        grows with the cache, which waits meanwhile. Without `params.event_buffer_max_size` it knows of the
        device alone, else of host memory and disk too.
        """
        last_event_id, rows = self._core.event_snapshot()
        return EventSnapshot(last_event_id, tuple(from_native(rows, self._groups.kinds)))

    @property
    def hash_seed(self) -> str | None:
        """The seed of the block hashes, 64 hexadecimal characters; None is no seed.

        It is what `hash_blocks` needs to give this cache's hashes. Who knows it can make hashes collide.
        """
        return self._hash_seed
