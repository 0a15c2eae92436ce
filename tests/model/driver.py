"""Drives the manager and the reference model with the same random calls and compares them after each.

A session is one seed: the pool's size, the requests and every call follow from it.
"""

from collections.abc import Callable

from model.moving import Moving
from model.tending import Tending
from model.watching import Watching

COUNTED = (
    "claims",
    "forks",
    "releases",
    "preemptions",
    "failed_allocs",
    "admissions",
    "prompt_tokens",
    "context_blocks",
    "reused_blocks",
    "reused_tokens",
    "late_reused_tokens",
    "missed_window",
    "missed_no_snapshot",
    "partial_hits",
    "partial_tokens",
    "stored_tails",
    "pages_allocated",
    "pages_allocated_new",
    "page_copies",
    "evictions",
    "published_blocks",
    "adopted_blocks",
    "private_blocks",
    "collisions",
    "truncated_blocks",
    "copies_started",
    "copies_finished",
    "copies_failed",
    "copies_refused",
    "loaded_blocks",
    "loaded_tokens",
    "resets",
    "reset_blocks",
    "dropped_results",
)
"""Metrics that the model has under the same names."""


class Session(Moving, Tending, Watching):
    """One random sequence of calls."""

    def run(self, calls: int) -> None:
        """Plays, then ends all that is left."""
        self.play(calls)
        self.release_all()

    def play(self, calls: int) -> None:
        """So many random calls, each compared."""
        verbs: list[tuple[int, Callable[[], None]]] = [
            (6, self.claim),
            (18, self.alloc),
            (18, self.step),
            (4, self.release),
            (1, self.preempt),
            (2, self.truncate),
            (2, self.fork),
            (1, self.look),
            (1, self.commit),
            (1, self.open_step),
            (2, self.pass_time),
            (1, self.hint),
            (1, self.pin),
            (1, self.unpin),
            (1, self.truncate_prefix),
            (1, self.start_copy),
            (1, self.end_copy),
            (4, self.misuse),
        ]
        if self.tier is not None:
            verbs += [
                (2, self.behave),
                (2, self.prefetch),
                (5, self.poll),
                (30, self.visit),
                (12, self.forget),
            ]
        if not self.is_plain:
            verbs.append((30, self.visit))
        if self.random.random() < 0.3:
            verbs.append((1, self.reset))
        weights, actions = zip(*verbs, strict=True)
        for _ in range(calls):
            self.random.choices(actions, weights)[0]()
            self.compare()

    def visit(self) -> None:
        """Some request, mostly the one that comes, is computed and goes: before states, in chunks."""
        forward = [self.alloc, self.poll, self.alloc, self.step] * (3 if self.keeps_states else 1)
        for call in (self.claim, *forward, self.release):
            call()
            self.compare()

    def compare(self) -> None:
        self.kv.verify()
        self.check_counts()
        assert self.next_to_go() == [pool.order() for pool in self.model.pools]
        for one in self.live:
            request = self.request(one)
            ctx = one.ctx
            lengths = (ctx.processed_length, ctx.cached_prefix_length, len(ctx))
            where = f"request {self.places([one])}"
            for name, row in zip(self.names, request.rows, strict=True):
                assert self.kv.get_cache_indices(ctx, name) == [row], where
            assert lengths == (request.processed, request.cached, len(request.known)), where
        if self.live:
            self.check_content(self.random.choice(self.live))
        self.hear()
        self.check_answers()

    def check_counts(self) -> None:
        metrics, counts, pools = self.kv.metrics(), self.model.counts, self.model.pools
        assert {name: metrics[name] for name in COUNTED} == {name: counts[name] for name in COUNTED}
        missed = sum(value for name, value in metrics.items() if name.startswith("missed_"))
        assert missed == counts["missed_blocks"]
        slab = self.model.slab
        if slab is not None:
            total, free, pristine = slab.huge_pages, slab.free, slab.unused
        else:
            total, free = sum(pool.pages for pool in pools), sum(pool.free for pool in pools)
            pristine = sum(len(pool.pristine) for pool in pools)
        gauges = {
            "pages_total": total,
            "pages_free": free,
            "pages_pristine": pristine,
            "pages_evictable": free - pristine,
            "pages_in_flight": sum(pool.in_flight for pool in pools),
            "cached_blocks": len(self.model.blocks_in(self.model.lead)),
            "requests": len(self.model.requests),
            "pins": len(self.model.pins),
        }
        assert {name: metrics[name] for name in gauges} == gauges
        counted = [self.kv.block_count(group=name) for name in self.names]
        assert [(count.free, count.total) for count in counted] == [(pool.free, pool.pages) for pool in pools]
        if self.tier is not None and self.model.tier is not None:
            assert len(self.tier.kept) == len(self.model.tier)

    def release_all(self) -> None:
        self.kv.release([one.ctx for one in self.live])
        self.model.release([one.ctx.request_id for one in self.live])
        self.live = []
        self.end_all()
        while self.model.pins:
            self.unpin()
        self.compare()
        assert all(pool.free == pool.pages for pool in self.model.pools)
