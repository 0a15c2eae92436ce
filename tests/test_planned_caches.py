"""What a plan says fits, fits (PLAN-3, PLAN-4): caches filled with as many requests as it says."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

import pagekeeper as pk
from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    KVCacheParams,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    Scratch,
    SlidingWindow,
)
from pagekeeper.planning import plan_cache

LONGEST = 120
"""Tokens of the longest request that is tried."""


class Request:
    """A request that is served with up to two steps out, until it has all its tokens."""

    def __init__(
        self,
        kv: pk.PagedKVCacheManager,
        draw: random.Random,
        tokens: int,
        drafts: int,
        encoder_length: int | None,
        prefix: Sequence[int] = (),
    ) -> None:
        self.kv, self.draw, self.tokens, self.drafts = kv, draw, tokens, drafts
        self.prompt = self.known = draw.choice([1, max(tokens - 1, 1), draw.randint(1, tokens)])
        self.finds = bool(prefix)
        shared = prefix[: draw.randint(0, self.prompt)]
        content = [*shared, *(draw.randrange(2**31) for _ in range(self.prompt - len(shared)))]
        self.ctx = pk.TextContext(
            pk.RequestID(), content, num_draft_tokens=drafts, encoder_length=encoder_length
        )
        self.out: list[tuple[int, bool]] = []
        """For each step out: the tokens that it computes, and whether it brings any."""
        self.lost = 0
        """Of these the oldest ones that a preemption dropped: their results are still due."""

    @property
    def coming(self) -> int:
        """Tokens that it has when each step that is out and brings any has brought one."""
        return self.known + sum(brings for _, brings in self.out[self.lost :])

    @property
    def launched(self) -> int:
        """Tokens that are computed, or are in a step that is out."""
        return self.ctx.processed_length + sum(tokens for tokens, _ in self.out[self.lost :])

    @property
    def can_plan(self) -> bool:
        # Where hits may move a prompt on, what is computed of it is known before more is planned.
        most = 1 if self.finds and self.launched < self.prompt else 2
        return len(self.out) < most and self.launched < self.coming < self.tokens

    def plan(self) -> None:
        self.kv.alloc(self.ctx, num_tokens=self.draw.choice([None, 1, self.draw.randint(1, 40)]))
        self.kv.runtime_inputs([[self.ctx]])
        ends = self.launched + self.ctx.active_length == self.coming
        self.out.append((self.ctx.active_length, ends))

    def step(self) -> None:
        is_lost, (_, brings) = self.lost > 0, self.out.pop(0)
        self.lost -= is_lost
        accepted = self.draw.randint(0, self.drafts) if self.known > self.prompt else 0
        count = min(1 + accepted, self.tokens - self.coming) if brings else 0
        new = [self.draw.randrange(2**31) for _ in range(count)]
        self.kv.step(self.ctx, new_tokens=new, counts=count)
        self.known += 0 if is_lost else count

    def preempt(self) -> None:
        self.kv.preempt(self.ctx)
        self.lost, self.prompt = len(self.out), self.known  # all that is known is computed again


def go_on(one: Request) -> None:
    if one.out and (not one.can_plan or one.draw.random() < 0.5):
        one.step()
    else:
        one.plan()


def group(draw: random.Random, kind: str, common: dict[str, Any]) -> KVCacheParams:
    """A group of layers of one kind, of some size."""
    layers = draw.randint(1, 3)
    state = RecurrentState("ssm", (draw.choice([16, 40]),), "float32")
    match kind:
        case "states":
            kept = Recurrent(draw.choice([None, 4 * common["page_size"]]), draw.choice([False, True]))
            return RecurrentKVCacheParams(states=[state], num_layers=layers, kind=kept, **common)
        case "scratch":
            return RecurrentKVCacheParams(states=[state], num_layers=layers, kind=Scratch(), **common)
        case "latent":
            return MLAKVCacheParams(
                dtype="bfloat16", kv_lora_rank=6, qk_rope_head_dim=2, num_layers=layers, **common
            )
    kinds: dict[str, Any] = {
        "sliding": SlidingWindow(draw.randint(1, 60), draw.choice([0, 0, 3])),
        "chunked": ChunkedLocal(draw.randint(1, 60)),
        "cross": CrossAttention(),
    }
    chosen = {"kind": kinds[kind]} if kind in kinds else {}
    return MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=draw.randint(1, 2), head_dim=4, num_layers=layers, **chosen, **common
    )


SORTS = [
    ["full"],
    ["latent"],
    ["sliding"],
    ["chunked"],
    ["full", "sliding"],
    ["full", "chunked"],
    ["sliding", "chunked", "latent"],
    ["full", "cross"],
    ["full", "states"],
    ["full", "sliding", "states", "scratch"],
]


def parameters(draw: random.Random) -> KVCacheParams | MultiKVCacheParams:
    common = {"page_size": draw.choice([1, 3, 4, 16]), "enable_prefix_caching": draw.random() < 0.5}
    sorts = draw.choice(SORTS)
    groups = {sort: group(draw, sort, common) for sort in sorts}
    if len(groups) == 1 and draw.random() < 0.7:
        return groups[sorts[0]]
    return MultiKVCacheParams(groups, layout=draw.choice(["auto", "jenga", "paged"]))


def served(draw: random.Random, params: KVCacheParams | MultiKVCacheParams) -> dict[str, Any]:
    """How a cache's requests are served."""
    names = dict(params.items()) if isinstance(params, MultiKVCacheParams) else {}
    return {
        "max_num_input_tokens": draw.choice([None, 1, 8, 30]),
        "num_draft_tokens": 0 if "states" in names else draw.choice([0, 0, 2, 5]),
        "encoder_length": 25 if "cross" in names else None,
    }


def request(kv: pk.PagedKVCacheManager, draw: random.Random, given: dict[str, Any], *prefix: int) -> Request:
    """One of the longest ones."""
    assert kv.max_seq_len is not None
    return Request(kv, draw, kv.max_seq_len, given["num_draft_tokens"], given["encoder_length"], prefix)


@pytest.mark.parametrize("case", range(120))
def test_as_many_of_the_longest_requests_fit_as_were_promised_and_no_longer_one(
    case: int, first_seed: int
) -> None:
    draw = random.Random(first_seed + case)
    params, batch = parameters(draw), draw.randint(1, 6)
    given = served(draw, params)
    with_mix = {**given, "length_mix": draw.choice([None, {30: 3, 100: 1}])}
    memory = draw.randint(200, 60_000)
    try:
        plan = plan_cache(params, memory, batch, **with_mix)
    except pk.CacheTooSmallError:
        longest = 0
    else:
        longest = plan.longest(LONGEST)
    if longest:
        requests = min(plan.planned_for(longest).concurrency(longest), batch)
        kv = pk.load_kv_manager(params, batch, longest, None, memory, allocate_pools=False, **with_mix)
        for _ in range(2):  # the second ones beside what the first ones have left in the cache
            alive = [request(kv, draw, given) for _ in range(requests)]
            for one in alive:
                kv.claim(one.ctx)
            while busy := [one for one in alive if one.out or one.can_plan]:
                go_on(draw.choice(busy))
            kv.verify()
            kv.release([one.ctx for one in alive])
    if longest < LONGEST:
        with pytest.raises(pk.CacheTooSmallError) as refused:
            pk.load_kv_manager(params, batch, longest + 1, None, memory, allocate_pools=False, **with_mix)
        assert refused.value.max_seq_len_that_fits == longest
        assert refused.value.needed > refused.value.available == memory


@pytest.mark.parametrize("case", range(60))
def test_where_groups_share_a_slab_what_comes_and_goes_leaves_room_for_as_many_as_were_promised(
    case: int, first_seed: int
) -> None:
    draw = random.Random(first_seed + case)
    common = {"page_size": draw.choice([1, 3, 4, 16]), "enable_prefix_caching": True}
    sorts = draw.choice([sorts for sorts in SORTS if len(sorts) > 1])
    params = MultiKVCacheParams({sort: group(draw, sort, common) for sort in sorts}, layout="jenga")
    given, memory = served(draw, params), draw.randint(20_000, 60_000)
    try:
        plan = plan_cache(params, memory, 6, **given)
    except pk.CacheTooSmallError:
        return
    longest = plan.longest(LONGEST)
    most = min(plan.planned_for(longest).concurrency(longest), draw.randint(1, 6))
    kv = pk.load_kv_manager(params, 6, longest, None, memory, allocate_pools=False, **given)
    prefixes = [[draw.randrange(2**31) for _ in range(longest)] for _ in range(3)]
    alive: list[Request] = []
    to_come = 4 * most
    while to_come or alive:
        while to_come and len(alive) < draw.randint(1, most):
            alive.append(request(kv, draw, given, *draw.choice(prefixes)))
            kv.claim(alive[-1].ctx)
            to_come -= 1
        one = draw.choice(alive)
        if one.out or one.can_plan:
            go_on(one)
        else:
            kv.release(one.ctx)
            alive.remove(one)
        if alive and draw.random() < 0.01:
            draw.choice(alive).preempt()
    kv.verify()


@pytest.mark.parametrize("case", range(30))
def test_requests_that_are_preempted_with_steps_out_are_served_to_their_ends(
    case: int, first_seed: int
) -> None:
    draw = random.Random(first_seed + case)
    params = parameters(draw)
    groups = set(params) if isinstance(params, MultiKVCacheParams) else set()
    drafts, encoder_length = 0 if "states" in groups else 2, 25 if "cross" in groups else None
    kv = pk.load_kv_manager(
        params, 3, LONGEST, None, 2**23, encoder_length=encoder_length, allocate_pools=False
    )
    alive = [Request(kv, draw, draw.randint(20, LONGEST), drafts, encoder_length) for _ in range(3)]
    for one in alive:
        kv.claim(one.ctx)
    preemptions = 8
    while busy := [one for one in alive if one.out or one.can_plan]:
        one = draw.choice(busy)
        if preemptions and draw.random() < 0.1:
            preemptions -= 1
            one.preempt()
        else:
            go_on(one)
    kv.verify()
    assert [one.known for one in alive] == [len(one.ctx) for one in alive] == [one.tokens for one in alive]
