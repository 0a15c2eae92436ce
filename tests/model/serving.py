"""The engine's part of a random session: requests come, are computed, and go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagekeeper as pk
from model.live import Live
from model.memory import PageMemory, prefix_values
from model.pool import Limit, Pool
from model.requests import Kept, NeverRoom, NoRoom, Retention
from model.stage import MAX_BATCH, NAMESPACES, Stage
from model.tables import expected_tables
from model.windows import Cross, Full, Recurrent, Scratch

WRONG = -7
"""What a draft that was not right leaves in its cell."""


class Serving(Stage, ABC):
    """Calls of an engine that serves requests: each should work, or fail for want of room."""

    most_drafts = 0
    """Of all requests so far."""

    def claim(self) -> None:
        if len(self.live) > MAX_BATCH:
            return
        namespace = self.random.choices(range(len(NAMESPACES)), [12, 1, 1, 1, 1])[0]
        tokens = self.prompt()
        image = None
        encoder = (
            self.random.choice([None, 1, self.page_size, 2 * self.page_size + 1])
            if self.has_encoder
            else None
        )
        named = encoder is not None and self.random.random() < 0.7
        if named or self.random.random() < 0.1:
            start = 0 if named else self.random.randrange(len(tokens))
            image = self.random.randint(1, 2), start, min(self.random.randint(1, 5), len(tokens) - start)
        no_read, no_store = self.random.random() < 0.08, self.random.random() < 0.08
        drafts = 0 if self.keeps_states else self.random.choice([0, 0, 0, 1, 3])
        kept = self.retention(len(tokens)) if self.random.random() < 0.3 else None
        most_new = self.random.choice([None, 1, 5, 20]) if self.shares else None
        options = f"{NAMESPACES[namespace]} {image=} {no_read=} {no_store=} {drafts=} {most_new=} {encoder=}"
        options += f" {kept}"
        self.note(f"claim #{len(self.live)} {options} {tokens}")
        ctx = pk.TextContext(
            request_id=pk.RequestID(),
            max_length=self.longest,
            max_new_tokens=most_new,
            tokens=pk.TokenBuffer(np.array(tokens)),
            mm_items=[(bytes([image[0]]) * 32, image[1], image[2])] if image else [],
            no_read=no_read,
            no_store=no_store,
            num_draft_tokens=drafts,
            encoder_length=encoder,
            retention=None if kept is None else config_of(kept),
            **NAMESPACES[namespace],
        )
        live = Live(ctx, namespace, image, tokens)
        self.most_drafts = max(self.most_drafts, drafts)
        slot = self.kv.claim(ctx)
        assert slot == ctx.slot
        self.model.claim(
            ctx.request_id,
            live.atoms(tokens),
            namespace,
            no_read=no_read,
            no_store=no_store,
            drafts=drafts,
            retention=kept,
            encoder=encoder or 0,
            most_new=most_new,
        )
        self.live.append(live)

    def retention(self, tokens: int) -> Retention:
        """One or two ranges, and what holds for generated blocks."""
        cuts = sorted(self.random.sample(range(tokens + 1), min(tokens + 1, self.random.choice([2, 3, 4]))))
        ranges = zip(cuts[::2], cuts[1::2], strict=False)
        return Retention(tuple((start, end, self.kept()) for start, end in ranges), self.kept(expires=False))

    def kept(self, *, expires: bool = True) -> Kept:
        priority = self.random.choice([0, 20, 35, 80, 100])
        kind = self.random.random()
        if kind < 0.5:
            return Kept(priority)
        if kind < 0.8 or not expires:
            return Kept(priority, Limit(self.random.choice([0, 1, 3]), after_release=True))
        return Kept(priority, Limit(self.model.now + self.random.choice([-1, 0, 2]), after_release=False))

    def fork(self) -> None:
        for one in self.pick(lambda one: len(self.live) <= MAX_BATCH, most=1):
            self.note(f"fork #{len(self.live)} of {self.places([one])}")
            child = self.kv.fork(one.ctx)
            self.model.fork(one.ctx.request_id, child.request_id)
            known = len(self.request(one).known)
            self.live.append(Live(child, one.namespace, one.image, one.truth[:known]))

    def alloc(self) -> None:
        batch = self.pick(self.can_plan)
        if not batch:
            return
        names = [one.ctx.request_id for one in batch]
        bounds: list[int | None] = [None] * len(batch)
        given: Any = None
        if self.keeps_states and self.random.random() < 0.7:
            # As schedulers do: to where the state is left for others.
            chunks = self.kv.chunk_tokens([one.ctx for one in batch]).tolist()
            given = bounds = [max(chunk, 1) for chunk in chunks]
        elif self.random.random() < 0.5:
            bounds = [self.random.randint(1, 9) for _ in batch]
            given = list(bounds)
            if len(batch) == 1 or self.random.random() < 0.3:
                given, bounds = bounds[0], bounds[:1] * len(batch)
        self.note(f"alloc {self.places(batch)} num_tokens={given}")
        free, needed = self.free(), self.foretold(batch, given)
        waiting = self.plan(names, bounds)
        if self.tier is None and not isinstance(waiting, NeverRoom):
            fits = not isinstance(waiting, NoRoom)
            assert self.kv.can_alloc([one.ctx for one in batch], num_tokens=given) == fits
            if len(batch) == 1 and not self.shares:
                assert all(need <= there for need, there in zip(needed, free, strict=True)) == fits
        if isinstance(waiting, NoRoom):
            error = pk.RequestTooLargeError if isinstance(waiting, NeverRoom) else pk.InsufficientBlocksError
            caught = self.refused(error, lambda: self.kv.alloc(self.form(batch), num_tokens=given))
            assert (type(caught), caught.request_id) == (error, waiting.name)
            self.make_room(waiting)
            return
        self.kv.alloc(self.form(batch), num_tokens=given)
        self.check_foretold(batch, needed, free)
        for name, pool, memory in zip(self.names, self.model.pools, self.memories, strict=True):
            fills = self.kv.take_page_fills(name).tolist()
            assert fills == self.model.take_page_fills(pool)
            memory.cells[fills] = 0
            copies = self.kv.take_page_copies(name).tolist()
            assert copies == self.model.take_page_copies(pool)
            for source, destination in copies:
                memory.cells[destination] = memory.cells[source]
        if planned := [one for one in batch if one.ctx.request_id not in waiting]:
            self.forward(planned)

    def free(self) -> list[int]:
        """Pages of each group that can be had."""
        return [self.kv.block_count(group=name).free for name in self.names]

    def foretold(self, batch: Sequence[Live], num_tokens: Any) -> list[int]:
        """Pages of each group that schedulers are told the next forwards take."""
        before = self.kv.fingerprint()
        needs = self.kv.get_needed_blocks_one_step([one.ctx for one in batch], num_tokens=num_tokens)
        assert self.kv.fingerprint() == before
        return [int(need) for need in needs.reshape(len(batch), -1).sum(axis=0)]

    def check_foretold(self, batch: Sequence[Live], needed: Sequence[int], free: Sequence[int]) -> None:
        """What was told is what was taken, until copies end; a batch may take less, a load takes more.

        In a slab that groups share what is free of one group is others', too.
        """
        if self.tier or self.shares:
            return
        for need, before, after in zip(needed, free, self.free(), strict=True):
            taken = max(0, before - after)
            assert need == taken or (len(batch) > 1 and need > taken), f"{need} foretold, {taken} taken"

    @abstractmethod
    def plan(self, names: Sequence[object], bounds: Sequence[int | None]) -> set[object] | NoRoom:
        """What the model makes of an `alloc`: the requests that wait for a load, or why it is refused."""

    def make_room(self, refusal: NoRoom) -> None:
        """What an engine does after a refusal: it rejects, or ends or preempts others, or waits a step."""
        if isinstance(refusal, NeverRoom):
            self.release([one for one in self.live if one.ctx.request_id == refusal.name])
        else:
            self.random.choice([self.release, self.preempt, self.open_step])()

    def open_step(self) -> None:
        self.note("begin_step")
        self.settle_ended()
        assert self.kv.begin_step() == self.model.begin_step()

    def step(self) -> None:
        batch = self.pick(lambda one: bool(one.sampled))
        if not batch:
            return
        results = [self.results(one) for one in batch]
        names = [one.ctx.request_id for one in batch]
        self.note(f"step {self.places(batch)} new_tokens={results}")
        first = self.request(batch[0]).out[0]
        # Whoever calls `update` first says nothing of drafts.
        one_by_one = len(batch) == 1 and first.live and bool(results[0])
        one_by_one = one_by_one and (len(results[0]) == 1 or not first.drafts)
        atoms = [self.deliver(one, tokens) for one, tokens in zip(batch, results, strict=True)]
        self.model.step(names, atoms)
        flat = [token for tokens in results for token in tokens]
        counts = [len(tokens) for tokens in results]
        if not flat and self.random.random() < 0.5:
            self.kv.step(self.form(batch))
        elif set(counts) == {1} and self.random.random() < 0.5:
            self.kv.step(self.form(batch), new_tokens=flat)
        elif one_by_one and self.random.random() < 0.3:
            for token in flat:
                batch[0].ctx.update(token)
            self.kv.step(self.form(batch))
        else:
            self.kv.step(self.form(batch), new_tokens=np.array(flat, np.int32), counts=np.array(counts))
        self.offload()

    def offload(self) -> None:
        """What the model makes of the blocks that were published just now."""

    def release(self, batch: Sequence[Live] | None = None) -> None:
        batch = batch or self.pick(lambda one: True, most=2)
        if not batch:
            return
        self.note(f"release {self.places(batch)}")
        for one in batch:
            self.check_content(one)
        slots = [one.ctx.slot for one in batch]
        tails = self.model.release([one.ctx.request_id for one in batch])
        form = self.form(batch)
        assert self.kv.release(form) == (tails[0] if isinstance(form, pk.TextContext) else tails)
        self.gone += [(one.ctx, slot) for one, slot in zip(batch, slots, strict=True)]
        self.live = [one for one in self.live if one not in batch]

    def preempt(self) -> None:
        batch = self.pick(lambda one: True, most=2)
        if not batch:
            return
        self.note(f"preempt {self.places(batch)}")
        self.model.preempt([one.ctx.request_id for one in batch])
        self.kv.preempt(self.form(batch))
        for one in batch:
            self.forget_results(one)

    def truncate(self) -> None:
        for one in self.pick(lambda one: True, most=1):
            length = self.random.randint(1, len(self.request(one).known))
            self.note(f"truncate {self.places([one])} to {length}")
            one.cut_image(length)
            self.model.truncate(one.ctx.request_id, one.atoms(one.truth[:length]))
            one.ctx.truncate(length)
            self.forget_results(one)

    def forget_results(self, one: Live) -> None:
        """The model knows which tokens remain, and how many results will still come."""
        request = self.request(one)
        if not request.live:
            one.truth = one.truth[: len(request.tokens)]
            del one.sampled[len(request.out) :]

    def commit(self) -> None:
        for one in self.pick(lambda one: True, most=1):
            self.note(f"commit_and_get_block_hashes {self.places([one])}")
            self.model.publish(one.ctx.request_id)
            hashes = self.kv.commit_and_get_block_hashes(one.ctx, self.random.choice(self.names))
            self.offload()
            known = len(self.request(one).known)
            assert len(hashes) == (known // self.page_size if self.model.caching else 0)
            assert len(set(hashes)) == len(hashes)

    # The forward

    def forward(self, batch: Sequence[Live]) -> None:
        """Reads what the first token sees, then writes the new cells and samples where the prompt ends.

        The device knows how many drafts of a forward before were right, also while the ledger does not.
        """
        self.check_tables(batch)
        for one in batch:
            request = self.request(one)
            step = request.out[-1]
            assert one.ctx.active_length == step.active
            older = zip(request.out[:-1], one.sampled, strict=True)
            moved = sum(len(tokens) - 1 for out, tokens in older if out.live and tokens)
            start, end = step.start + moved, step.end + moved
            values = prefix_values(one.namespace, one.atoms(one.truth[:end]))
            assert len(values) == end
            for pool, memory, row in zip(self.model.pools, self.memories, request.rows, strict=True):
                if isinstance(pool.kind, Cross):
                    assert len(row) == pool.kind.lasting(request.encoder, self.page_size)
                    continue
                if not pool.has_blocks:
                    self.work(one, pool, memory, row[-1], values, start)
                    continue
                seen = pool.kind.sees(start, np.arange(start))
                assert (memory.read(row, start) == values[:start])[seen].all(), "a hit reads foreign KV"
            sampled: list[int] = []
            reach = end
            if end == len(one.truth):
                for _ in range(self.random.randint(1, 1 + step.drafts)):
                    sampled.append(self.sample(one))
                    one.truth.append(sampled[-1])
                reach += 2 * request.drafts  # what the drafter guesses next is computed, too
                values = prefix_values(one.namespace, one.atoms(one.truth[:-1]))
            one.sampled.append(sampled)
            guessed = np.full(reach - len(values), WRONG) if reach > len(values) else values[:0]
            for pool, memory, row in zip(self.model.pools, self.memories, request.rows, strict=True):
                if not pool.has_blocks:
                    continue
                written = row[start // self.page_size : -(-reach // self.page_size)]
                assert len(written) == -(-reach // self.page_size) - start // self.page_size
                assert all(pool.is_writable(page) for page in written), "a forward writes to a shared page"
                memory.write(row, start, np.concatenate([values[start:], guessed]))

    def work(
        self, one: Live, pool: Pool, memory: PageMemory, page: int, values: NDArray[np.int64], start: int
    ) -> None:
        """The forward goes on from the state after the tokens before `start`, or in its own memory."""
        assert pool.is_writable(page), "a forward writes to a shared page"
        (cell, *_), mark = memory.cells[page], hash(one.ctx.request_id)
        if isinstance(pool.kind, Scratch):
            assert cell in (0, mark), "somebody else's memory to work in"
            memory.cells[page, 0] = mark
        else:
            assert cell == (values[start - 1] if start else 0), "a forward goes on from another state"
            memory.cells[page, 0] = values[-1]

    def check_tables(self, batch: Sequence[Live]) -> None:
        form: Any = self.random.choice(["max", "vllm", "flashinfer", None])
        if form is None:
            return
        inputs: Any = self.kv.runtime_inputs([self.form(batch, single=False)], form=form)
        self.model.close_step()
        requests = [self.request(one) for one in batch]
        for group, name in enumerate(self.names):
            if isinstance(self.model.pools[group].kind, Cross):
                (cross,) = (inputs if name is None else inputs[name]).cross
                assert cross.encoder_lens.tolist() == [request.encoder for request in requests]
                rows = [[page for page in row if page] for row in cross.block_table.tolist()]
                assert rows == [request.rows[group] for request in requests]
                continue
            if not self.model.pools[group].has_blocks:
                (states,) = (inputs if name is None else inputs[name]).states
                assert states.indices.tolist() == [request.rows[group][-1] for request in requests]
                continue
            tables = inputs[0] if name is None else inputs[name][0]
            expected = expected_tables(
                form,
                [request.rows[group] for request in requests],
                [(step.start, step.end + step.drafts) for step in (request.out[-1] for request in requests)],
                self.page_size,
                self.most_pages(),
            )
            for array, value in expected.items():
                found = getattr(tables, array)
                assert (found if isinstance(found, int) else found.tolist()) == value, (name, array)

    def most_pages(self) -> int:
        """Most pages of one request, whatever drafts a request has had so far."""
        if self.max_seq_len is None:
            return min(group.pages for group in self.groups if isinstance(group.kind, Full))
        slack = 3 * self.most_drafts + 1 if self.most_drafts else 0
        return -(-(self.max_seq_len + slack) // self.page_size)

    def results(self, one: Live) -> list[int]:
        """What the engine reports for the oldest step: the sampled tokens, at times none or others."""
        tokens = one.sampled[0]
        if not tokens or len(one.sampled) > 1 or self.random.random() < 0.8:
            return tokens
        if self.random.random() < 0.3:
            return []
        return tokens if self.request(one).out[0].drafts else [*tokens, *self.random.choices([1, 2], k=2)]

    def deliver(self, one: Live, tokens: Sequence[int]) -> list[Any]:
        """Books the delivery on the engine's side; the atoms are what the model is told."""
        request = self.request(one)
        one.sampled.pop(0)
        if not request.out[0].live:
            return []
        first = len(request.known)
        if not any(step.live for step in request.out[1:]):
            one.truth = one.truth[:first] + list(tokens)
        return [one.atom(first + index, token) for index, token in enumerate(tokens)]

    def sample(self, one: Live) -> int:
        """Follows a stem where it can, so that requests meet again."""
        for stem in self.stems:
            length = len(one.truth)
            if one.truth == stem[:length] != stem and self.random.random() < 0.8:
                return stem[length]
        return self.random.randint(1, 2)

    def check_content(self, one: Live) -> None:
        request = self.request(one)
        values = prefix_values(one.namespace, one.atoms(one.truth[: request.processed]))
        assert one.ctx.tokens.all.tolist() == one.truth[: len(request.known)]
        for pool, memory, row in zip(self.model.pools, self.memories, request.rows, strict=True):
            if not pool.has_blocks:
                self.check_states(one, pool, memory, row)
                continue
            kept = np.repeat(np.array(row) > 0, self.page_size)[: request.processed]
            cells = memory.read(row, request.processed)
            assert (cells == values)[kept].all(), "computed KV was overwritten"

    def check_states(self, one: Live, pool: Pool, memory: PageMemory, row: Sequence[int]) -> None:
        """Each state is that after its block, and the live one that after the newest token."""
        request = self.request(one)
        values = prefix_values(one.namespace, one.atoms(one.truth[: request.position]))
        for block, page in enumerate(row):
            if page and isinstance(pool.kind, Recurrent):
                end = min((block + 1) * self.page_size, request.position)
                assert memory.cells[page, 0] == values[end - 1], "a state was overwritten"


def config_of(kept: Retention) -> pk.RetentionConfig:
    """What the user writes for it."""
    ranges = []
    for start, end, (priority, limit) in kept.ranges:
        duration = None if limit is None or not limit.after_release else limit.seconds * 1000
        expires = None if limit is None or limit.after_release else limit.seconds
        ranges.append(pk.TokenRangeRetention(start, end, priority, duration, expires))
    priority, limit = kept.decode
    return pk.RetentionConfig(ranges, priority, None if limit is None else limit.seconds * 1000)
