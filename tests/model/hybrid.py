"""Random sessions of several groups of layers whose every forward is computed, over pages and densely.

Each forward writes the KV of each group through the group's tables and attends through every form of them.
The KV of a token is made from all tokens up to it, so that attention is right only if each page that is
read holds what this very prefix left there.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

import numpy as np
import torch

import pagekeeper as pk
from model.attention import LAYER, LAYERS, AnyTables, dense_attention, mask_arguments
from model.memory import prefix_values
from model.recurrence import States, advance, state_after
from model.windows import Chunked, Full, Kind, Window, blocks_behind, needed_blocks
from pagekeeper.events import BlockIndex, Updated
from pagekeeper.params import (
    ChunkedLocal,
    FullAttention,
    MultiKVCacheParams,
    Recurrent,
    Scratch,
    SlidingWindow,
)
from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import Form

TOLERANCE = 1e-5
"""Of an element: pages, queries and scores are float32, dense attention is computed in float64."""
HEAD_DIM = 4
MAX_BATCH = 4
LONGEST = 56
"""Tokens of a request at most."""


@dataclass(frozen=True)
class Layers:
    """A group of layers: its name, None for the only one, what its tokens see, its heads and pages."""

    name: str | None
    kind: Kind
    heads: int
    kv_heads: int
    pages: int

    def params(self, page_size: int, **common: Any) -> pk.MHAKVCacheParams:
        return pk.MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            num_layers=LAYERS,
            page_size=page_size,
            devices=["cpu"],
            kind=kind_argument(self.kind),
            **common,
        )


@dataclass
class Forward:
    """A forward of one request that was launched and whose result was not delivered."""

    sampled: list[int]
    """The token that it gave; none inside a prompt."""
    alive: bool = True
    """False once the request gave up its pages or tokens: its result will be dropped."""


@dataclass
class Live:
    """A claimed request as its engine sees it."""

    ctx: pk.TextContext
    tokens: list[int]
    """Known ones, and behind them one for each forward out that sampled."""
    launched: int = 0
    """Tokens whose KV is computed, by forwards out too."""
    out: list[Forward] = field(default_factory=list)

    @property
    def alive(self) -> list[Forward]:
        return [forward for forward in self.out if forward.alive]

    def start_over(self, launched: int) -> None:
        """What is out is void, and the first so many tokens still have KV."""
        for forward in self.out:
            forward.alive = False
        self.tokens = self.ctx.tokens.all.tolist()
        self.launched = launched


class Session:
    """One random sequence of calls; the seed says which groups, pools and calls.

    Args:
        seed: of everything.
        groups: how many groups of layers with attention; one has a name or not.
        states: how many groups with states, beside them.
        tiers: whether there are tiers in Rust beyond the device, a small host, and perhaps a disk.
    """

    def __init__(self, seed: int, groups: int, states: int = 0, *, tiers: bool = False) -> None:
        self.random = random.Random(seed)
        self.tiers = tiers
        choose: Any = self.random.choice
        self.page_size = choose([1, 2, 3, 4, 8])
        unnamed = groups == 1 and not states and choose([True, False])
        self.groups = [self.layers(None if unnamed else f"g{index}") for index in range(groups)]
        self.states = [self.state_group(f"s{index}") for index in range(states)]
        every: list[Layers | States] = [*self.groups, *self.states]
        self.random.shuffle(every)
        names = [group.name for group in every]
        behaviour: dict[str, Any] = {
            "on_duplicate": choose(["adopt", "private"]),
            "enable_partial_reuse": choose([True, True, True, False]),
            "copy_on_partial_reuse": choose([True, True, True, False]),
            "event_buffer_max_size": choose([2, 1000, 1000] if tiers else [0, 2, 1000]),
        }
        self.hears = behaviour["event_buffer_max_size"] > 0
        self.index = BlockIndex()
        self.parts = behaviour["enable_partial_reuse"] and not any(
            isinstance(group.kind, Recurrent) for group in self.states
        )
        if tiers:
            behaviour |= self.tier_options()
        options = {"max_num_input_tokens": choose([None, 5, 12]), "reserve": choose(["chunk", "prompt"])}
        self.trace = [f"page_size={self.page_size} {behaviour} {options} {every}"]
        params: Any = {group.name: group.params(self.page_size, **behaviour) for group in every}
        pages: Any = {group.name: group.pages for group in every}
        memory = {"total_num_pages": pages.get(None, pages)}
        if len(every) > 1 and choose([True, False]):
            # Of one slab, a huge page of which may be as large as several pages of a group.
            page_bytes = [params[name].bytes_per_page for name in names]
            wanted = sum(pages[name] * params[name].bytes_per_page for name in names)
            memory = {"available_bytes": max(wanted, 8 * math.lcm(*page_bytes) if self.states else 0)}
        self.trace.append(str(memory))
        self.kv = pk.PagedKVCacheManager(
            params[None] if None in params else MultiKVCacheParams(params),
            max_batch_size=MAX_BATCH,
            max_seq_len=LONGEST,
            **memory,
            **options,
        )
        self.empty = self.room()
        self.dirty()
        self.stems: list[list[int]] = [[choose([1, 2]) for _ in range(LONGEST * 2 // 3)] for _ in range(3)]
        self.live: list[Live] = []
        self.scratch: dict[tuple[str, object], float] = {}
        """What each request left in the memory of each group to work in."""
        self.counts: Counter[str] = Counter()

    def dirty(self) -> None:
        """What is in a page that nobody has written to is no number."""
        for group in self.groups:
            self.kv.get_buffers(LAYER, group=group.name).fill_(torch.nan)
        for group_of_states in self.states:
            self.pool_of(group_of_states).fill(np.nan)

    def tier_options(self) -> dict[str, Any]:
        """A host of a few dozen units, whose order and size make it lose some of what is stored."""
        choose: Any = self.random.choice
        units = choose([12, 30, 100]) * (len(self.groups) + len(self.states))
        config = {
            "type": "rust_tiered",
            "host_offload_max_gb": units * LAYERS * 2 * self.page_size * 2 * HEAD_DIM * 4 / 2**30,
            "num_copy_lanes": choose([1, 4]),
        }
        if choose([True, False]):
            config["disk_offload_max_gb"] = 2**22 / 2**30
        return {
            "kv_connector_config": config,
            "write_policy": choose(["write_through", "write_through", "selective", "on_evict"]),
            "selective_min_hits": 1,
        }

    def layers(self, name: str | None) -> Layers:
        choose: Any = self.random.choice
        tokens = choose([1, 2, self.random.randint(3, 9), self.random.randint(10, 24)])
        window = Window(tokens, sinks=choose([0, 0, 1, 2, self.page_size + 1]))
        kind: Kind = choose([Full(), window, Chunked(tokens)])
        # Room for one long request, or for a batch of them.
        most = max(len(needed_blocks(kind, n, self.page_size)) for n in range(LONGEST + 1))
        room = self.random.randint(1, most if self.tiers else 2 * most)
        pages = most + room + choose([1, 3, 12 // self.page_size])
        kv_heads = choose([1, 2])
        return Layers(name, kind, kv_heads * choose([1, 2]), kv_heads, pages)

    def state_group(self, name: str) -> States:
        choose: Any = self.random.choice
        interval = choose([None, 1, 2, 3])
        recurrent = Recurrent(
            interval and interval * self.page_size, save_last_snapshot=choose([True, False])
        )
        kind = choose([recurrent, recurrent, Scratch()])
        return States(name, kind, 2 * MAX_BATCH + choose([1, 5, 40]), values=choose([3, 4, 64]))

    def run(self, calls: int) -> Counter[str]:
        """Makes so many calls, checks the books after each, and counts what happened."""
        verbs: list[tuple[int, Callable[[], None]]] = [
            (5, self.claim),
            (14, self.forward),
            (12, self.step),
            (1, self.preempt),
            (1, self.truncate),
            (2, self.fork),
            (1, self.release),
            (1, self.plan_in_vain),
            (1, self.reset),
            (1, self.sleep),
            *(
                [(2, self.suspend), (10, self.forget), (8, self.release), (5, self.claim)]
                if self.tiers
                else []
            ),
        ]
        weights, actions = zip(*verbs, strict=True)
        for _ in range(calls):
            self.random.choices(actions, weights)[0]()
            self.check_rows()
            self.hear()
            self.kv.verify()
        self.kv.release([one.ctx for one in self.live])
        self.settle()
        self.kv.verify()
        assert self.room() == self.empty
        self.counts.update(self.kv.metrics())
        return self.counts

    def hear(self) -> None:
        """Who hears the events knows what each group has, and of a prompt what is found."""
        if not self.hears:
            return
        snapshot = self.kv.event_snapshot()
        events = self.kv.get_latest_events()
        self.counts["moves"] += sum(isinstance(event, Updated) and event.tier is not None for event in events)
        if not self.index.apply(events):
            self.index.apply_snapshot(snapshot)
            self.counts["events missed"] += 1
        there = BlockIndex()
        there.apply_snapshot(snapshot)
        for number in range(len(self.groups) + len(self.states)):
            for tier in range(3):
                assert self.index.hashes(number, tier) == there.hashes(number, tier)
        tokens = self.random.choice(self.stems)
        prefix = pk.hash_blocks(tokens[:-1], self.page_size, seed=self.kv.hash_seed)
        reuse = self.kv.analyze_prefix_reuse(tokens)
        answers: list[tuple[int, int | None]] = [(reuse.device_blocks, 0)]
        if not self.kv.metrics()["copies_in_flight"]:
            answers.append((reuse.reusable_blocks_all, None))
        for blocks, farthest in answers:
            found = blocks * self.page_size
            known = self.index.match_length(prefix, farthest) * self.page_size
            assert known == found or (known < found and self.needs_none(found))

    def needs_none(self, position: int) -> bool:
        """Whether a request can go on from there without any block, as between two chunks."""
        own = {position // self.page_size}
        kinds = [group.kind for group in self.groups]
        has_states = any(isinstance(group.kind, Recurrent) for group in self.states)
        return not has_states and all(needed_blocks(kind, position, self.page_size) == own for kind in kinds)

    # What an engine does

    def claim(self) -> None:
        if len(self.live) > MAX_BATCH:
            return
        stem = self.random.choice(self.stems)
        cut = self.random.choice([len(stem), self.random.randint(0, len(stem))])
        tokens = stem[:cut] + self.random.choices([1, 2], k=self.random.choice([1, 1, 3]))
        self.note(f"claim #{len(self.live)} {tokens}")
        ctx = pk.TextContext(request_id=pk.RequestID(), tokens=tokens)
        self.kv.claim(ctx)
        self.live.append(Live(ctx, tokens))

    def forward(self) -> None:
        """Plans a forward of some requests, and computes it."""
        batch = self.able()
        bounds = [self.random.choice([1, 3, 7, LONGEST]) for _ in batch]
        if not batch:
            return
        if self.plan(batch, bounds):
            self.compute(batch)
        else:
            self.random.choice([self.release, self.preempt, self.go_alone])()

    def go_alone(self) -> None:
        """With nothing in use a request is refused for its size alone, wherever what it finds is cached."""
        self.kv.preempt([one.ctx for one in self.live])
        for one in self.live:
            one.start_over(0)
        self.settle()
        batch = self.able()[:1]
        waiting = self.counts["InsufficientBlocksError"]
        if batch and self.plan(batch, [self.random.choice([1, LONGEST])]):
            self.compute(batch)
            self.counts["alone"] += 1
        assert self.counts["InsufficientBlocksError"] == waiting

    def plan_in_vain(self) -> None:
        """Pages are taken and let go before any forward: whose they are next may be another group."""
        batch = self.able()
        if batch and self.plan(batch, [LONGEST] * len(batch)):
            self.kv.preempt([one.ctx for one in batch])
            for one in batch:
                one.start_over(0)

    def able(self) -> list[Live]:
        """Some of the requests that a forward can be planned for."""
        able = [one for one in self.live if len(one.alive) < 2 and one.launched < len(one.tokens) < LONGEST]
        return self.random.sample(able, min(len(able), self.random.randint(1, MAX_BATCH)))

    def plan(self, batch: Sequence[Live], bounds: list[int]) -> bool:
        self.note(f"forward {self.places(batch)} num_tokens={bounds}")
        before = self.kv.fingerprint()
        try:
            self.kv.alloc([one.ctx for one in batch], num_tokens=bounds)
            self.await_loads(batch, bounds)
        except (pk.InsufficientBlocksError, pk.RequestTooLargeError) as error:
            assert self.kv.fingerprint() == before
            self.counts[type(error).__name__] += 1
            return False
        return True

    def compute(self, batch: Sequence[Live]) -> None:
        tables = self.tables(batch)
        self.check_positions(batch, tables)
        for group in self.groups:
            self.attend(group, batch, tables[group.name])
        for states in self.states:
            self.advance(states, batch)
        for one in batch:
            ends = one.launched == len(one.tokens)
            one.out.append(Forward([self.sample(one)] if ends else []))
            one.tokens += one.out[-1].sampled
        self.counts["overlapped"] += sum(len(one.alive) == 2 for one in batch)

    def await_loads(self, batch: Sequence[Live], bounds: Sequence[int]) -> None:
        """Until all of the batch are planned. What a load holds is enough for the forward behind it."""
        while waiting := [index for index, one in enumerate(batch) if not one.ctx.active_length]:
            self.counts["waits"] += len(waiting)
            self.settle()
            self.kv.verify()
            transfers = self.kv.alloc(
                [batch[index].ctx for index in waiting], num_tokens=[bounds[index] for index in waiting]
            )
            assert len(transfers) == len(waiting)

    def settle(self) -> None:
        """All copies end, if there are any."""
        deadline = time.monotonic() + 20
        while self.kv.metrics()["copies_in_flight"]:
            self.kv.poll_transfers()
            assert time.monotonic() < deadline, "copies do not end"

    def suspend(self) -> None:
        """Sets a request aside, and brings it back if there is room, else it starts over."""
        able = [one for one in self.live if not one.out and one.ctx.processed_length]
        if not able:
            return
        one = self.random.choice(able)
        self.note(f"suspend {self.places([one])}")
        groups: list[Layers | States] = [*self.groups, *self.states]
        rows = [self.row(one, group) for group in groups]
        try:
            self.kv.suspend(one.ctx)
        except pk.InsufficientBlocksError:
            return
        self.settle()
        self.kv.verify()
        assert all(self.row(one, group) == [] for group in groups)
        try:
            self.kv.resume(one.ctx)
        except pk.InsufficientBlocksError:
            self.kv.preempt(one.ctx)
            one.start_over(0)
            return
        self.settle()
        self.counts["suspended"] += 1
        held = [[bool(page) for page in row] for row in rows]
        assert [[bool(page) for page in self.row(one, group)] for group in groups] == held

    def forget(self) -> None:
        """The device loses what nobody uses, so that more comes from the tiers."""
        self.note("forget")
        self.kv.truncate_prefix([])

    def step(self) -> None:
        """Delivers the oldest forward of some requests."""
        able = [one for one in self.live if one.out]
        batch = self.random.sample(able, min(len(able), self.random.randint(1, MAX_BATCH)))
        if not batch:
            return
        self.note(f"step {self.places(batch)}")
        forwards = [one.out.pop(0) for one in batch]
        # Tokens may come when the step is over.
        late = [forward.alive and self.random.random() < 0.3 for forward in forwards]
        results = [[] if after else forward.sampled for forward, after in zip(forwards, late, strict=True)]
        held = self.held()
        self.kv.step(
            [one.ctx for one in batch],
            new_tokens=np.array([token for tokens in results for token in tokens], np.int32),
            counts=[len(tokens) for tokens in results],
        )
        self.check_rows()
        self.kv.verify()
        for one, forward, after in zip(batch, forwards, late, strict=True):
            for token in forward.sampled if after else []:
                one.ctx.update(token)
        self.counts["out_of_window"] += held - self.held()

    def reset(self) -> None:
        self.note("reset")
        self.kv.reset_prefix_cache()

    def sleep(self) -> None:
        """Requests may have got on without a page of any group; whoever has one keeps the cache awake."""
        if self.random.random() < 0.5:
            for one in self.live:
                if self.holds_a_page(one):
                    self.kv.preempt(one.ctx)
                    one.start_over(0)
        self.note("sleep")
        self.settle()
        held = any(self.holds_a_page(one) for one in self.live)
        try:
            self.kv.sleep()
        except ValueError:
            assert held
            return
        assert not held
        self.counts["asleep_beside_placeholders"] += any(one.launched for one in self.live)
        self.counts["asleep"] += 1
        self.kv.verify()
        self.kv.wake()
        self.dirty()

    def preempt(self) -> None:
        for one in self.random.sample(self.live, min(len(self.live), 1)):
            self.note(f"preempt {self.places([one])}")
            self.kv.preempt(one.ctx)
            one.start_over(0)

    def truncate(self) -> None:
        able = [one for one in self.live if len(one.ctx) > 1]
        for one in self.random.sample(able, min(len(able), 1)):
            length = self.random.randint(1, len(one.ctx) - 1)
            self.note(f"truncate {self.places([one])} to {length}")
            one.ctx.truncate(length)
            one.start_over(one.ctx.processed_length)

    def fork(self) -> None:
        if self.live and len(self.live) <= MAX_BATCH:
            parent = self.random.choice(self.live)
            self.note(f"fork #{len(self.live)} of {self.places([parent])}")
            child = self.kv.fork(parent.ctx)
            self.live.append(Live(child, child.tokens.all.tolist(), child.processed_length))

    def release(self) -> None:
        # The longest, which can grow no more, or any.
        if self.live:
            longest = max(self.live, key=lambda one: len(one.tokens))
            one = self.random.choice([longest, self.random.choice(self.live)])
            self.note(f"release {self.places([one])}")
            self.kv.release(one.ctx)
            self.live.remove(one)

    def sample(self, one: Live) -> int:
        """Follows a stem where it can, so that requests meet again."""
        for stem in self.stems:
            if one.tokens == stem[: len(one.tokens)] != stem and self.random.random() < 0.8:
                return stem[len(one.tokens)]
        return self.random.randint(1, 2)

    # The forward, by pages and densely

    def tables(self, batch: Sequence[Live]) -> dict[str | None, dict[str, AnyTables]]:
        """Each group's tables in every form that its pages allow."""
        contexts, forms = [one.ctx for one in batch], list(get_args(Form))
        if self.page_size not in (2, 4, 8):  # TensorRT-LLM wants a power of two above 1
            forms.remove("tensorrt")
        self.random.shuffle(forms)
        tables: dict[str | None, dict[str, AnyTables]] = {group.name: {} for group in self.groups}
        for form in forms:
            inputs: Any = self.kv.runtime_inputs([contexts], form=form)
            self.inputs = inputs
            for name in tables:
                tables[name][form] = (inputs if name is None else inputs[name])[0]
        return tables

    def check_positions(self, batch: Sequence[Live], tables: Any) -> None:
        """Each request goes on where it stood, or at the end of a hit; all groups say the same."""
        for group in self.groups:
            vllm = tables[group.name]["vllm"]
            assert vllm.seq_lens.tolist() == tables[self.groups[0].name]["vllm"].seq_lens.tolist()
        for one, end, past in zip(
            batch, vllm.seq_lens.tolist(), tables[group.name]["max"].cache_lengths.tolist(), strict=True
        ):
            assert past < end <= len(one.tokens)
            assert end - past == one.ctx.active_length
            if past != one.launched:
                assert past > one.launched
                assert self.parts or past % self.page_size == 0
                self.counts["hits"] += 1
                self.counts["hits_with_placeholders"] += any(
                    0 in self.row(one, group)[: past // self.page_size] for group in self.groups
                )
            one.launched = end

    def attend(self, group: Layers, batch: Sequence[Live], tables: dict[str, AnyTables]) -> None:
        layer_kv = self.kv.get_buffers(LAYER, group=group.name)
        counts = [one.ctx.active_length for one in batch]
        starts = [0, *accumulate(counts)]
        query, key, value, dense = [], [], [], []
        for one, count in zip(batch, counts, strict=True):
            prefixes = prefix_values(group.name, one.tokens[: one.launched])
            keys, values = (self.random_vectors(prefixes, field, group.kv_heads) for field in (1, 2))
            queries = self.random_vectors(prefixes[-count:], 3, group.heads)
            exact = [part.astype(np.float64) for part in (queries, keys, values)]
            dense.append(dense_attention(exact[0], exact[1], exact[2], group.kind))
            query.append(queries)
            key.append(keys[-count:])
            value.append(values[-count:])
        new_query, new_key, new_value = (torch.from_numpy(np.concatenate(it)) for it in (query, key, value))
        writer = self.random.choice(list(tables))
        write_kv(layer_kv, new_key, new_value, tables[writer], query_start_loc=starts)
        for form, of_form in tables.items():
            output = paged_attention(
                new_query, layer_kv, of_form, query_start_loc=starts, **mask_arguments(group.kind)
            )
            worst = np.abs(output.numpy() - np.concatenate(dense)).max()
            assert worst <= TOLERANCE, f"{group}, written by {writer}, read by {form}: {worst}"
            self.counts[form] += 1

    def advance(self, group: States, batch: Sequence[Live]) -> None:
        """Each request's state is that after all tokens before the forward; what it works in is its own."""
        pool, tables = self.pool_of(group), self.inputs[group.name].states[0]
        counts = [one.ctx.active_length for one in batch]
        assert tables.query_start_loc.tolist() == [0, *accumulate(counts)]
        assert len({*tables.indices.tolist()} - {0}) == len(batch)
        for one, count, page in zip(batch, counts, tables.indices.tolist(), strict=True):
            past = one.launched - count
            if isinstance(group.kind, Scratch):
                mark = self.scratch.get((group.name, one.ctx.request_id), 0.0)
                assert pool[page].tolist() in ([mark] * group.values, [0.0] * group.values)
                pool[page] = self.scratch[group.name, one.ctx.request_id] = self.random.random()
                self.scratch[group.name, one.ctx.request_id] = pool[page, 0].item()
                self.counts["scratch"] += 1
                continue
            assert pool[page, :3].tolist() == state_after(one.tokens[:past]).tolist(), f"{group}, at {past}"
            assert not pool[page, 3:].any()
            pool[page, :3] = advance(pool[page, :3], one.tokens[past : one.launched])
            self.counts["states"] += 1

    def pool_of(self, group: States) -> np.ndarray:
        states: np.ndarray = self.kv.get_buffers(0, name="state", group=group.name).numpy()
        return states

    def random_vectors(self, prefixes: np.ndarray, field: int, heads: int) -> np.ndarray:
        """Numbers from -2 to 2 that depend on the prefix: float32 [len(prefixes), heads, HEAD_DIM]."""
        lanes = np.arange(1, heads * HEAD_DIM + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + field)
        mixed = prefixes.astype(np.uint64)[:, None] ^ lanes
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        unit = (mixed >> np.uint64(11)).astype(np.float64) / 2**53
        return (4 * unit - 2).astype(np.float32).reshape(len(prefixes), heads, HEAD_DIM)

    # The books

    def check_rows(self) -> None:
        """A block has a page in a group unless no token to come sees it."""
        for one in self.live:
            known = min(one.ctx.processed_length, len(one.ctx))
            for group in self.groups:
                row = self.row(one, group)
                missing = {block for block, page in enumerate(row) if page == 0}
                behind = blocks_behind(group.kind, known, self.page_size) & set(range(len(row)))
                assert missing == behind, f"{group}, request {self.places([one])}: {row}"

    def holds_a_page(self, one: Live) -> bool:
        groups: list[Layers | States] = [*self.groups, *self.states]
        return any(page for group in groups for page in self.row(one, group))

    def row(self, one: Live, group: Layers | States) -> list[int]:
        return self.kv.get_cache_indices(one.ctx, group.name)[0]

    def room(self) -> list[pk.BlockCount]:
        """Of each group, and of all."""
        names = [*(group.name for group in self.groups), *(group.name for group in self.states)]
        return [self.kv.block_count(group=name) for name in (*names, None)]

    def held(self) -> int:
        """Blocks of all requests that have pages, in all groups."""
        return sum(page > 0 for one in self.live for group in self.groups for page in self.row(one, group))

    def note(self, line: str) -> None:
        self.trace.append(line)

    def places(self, batch: Sequence[Live]) -> list[int]:
        return [self.live.index(one) for one in batch]


def kind_argument(kind: Kind) -> FullAttention | SlidingWindow | ChunkedLocal:
    """How the parameters of a group say it."""
    match kind:
        case Window(tokens, sinks):
            return SlidingWindow(tokens, sinks)
        case Chunked(tokens):
            return ChunkedLocal(tokens)
    return FullAttention()
