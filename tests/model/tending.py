"""Calls of a random session that say what is kept, that look, and that must be refused."""

from model.misuse import wrong_calls
from model.stage import MAX_BATCH, Stage
from model.windows import needed_blocks


class Tending(Stage):
    """Retention, pins, forgetting; probes; misuse."""

    def pass_time(self) -> None:
        now = self.model.now + self.random.choice([0, 0.5, 1, 4])
        self.note(f"begin_step now={now}")
        self.settle_ended()
        assert self.kv.begin_step(now=now) == self.model.begin_step(now)

    def hint(self) -> None:
        batch = self.pick(lambda one: True, most=3)
        names = [one.ctx.request_id for one in batch]
        if self.random.random() < 0.5:
            self.note(f"session_hint {self.places(batch)} done")
            self.model.session_done(names)
            self.kv.session_hint([one.ctx for one in batch], "done")
            return
        priority, seconds = self.random.choice([20, 35, 80, 100]), self.random.choice([None, 0, 1, 3])
        self.note(f"session_hint {self.places(batch)} resume_soon {priority=} {seconds=}")
        self.model.resume_soon(names, priority, seconds)
        duration = None if seconds is None else seconds * 1000.0
        contexts = [one.ctx for one in batch]
        self.kv.session_hint(contexts, "resume_soon", priority=priority, duration_ms=duration)

    def pin(self) -> None:
        for one in self.pick(lambda one: len(self.model.pins) < 2, most=1):
            number = self.kv.pin(one.ctx)
            self.note(f"pin {number} of {self.places([one])}")
            self.model.pin(number, one.ctx.request_id)

    def unpin(self) -> None:
        if self.model.pins:
            number = self.random.choice(list(self.model.pins))
            self.note(f"unpin {number}")
            self.model.unpin(number)
            self.kv.unpin(number)

    def truncate_prefix(self) -> None:
        namespace, tokens, keys = self.prefix()
        tokens = tokens[: self.random.randint(0, len(tokens))]
        self.note(f"truncate_prefix {keys} {tokens}")
        forgotten = self.kv.truncate_prefix(tokens, **keys)
        assert self.model.truncate_prefix(namespace, tokens, self.next_to_go()) == forgotten

    def forget(self) -> None:
        """The device loses what follows a prefix, so that more comes from the tier."""
        tokens = self.prompt()[: self.random.choice([0, 8, 24])]
        self.note(f"truncate_prefix {tokens}")
        forgotten = self.kv.truncate_prefix(tokens)
        assert self.model.truncate_prefix(0, tokens, self.next_to_go()) == forgotten

    def reset(self) -> None:
        self.note("reset_prefix_cache")
        self.kv.reset_prefix_cache()
        self.model.reset(self.next_to_go())

    def look(self) -> None:
        """The router's probe and the scheduler's summary answer like the model, and change nothing."""
        namespace, tokens, keys = self.prefix()
        self.note(f"probe {keys} {tokens}")
        before = self.kv.fingerprint()
        found = self.model.match(namespace, tokens) if self.model.caching else 0
        lead, ends = self.model.lead, range(self.page_size, (found + 1) * self.page_size, self.page_size)
        pages = [lead.tree.get((namespace, tuple(tokens[:end]))) for end in ends]
        summary = self.kv.analyze_prefix_reuse(tokens, **keys)
        if self.model.caching and self.tier is None:
            _, why = self.model.match_within(namespace, tokens, len(tokens) // self.page_size)
            assert why in (None, summary.miss_reason)
            assert why or summary.miss_reason in (None, "never_stored", "evicted")
        assert summary.device_blocks >= found
        held = [page for page in pages if page is not None and not lead.is_idle(page)]
        assert summary.reusable_blocks_allocated == len(held)
        for pool, allocated in zip(self.model.pools, summary.allocated_by_group, strict=True):
            end = found * self.page_size
            blocks = needed_blocks(pool.kind, end, self.page_size) - {found} if found else set[int]()
            contents = [(namespace, tuple(tokens[: (block + 1) * self.page_size])) for block in blocks]
            assert allocated == sum(not pool.is_idle(pool.tree[content]) for content in contents)
        if self.tier is None:
            assert self.kv.probe_prefix_match_length(tokens, **keys) == found * self.page_size
        self.kv.metrics()
        self.kv.event_snapshot()
        for one in self.live:
            self.kv.get_cache_indices(one.ctx, self.random.choice(self.names))
        assert self.kv.fingerprint() == before

    def misuse(self) -> None:
        former = self.random.choice(self.gone) if self.gone else None
        running = self.random.choice(self.live).ctx if self.live else None
        blocked = [one for one in self.live if not self.can_plan(one)]
        wrong = wrong_calls(self.kv, MAX_BATCH, running, former)
        if blocked:
            idle = self.random.choice(blocked).ctx
            wrong["alloc with nothing to compute or in one step twice"] = lambda: self.kv.alloc(idle)
        name = self.random.choice(list(wrong))
        self.note(f"misuse: {name}")
        self.refused(ValueError, wrong[name])
