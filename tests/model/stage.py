"""What a random session plays with: the manager, its model, the engine's memory and requests."""

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.ledger import Ledger
from model.live import Live
from model.memory import PageMemory
from model.pool import Group
from model.requests import Request
from model.tier import Tier
from model.windows import Chunked, Cross, Full, Kind, Lasting, Recurrent, Scratch, Window
from pagekeeper import params as pkp
from pagekeeper.params import ChunkedLocal, FullAttention, MultiKVCacheParams, SlidingWindow

NAMESPACES: tuple[dict[str, Any], ...] = (
    {},
    {"cache_salt": "a"},
    {"lora_id": "a"},
    {"lora_id": "a", "lora_generation": 1},
    {"lora_id": 1},
)
MAX_BATCH = 5


KINDS: dict[type[Kind], Callable[[Any], Any]] = {
    Full: lambda kind: FullAttention(),
    Window: lambda kind: SlidingWindow(kind.tokens, sink_tokens=kind.sinks),
    Chunked: lambda kind: ChunkedLocal(kind.tokens),
    Recurrent: lambda kind: pkp.Recurrent(kind.interval or None, save_last_snapshot=kind.last),
    Scratch: lambda kind: pkp.Scratch(),
    Cross: lambda kind: pkp.CrossAttention(),
}
"""What the user writes for a kind of the model."""


class Stage:
    """A cache of random size and behaviour, and nothing in it yet.

    Args:
        seed: of everything.
        several: up to five groups of layers of any kind; else one that keeps all. Both perhaps before a tier.
    """

    def __init__(self, seed: int, *, several: bool = False) -> None:
        self.random = random.Random(seed)
        choose: Any = self.random.choice
        self.page_size: int = choose([1, 2, 3, 4, 16])
        tiered = self.random.random() < 0.5
        write_policy = choose(["write_through", "write_through", "selective", "on_evict"])
        pages = self.random.randint(3, 16 if self.page_size < 16 else 8)
        if tiered and write_policy == "on_evict":
            pages = self.random.randint(9, 24)  # an eighth of them is a page
        behaviour = {
            "on_duplicate": choose(["adopt", "private"]),
            "eviction_policy": choose(["priority_lru", "priority_slru"]),
            "default_retention_priority": choose([35, 35, 20]),
            "enable_prefix_caching": self.random.random() < 0.95,
            "enable_partial_reuse": self.random.random() < 0.8,
            "copy_on_partial_reuse": self.random.random() < 0.8,
            "store_partial_tails": self.random.random() < 0.8,
            "kv_hash_algo": choose(["ahash64", "sha256", "sha256_64"]),
            "event_buffer_max_size": choose([0, 1, 4, 1000, 1000, 1000]),
            "write_policy": write_policy,
            "selective_min_hits": choose([1, 2]),
            "selective_min_priority": choose([None, None, 0, 35, 50]),
            "secondary_offload_min_priority": choose([0, 35, 50]),
        }
        chunk = choose([None, None, 1, 3, 7, 20])
        reserve = choose(["chunk", "chunk", "prompt"])
        self.groups = groups = self.random_groups() if several else [Group(Full(), pages)]
        self.shares = len(groups) > 1 and self.random.random() < 0.7
        """Whether all groups have pages of one slab."""
        whole = [group.pages for group in groups if isinstance(group.kind, Full)]
        self.longest = 250 if self.shares else 1000
        self.max_seq_len = None if whole else self.longest
        caching = behaviour["enable_prefix_caching"]
        options = {"max_num_input_tokens": chunk, "reserve": reserve, "max_seq_len": self.max_seq_len}
        common = {"page_size": self.page_size, "devices": ["cpu"], "kv_hash_seed": "5a" * 32, **behaviour}
        widths = choose([[1, 2], [1, 2, 4], [1, 3]]) if self.shares else [1]
        params = [group_params(group.kind, choose(widths), common) for group in groups]
        self.params = params[0]
        self.names: list[str | None] = [None]
        """Of the groups, as the manager's calls take them."""
        cache_params: Any = params[0]
        memory: dict[str, Any] = {"total_num_pages": groups[0].pages}
        sizes = [group.pages for group in groups]
        if len(groups) > 1:
            names = [f"group {index}" for index in range(len(groups))]
            self.names = list(names)
            cache_params = MultiKVCacheParams(dict(zip(names, params, strict=True)))
            memory = {"total_num_pages": dict(zip(names, sizes, strict=True))}
            if self.shares:
                memory = self.slab_memory(names, [of_group.bytes_per_page for of_group in params])
                sizes = [memory["available_bytes"] // of_group.bytes_per_page for of_group in params]
        self.memories = [PageMemory(most, self.page_size) for most in sizes]
        self.tier = Tier(self.memories) if tiered and caching else None
        self.trace = [f"page_size={self.page_size} {groups=} {behaviour} {options} {memory}"]
        self.kv = pk.PagedKVCacheManager(
            params=cache_params,
            max_batch_size=MAX_BATCH,
            allocate_pools=False,
            connector=self.tier,
            **memory,
            **options,
        )
        laid_out = self.kv._memory
        if self.shares:
            assert laid_out.huge_pages is not None
            usable = zip(groups, laid_out.usable_pages, strict=True)
            self.groups = groups = [Group(group.kind, most) for group, most in usable]
        self.trace.append(f"tier={bool(self.tier)} {laid_out}")
        self.model = Ledger(
            self.page_size,
            groups,
            on_duplicate=behaviour["on_duplicate"],
            policy=behaviour["eviction_policy"],
            priority=behaviour["default_retention_priority"],
            caching=caching,
            parts=behaviour["enable_partial_reuse"],
            copy_parts=behaviour["copy_on_partial_reuse"],
            tails=behaviour["store_partial_tails"],
            chunk=chunk,
            reserve=reserve,
            longest=self.longest,
            slab=(laid_out.pages, laid_out.huge_pages) if self.shares else None,
            expected=(MAX_BATCH, tuple(memory.get("request_pages", {}).values())),
            tier=self.tier is not None,
            write_policy=write_policy,
            min_hits=behaviour["selective_min_hits"],
            min_priority=behaviour[
                "secondary_offload_min_priority" if write_policy == "on_evict" else "selective_min_priority"
            ],
        )
        self.live: list[Live] = []
        self.gone: list[tuple[Any, int]] = []
        """Released contexts with the slots they had."""
        blocks = [group.pages for group in groups if not isinstance(group.kind, Recurrent | Lasting)]
        longest = min(min(blocks, default=70) * self.page_size, 70) * 3 // 4
        stems = 2
        if self.tier is not None:  # more than the pool holds is asked for again
            longest, stems = longest * 2 // 3, 2 if self.keeps_states else 5
        self.stems: list[list[int]] = [[choose([1, 2]) for _ in range(longest)] for _ in range(stems)]

    @property
    def is_plain(self) -> bool:
        """Whether there is one group that keeps all tokens."""
        return [group.kind for group in self.groups] == [Full()]

    def random_groups(self) -> list[Group]:
        """One to five groups, of windows that are mostly shorter than what comes."""
        most = 24 if self.page_size < 16 else 8
        groups, states = [], self.random.random() < 0.5
        for _ in range(self.random.choice([1, 2, 2, 2, 3, 3, 4, 5])):
            tokens = self.random.choice([1, 2, 3, 4, 5, 7, 8, 16, 20, 33])
            sinks = self.random.choice([0, 0, 0, 1, self.page_size, self.page_size + 2])
            windows: list[Kind] = [Window(tokens, sinks), Window(tokens, sinks)]
            kinds: list[Kind] = [Full(), *windows, Chunked(tokens)]
            if states:
                interval = self.random.choice([0, 1, 1, 2, 5]) * self.page_size
                kinds += [Recurrent(interval, self.random.random() < 0.7)] * 3 + [Scratch()]
            groups.append(Group(self.random.choice(kinds), self.random.randint(3, most)))
        if self.random.random() < 0.2:
            groups.append(Group(Cross(), self.random.randint(3, most)))
        if all(isinstance(group.kind, Lasting) for group in groups):
            groups.append(Group(Full(), most))
        return groups

    def slab_memory(self, names: Sequence[str], page_bytes: Sequence[int]) -> dict[str, Any]:
        """A few huge pages, of which each has whole pages of any group; and perhaps for which requests."""
        huge_bytes = math.lcm(*page_bytes)
        most = 32 * min(page_bytes) // huge_bytes
        memory: dict[str, Any] = {"available_bytes": (1 + self.random.randint(most // 3, most)) * huge_bytes}
        if self.random.random() < 0.5:
            memory["request_pages"] = {name: self.random.randint(1, 4) for name in names}
        return memory

    @property
    def keeps_states(self) -> bool:
        return any(isinstance(group.kind, Recurrent) for group in self.groups)

    @property
    def has_encoder(self) -> bool:
        return any(isinstance(group.kind, Cross) for group in self.groups)

    def note(self, line: str) -> None:
        self.trace.append(line)

    def request(self, one: Live) -> Request:
        return self.model.requests[one.ctx.request_id]

    def can_plan(self, one: Live) -> bool:
        request = self.request(one)
        if request.load is not None:
            return False
        if not request.live:
            return request.position < len(request.tokens)
        joined = self.model.step_open and request.live[-1].number == self.model.step_number
        return len(request.live) < 2 and not joined

    def pick(self, wanted: Callable[[Live], bool], most: int = MAX_BATCH) -> list[Live]:
        """Some of the requests for which the call makes sense, in any order."""
        able = [one for one in self.live if wanted(one)]
        return self.random.sample(able, min(len(able), self.random.randint(1, most)))

    def form(self, batch: Sequence[Live], *, single: bool = True) -> Any:
        """The batch as one context, a list of contexts or an array of slots."""
        kind = self.random.random()
        if single and len(batch) == 1 and kind < 0.4:
            return batch[0].ctx
        if kind < 0.7:
            return [one.ctx for one in batch]
        return np.array([one.ctx.slot for one in batch], np.int32)

    def places(self, batch: Sequence[Live]) -> list[int]:
        return [self.live.index(one) for one in batch]

    def prompt(self) -> list[int]:
        stem = self.random.choice(self.stems)
        cut = self.random.choice([len(stem), self.random.randint(0, len(stem))])
        tail = self.random.choices([1, 2], k=self.random.choice([0, 1, 3, self.page_size]))
        return (stem[:cut] + tail) or [1]

    def prefix(self) -> tuple[int, list[int], dict[str, Any]]:
        """A namespace, tokens, and the namespace as the verbs take it that know no request."""
        tokens, namespace = self.prompt(), self.random.randrange(len(NAMESPACES))
        keys = dict(NAMESPACES[namespace])
        if "cache_salt" in keys:
            keys["salt"] = keys.pop("cache_salt")
        return namespace, tokens, keys

    def settle_ended(self) -> None:
        """What a new step makes of copies that have ended."""

    def next_to_go(self) -> list[list[int]]:
        """In each group, the manager's idle pages in the order in which they go."""
        lines = re.findall(r"the next to go first: \[(.*)\]", self.kv.debug_dump())
        return [[int(page) for page in line.split(",") if page] for line in lines]

    def refused(self, error: type[Exception], call: Callable[[], object]) -> Any:
        """The call fails with `error` and leaves everything as it was."""
        before, counts = self.kv.fingerprint(), self.kv.metrics()
        with pytest.raises(error) as caught:
            call()
        after = self.kv.metrics()
        assert self.kv.fingerprint() == before, f"a refused call changed the ledger: {caught.value}"
        moved = {name for name, count in after.items() if count != counts[name]}
        assert moved <= {"failed_allocs", "connector_errors"}, f"a refused call counted {moved}"
        return caught.value


def group_params(kind: Kind, width: int, common: dict[str, Any]) -> Any:
    """What the user says of a group, whose pages are so many times as large as the smallest ones."""
    given = KINDS[type(kind)](kind)
    if isinstance(kind, Recurrent | Scratch):
        values = 2 * common["page_size"] * 8 * width  # as many as there are in a page of blocks
        state = pkp.RecurrentState("state", (values,), "float32")
        return pkp.RecurrentKVCacheParams(states=[state], num_layers=1, kind=given, **common)
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 8 * width}
    return pk.MHAKVCacheParams(num_layers=1, kind=given, **shape, **common)
