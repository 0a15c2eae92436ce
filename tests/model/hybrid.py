"""Random sessions of several groups of layers whose every forward is computed, over pages and densely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pagekeeper as pk
from model.drawn import LONGEST, MAX_BATCH
from model.forwards import Forward, Forwards, Live
from model.windows import Cross, blocks_behind, needed_blocks
from pagekeeper.events import BlockIndex, Updated


class Session(Forwards):
    """One random sequence of calls; the seed says which groups, pools and calls. Takes what `Drawn` takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        choose: Any = self.random.choice
        self.index = BlockIndex()
        self.stems: list[list[int]] = [[choose([1, 2]) for _ in range(LONGEST * 2 // 3)] for _ in range(3)]
        self.live: list[Live] = []

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
        self.kv.runtime_inputs([[]])  # copies for those who gave up
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
        for number in range(len(self.every)):
            for tier in range(3):
                assert self.index.hashes(number, tier) == there.hashes(number, tier)
        tokens, given = self.random.choice(self.stems), self.random.choice([None, *self.inputs])
        items = given.items if given else []
        prefix = pk.hash_blocks(tokens[:-1], self.page_size, seed=self.kv.hash_seed, mm_items=items)
        reuse = self.kv.analyze_prefix_reuse(tokens, mm_items=items)
        answers: list[tuple[int, int | None]] = [(reuse.device_blocks, 0)]
        if not self.kv.metrics()["copies_in_flight"]:
            answers.append((reuse.reusable_blocks_all, None))
        for blocks, farthest in answers:
            found = blocks * self.page_size
            known = self.index.match_length(prefix, farthest) * self.page_size
            assert known == found or (known < found and not self.needs_last(found))

    def needs_last(self, position: int) -> bool:
        """Whether a request that goes on from there needs the block before: not so between two chunks."""
        last = position // self.page_size - 1
        kinds = [group.kind for group in self.groups]
        return self.has_states or any(last in needed_blocks(kind, position, self.page_size) for kind in kinds)

    # What an engine does

    def claim(self) -> None:
        if len(self.live) > MAX_BATCH:
            return
        stem = self.random.choice(self.stems)
        cut = self.random.choice([len(stem), self.random.randint(0, len(stem))])
        tokens = stem[:cut] + self.random.choices([1, 2], k=self.random.choice([1, 1, 3]))
        given = self.random.choice([None, *self.inputs, *self.inputs]) if self.inputs else None
        items = given.items if given and self.random.random() < 0.8 else []
        self.note(f"claim #{len(self.live)} {given} {items} {tokens}")
        length = given.length if given else None
        ctx = pk.TextContext(pk.RequestID(), tokens, mm_items=items, encoder_length=length)
        self.kv.claim(ctx)
        self.live.append(Live(ctx, tokens, given))

    def forward(self) -> None:
        """Plans a forward of some requests, and computes it."""
        batch = self.able()
        bounds = [self.random.choice([1, 3, 7, LONGEST]) for _ in batch]
        if not batch:
            return
        if self.has_states and self.random.random() < 0.7:
            # As schedulers do: to where states are left for others.
            bounds = [max(chunk, 1) for chunk in self.kv.chunk_tokens([one.ctx for one in batch]).tolist()]
        if not self.plan(batch, bounds):
            self.random.choice([self.release, self.preempt, self.go_alone])()
            return
        if self.random.random() < 0.2 and self.break_off(batch):
            batch = self.give_up(batch)
        if batch:
            self.launch(batch)

    def give_up(self, batch: list[Live]) -> list[Live]:
        """After a forward that could not begin one of its requests perhaps goes; gives the others."""
        self.kv.verify()
        one, verb = self.random.choice(batch), self.random.choice(["keep", "preempt", "release"])
        self.note(f"broken off: {verb} {self.places([one])}")
        if verb == "keep":
            return batch
        if verb == "preempt":
            self.kv.preempt(one.ctx)
            one.start_over(0)
        else:
            self.kv.release(one.ctx)
            self.live.remove(one)
        return [other for other in batch if other is not one]

    def go_alone(self) -> None:
        """With nothing in use a request is refused for its size alone, wherever what it finds is cached."""
        self.kv.preempt([one.ctx for one in self.live])
        for one in self.live:
            one.start_over(0)
        self.settle()
        batch = self.able()[:1]
        waiting = self.counts["InsufficientBlocksError"]
        if batch and self.plan(batch, [self.random.choice([1, LONGEST])]):
            self.launch(batch)
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

    def launch(self, batch: Sequence[Live]) -> None:
        """Computes what was planned; its results are out."""
        self.compute(batch)
        for one in batch:
            ends = one.launched == len(one.tokens)
            one.out.append(Forward([self.sample(one)] if ends else []))
            one.tokens += one.out[-1].sampled
            self.counts["chunks"] += not ends
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
        before, rows = one.ctx.processed_length, [self.row(one, group) for group in self.every]
        try:
            self.kv.suspend(one.ctx)
        except pk.InsufficientBlocksError:
            return
        self.settle()
        self.kv.verify()
        assert all(self.row(one, group) == [] for group in self.every)
        try:
            self.kv.resume(one.ctx)
        except pk.InsufficientBlocksError:
            self.kv.preempt(one.ctx)
            one.start_over(0)
            return
        self.settle()
        self.counts["suspended"] += 1
        if one.ctx.processed_length == before:
            held = [[bool(page) for page in row] for row in rows]
            assert [[bool(page) for page in self.row(one, group)] for group in self.every] == held
        else:  # others stored more of its prompt
            assert one.ctx.processed_length > before
            self.counts["came back further"] += 1
        one.encoded = {group.name: self.row(one, group) for group in self.cross if group.name in one.encoded}

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
            ctx = self.kv.fork(parent.ctx)
            child = Live(
                ctx, ctx.tokens.all.tolist(), parent.given, ctx.processed_length, family=parent.family
            )
            self.live.append(child)
            if child.launched or any(self.row(child, group) for group in self.cross):
                child.encoded = dict(parent.encoded)

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

    # The books

    def check_rows(self) -> None:
        """A block has a page in a group unless no token to come sees it; those of an encoder stay."""
        owners: dict[tuple[str | None, int], object] = {}
        for one in self.live:
            known = min(one.ctx.processed_length, len(one.ctx))
            for group in self.groups:
                row = self.row(one, group)
                missing = {block for block, page in enumerate(row) if page == 0}
                behind = blocks_behind(group.kind, known, self.page_size) & set(range(len(row)))
                assert missing == behind, f"{group}, request {self.places([one])}: {row}"
            for group in self.cross:
                row = self.row(one, group)
                blocks = Cross().lasting(one.encoder_length, self.page_size)
                assert all(row), f"{group}, request {self.places([one])}: {row}"
                assert len(row) in (0, blocks), f"{group}, request {self.places([one])}: {row}"
                assert one.encoded.get(group.name, row) == row, "an encoder's pages are taken once"
                for page in row:
                    assert owners.setdefault((group.name, page), one.family) == one.family

    def holds_a_page(self, one: Live) -> bool:
        return any(page for group in self.every for page in self.row(one, group))

    def held(self) -> int:
        """Blocks of all requests that have pages, in all groups."""
        return sum(page > 0 for one in self.live for group in self.groups for page in self.row(one, group))

    def places(self, batch: Sequence[Live]) -> list[int]:
        return [self.live.index(one) for one in batch]
