"""Requests are suspended and resumed at random moments, between all else that happens to them (MGR-14).

Each token's KV is a function of its prefix and of the weights. Whatever a request has must be right after
every call: a byte that came back wrong, from another request or from other weights, shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pytest
from numpy.typing import NDArray

import pagekeeper as pk

PAGE_SIZE, DIM = 4, 4
BYTES = 2 * PAGE_SIZE * DIM * 4
PAGES, UNITS = 20, 26


@dataclass
class Live:
    """A claimed request, and what its tokens with KV must be."""

    ctx: pk.TextContext
    kv: list[int] = field(default_factory=list)
    """The byte of each token with KV."""
    revision: int = 0
    """The weights that its load is of."""
    waits: bool = False
    """For a load or a resumption."""
    suspended: bool = False
    transfer: pk.KVConnectorTransfer | None = None


def byte_of(prefix: list[int], revision: int) -> int:
    """The KV of the last token of a prefix."""
    return blake2b(f"{revision} {prefix}".encode(), digest_size=1).digest()[0]


class World:
    """A cache, its requests, and an engine that calls at random."""

    def __init__(self, seed: int, on_duplicate: str) -> None:
        self.random = random.Random(seed)
        config = pk.KVConnectorConfig(
            type="rust_tiered", host_offload_max_gb=UNITS * BYTES / 2**30, num_copy_lanes=2
        )
        params = pk.MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=DIM,
            num_layers=1,
            page_size=PAGE_SIZE,
            on_duplicate=on_duplicate,  # type: ignore[arg-type]
            kv_connector_config=config,
        )
        self.memory = np.zeros((PAGES + 1, BYTES), np.uint8)
        self.kv = pk.PagedKVCacheManager(
            params, total_num_pages=PAGES, max_batch_size=16, buffers=[self.memory]
        )
        self.live: list[Live] = []
        self.revision = 0
        self.suspended = self.resumed = self.further = self.lost = self.refused = 0

    @property
    def cells(self) -> NDArray[np.uint8]:
        """[page, K and V, token, bytes]."""
        return self.memory.reshape(PAGES + 1, 2, PAGE_SIZE, DIM * 4)

    def run(self, calls: int) -> None:
        verbs = {
            self.claim: 3,
            self.compute: 10,
            self.suspend: 5,
            self.resume: 8,
            self.poll: 6,
            self.fork: 1,
            self.truncate: 1,
            self.preempt: 1,
            self.release: 2,
            self.reset: 0.3,
            self.forget: 0.5,
            self.sleep: 0.2,
        }
        for verb in self.random.choices(list(verbs), list(verbs.values()), k=calls):
            verb()
            self.kv.verify()
            self.check()
        self.end()

    # What an engine does.

    def claim(self) -> None:
        if len(self.live) >= 8:
            return
        family = self.random.randrange(3)
        length = self.random.randint(1, 30)
        tokens = [family * 100 + token // 8 for token in range(length)]  # long shared prefixes
        tokens[-1] += self.random.randrange(2)
        ctx = pk.TextContext(
            request_id=pk.RequestID(), tokens=tokens, max_length=48, no_store=self.random.random() < 0.2
        )
        self.kv.claim(ctx)
        self.live.append(Live(ctx))

    def compute(self) -> None:
        """A forward of one request, a chunk of its prompt or a token."""
        one = self.pick(lambda one: not one.waits and not one.suspended)
        if one is None:
            return
        ctx = one.ctx
        if len(one.kv) == len(ctx):
            if len(ctx) >= 44:
                return
            ctx.update(self.random.randrange(2))
        try:
            self.kv.alloc(ctx, num_tokens=self.random.choice([None, 1, 3, 4, 9]))
        except pk.InsufficientBlocksError:
            self.refused += 1
            return
        one.revision = self.revision
        self.take_hits(one)
        if ctx.active_length == 0:
            one.waits = True
            return
        self.kv.runtime_inputs([[ctx]])
        (row,) = self.kv.get_cache_indices(ctx)
        tokens = ctx.tokens.all.tolist()
        for token in range(ctx.processed_length, ctx.processed_length + ctx.active_length):
            one.kv.append(byte_of(tokens[: token + 1], self.revision))
            self.cells[row[token // PAGE_SIZE], :, token % PAGE_SIZE] = one.kv[-1]
        self.kv.step(ctx, counts=0)

    def take_hits(self, one: Live) -> None:
        """What was found in the cache is of the weights when it was asked for."""
        tokens = one.ctx.tokens.all.tolist()
        for token in range(len(one.kv), one.ctx.processed_length):
            one.kv.append(byte_of(tokens[: token + 1], one.revision))

    def suspend(self) -> None:
        one = self.pick(lambda one: bool(one.kv) and not one.waits and not one.suspended)
        if one is None:
            return
        one.transfer = self.tried(lambda: self.kv.suspend(one.ctx))
        if one.transfer is None:
            return
        one.suspended = True
        self.suspended += 1
        if self.random.random() < 0.1:
            one.transfer.cancel()

    def resume(self) -> None:
        one = self.pick(lambda one: one.suspended and not one.waits)
        if one is None:
            return
        returning = self.tried(lambda: self.kv.resume(one.ctx))
        if returning is None:
            return
        one.transfer, one.waits = returning, True
        one.revision = self.revision  # of what others stored meanwhile
        if self.random.random() < 0.1:
            one.transfer.cancel()

    def poll(self) -> None:
        named = self.kv.poll_transfers()
        for one in self.live:
            if one.ctx.request_id in named:
                named.remove(one.ctx.request_id)
                self.wake_up(one)
        assert named == [], "nobody else waits"

    def wake_up(self, one: Live) -> None:
        """It was named: its load has ended, it came back, or it was lost."""
        assert one.waits or one.suspended
        if one.suspended and one.ctx.processed_length == 0:
            assert one.transfer is not None
            with pytest.raises(pk.KVLoadFailed):
                one.transfer.result()
            self.lost += 1
            self.start_over(one)
        elif one.suspended:
            assert one.waits
            self.further += one.ctx.processed_length > len(one.kv)
            self.take_hits(one)
            self.resumed += 1
        else:
            self.take_hits(one)
        one.waits = one.suspended = False

    def start_over(self, one: Live) -> None:
        one.kv.clear()
        one.waits = one.suspended = False

    def fork(self) -> None:
        one = self.pick(lambda one: not one.waits and not one.suspended and len(self.live) < 8)
        if one is not None:
            child = self.kv.fork(one.ctx)
            self.live.append(Live(child, one.kv[: child.processed_length]))

    def truncate(self) -> None:
        one = self.pick(lambda one: not one.suspended)
        if one is not None and len(one.ctx) > 1:
            length = self.random.randint(1, len(one.ctx) - 1)
            one.ctx.truncate(length)
            one.waits = False
            del one.kv[one.ctx.processed_length :]

    def preempt(self) -> None:
        one = self.pick(lambda one: True)
        if one is not None:
            self.kv.preempt(one.ctx)
            self.start_over(one)

    def release(self) -> None:
        one = self.pick(lambda one: True)
        if one is not None:
            self.kv.release(one.ctx)
            self.live.remove(one)

    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        self.revision += 1

    def forget(self) -> None:
        self.kv.truncate_prefix([])

    def sleep(self) -> None:
        """Sets everybody aside that fits, preempts the rest, sleeps, and wakes with other memory."""
        self.settle()
        for one in self.live:
            if one.kv and not one.suspended:
                try:
                    self.kv.suspend(one.ctx).synchronize(10)
                except pk.InsufficientBlocksError:
                    self.kv.preempt(one.ctx)
                    self.start_over(one)
                else:
                    self.suspended += 1
                    one.suspended = True
        self.kv.sleep()
        self.memory = np.full_like(self.memory, 0xEE)
        self.kv.wake(buffers=[self.memory])
        self.poll()

    def tried(self, call: Callable[[], pk.KVConnectorTransfer]) -> pk.KVConnectorTransfer | None:
        """What `call` gives; None when it was refused, which changes nothing."""
        before = self.kv.fingerprint()
        try:
            return call()
        except (pk.InsufficientBlocksError, ValueError) as error:
            if isinstance(error, ValueError) and "is being suspended" not in str(error):
                raise
            self.refused += isinstance(error, pk.InsufficientBlocksError)
        assert self.kv.fingerprint() == before
        return None

    def pick(self, fits: Callable[[Live], bool]) -> Live | None:
        fitting = [one for one in self.live if fits(one)]
        return self.random.choice(fitting) if fitting else None

    # What must hold.

    def check(self) -> None:
        for one in self.live:
            if one.suspended:
                assert one.ctx.processed_length == 0
                continue
            assert one.ctx.processed_length == len(one.kv)
            (row,) = self.kv.get_cache_indices(one.ctx)
            tokens = np.arange(len(one.kv))
            found = self.cells[np.array(row, int)[tokens // PAGE_SIZE], :, tokens % PAGE_SIZE]
            right = np.array(one.kv, np.uint8)[:, None, None]
            assert (found == right).all(), f"{one.ctx.request_id} has wrong bytes"

    def settle(self) -> None:
        self.poll()
        while self.kv.metrics()["copies_in_flight"]:
            self.poll()

    def end(self) -> None:
        self.kv.release([one.ctx for one in self.live])
        self.live.clear()
        self.settle()
        self.kv.verify()
        counted = self.kv.metrics()
        assert counted["pages_free"] == PAGES
        assert (counted["suspended"], counted["connector_host_private_units"]) == (0, 0)
        assert counted["suspensions"] == self.suspended
        assert (counted["resumptions"], counted["suspensions_lost"]) == (self.resumed, self.lost)
        self.kv.shutdown()


def test_whatever_comes_back_is_right_and_what_is_lost_is_told(long_run: bool, first_seed: int) -> None:
    resumed = further = lost = refused = 0
    for seed in range(first_seed, first_seed + (400 if long_run else 70)):
        for on_duplicate in ("adopt", "private"):
            world = World(seed, on_duplicate)
            try:
                world.run(calls=200)
            except BaseException as error:
                error.add_note(f"seed {seed}, on_duplicate={on_duplicate!r}")
                raise
            resumed += world.resumed
            further += world.further
            lost += world.lost
            refused += world.refused
    assert resumed >= 1000
    assert min(further, lost, refused) > 0, "all of it happened"
