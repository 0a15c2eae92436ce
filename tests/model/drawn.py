"""A cache of several groups of layers, of every kind, drawn at random."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import pagekeeper as pk
from model.attention import LAYER, LAYERS
from model.grouped import kind_argument
from model.recurrence import States
from model.windows import Chunked, Cross, Full, Kind, Window, needed_blocks
from pagekeeper.params import (
    MultiKVCacheParams,
    Recurrent,
    Scratch,
)

HEAD_DIM = 4
MAX_BATCH = 4
LONGEST = 56
"""Tokens of a request at most."""


@dataclass(frozen=True)
class Layers:
    """A group of layers: its name, None for the only one, what its tokens see, its heads and pages.

    Of latents (MLA) the first `latent` elements of a key are the value; they have one KV head.
    """

    name: str | None
    kind: Kind
    heads: int
    kv_heads: int
    pages: int
    latent: int | None = None

    def params(self, page_size: int, **common: Any) -> pk.MHAKVCacheParams | pk.MLAKVCacheParams:
        given: dict[str, Any] = {"dtype": "float32", "num_layers": LAYERS, "page_size": page_size}
        given |= {"devices": ["cpu"], "kind": kind_argument(self.kind)} | common
        if self.latent is None:
            return pk.MHAKVCacheParams(n_kv_heads=self.kv_heads, head_dim=HEAD_DIM, **given)
        rope = HEAD_DIM - self.latent
        return pk.MLAKVCacheParams(
            kv_lora_rank=self.latent, qk_rope_head_dim=rope, num_q_heads=self.heads, **given
        )


@dataclass(frozen=True)
class Input:
    """What an encoder was given: its number, and the tokens that the encoder makes of it."""

    number: int
    length: int

    @property
    def items(self) -> list[tuple[bytes, int, int]]:
        """How a request names it."""
        return [(bytes([self.number]) * 32, 0, 1)]


class Drawn:
    """The manager of a cache, with pools; the seed says which groups, how large, and how it behaves.

    Args:
        seed: of everything.
        groups: how many groups of layers with attention; one has a name or not.
        states: how many groups with states, beside them.
        cross: how many groups of cross attention.
        tiers: whether there are tiers in Rust beyond the device, a small host, and perhaps a disk.
        latents: whether the groups with attention keep latents.
    """

    def __init__(
        self,
        seed: int,
        groups: int,
        states: int = 0,
        cross: int = 0,
        *,
        tiers: bool = False,
        latents: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.tiers, self.latents = tiers, latents
        choose: Any = self.random.choice
        self.page_size = choose([1, 2, 3, 4, 8])
        unnamed = groups == 1 and not states and not cross and choose([True, False])
        self.inputs = [Input(number, choose([1, 3, 8, 13])) for number in (1, 2)] if cross else []
        """Of encoders."""
        self.groups = [self.layers(None if unnamed else f"g{index}") for index in range(groups)]
        self.states = [self.state_group(f"s{index}") for index in range(states)]
        self.cross = [self.cross_layers(f"c{index}") for index in range(cross)]
        self.every: list[Layers | States] = [*self.groups, *self.states, *self.cross]
        self.random.shuffle(self.every)
        behaviour: dict[str, Any] = {
            "on_duplicate": choose(["adopt", "private"]),
            "enable_partial_reuse": choose([True, True, True, False]),
            "copy_on_partial_reuse": choose([True, True, True, False]),
            "event_buffer_max_size": choose([1, 1000, 1000] if tiers else [0, 1, 1000]),
        }
        self.hears = behaviour["event_buffer_max_size"] > 0
        self.has_states = any(isinstance(group.kind, Recurrent) for group in self.states)
        self.parts = behaviour["enable_partial_reuse"] and not self.has_states
        if tiers:
            behaviour |= self.tier_options()
        options = {"max_num_input_tokens": choose([None, 5, 12]), "reserve": choose(["chunk", "prompt"])}
        self.trace = [f"page_size={self.page_size} {behaviour} {options} {self.every} {self.inputs}"]
        params: Any = {group.name: group.params(self.page_size, **behaviour) for group in self.every}
        pages: Any = {group.name: group.pages for group in self.every}
        memory = {"total_num_pages": pages.get(None, pages)}
        if len(self.every) > 1 and choose([True, False]):
            # Of one slab, a huge page of which may be as large as several pages of a group.
            page_bytes = [of_group.bytes_per_page for of_group in params.values()]
            wanted = sum(pages[name] * params[name].bytes_per_page for name in params)
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
        self.counts: Counter[str] = Counter()
        """What happened."""

    def layers(self, name: str | None) -> Layers:
        choose: Any = self.random.choice
        tokens = choose([1, 2, self.random.randint(3, 9), self.random.randint(10, 24)])
        window = Window(tokens, sinks=choose([0, 0, 1, 2, self.page_size + 1]))
        kind: Kind = choose([Full(), window, Chunked(tokens)])
        # Room for one long request, or for a batch of them.
        most = max(len(needed_blocks(kind, n, self.page_size)) for n in range(LONGEST + 1))
        room = self.random.randint(1, most if self.tiers else 2 * most)
        pages = most + room + choose([1, 3, 12 // self.page_size])
        return Layers(name, kind, **self.heads(), pages=pages)

    def heads(self) -> dict[str, Any]:
        """Of queries and KV; latents have one of KV, and one or more values of it may be for positions."""
        choose: Any = self.random.choice
        if self.latents:
            return {"heads": choose([1, 2, 4]), "kv_heads": 1, "latent": choose([2, 3, HEAD_DIM])}
        kv_heads = choose([1, 2])
        return {"heads": kv_heads * choose([1, 2]), "kv_heads": kv_heads}

    def state_group(self, name: str) -> States:
        choose: Any = self.random.choice
        interval = choose([None, 1, 2, 3])
        recurrent = Recurrent(
            interval and interval * self.page_size, save_last_snapshot=choose([True, False])
        )
        kind = choose([recurrent, recurrent, Scratch()])
        return States(name, kind, 2 * MAX_BATCH + choose([1, 5, 40]), values=choose([3, 4, 64]))

    def cross_layers(self, name: str) -> Layers:
        """Room for one encoder's tokens, or for those of a batch."""
        choose: Any = self.random.choice
        most = max(Cross().lasting(given.length, self.page_size) for given in self.inputs)
        return Layers(name, Cross(), **self.heads(), pages=most * choose([1, 3, MAX_BATCH + 1]))

    def tier_options(self) -> dict[str, Any]:
        """A host of a few dozen units, whose order and size make it lose some of what is stored."""
        choose: Any = self.random.choice
        units = choose([12, 30, 100]) * len(self.every)
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

    def dirty(self) -> None:
        """What is in a page that nobody has written to is no number."""
        for group in [*self.groups, *self.cross]:
            self.kv.get_buffers(LAYER, group=group.name).fill_(torch.nan)
        for group_of_states in self.states:
            self.pool_of(group_of_states).fill(np.nan)

    def pool_of(self, group: States) -> np.ndarray:
        states: np.ndarray = self.kv.get_buffers(0, name="state", group=group.name).numpy()
        return states

    def room(self) -> list[pk.BlockCount]:
        """Of each group, and of all."""
        return [self.kv.block_count(group=name) for name in (*(group.name for group in self.every), None)]

    def note(self, line: str) -> None:
        self.trace.append(line)
