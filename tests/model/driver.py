"""Drives the manager and the reference model with the same random calls and compares them after each.

A session is one seed: the pool's size, the requests and every call follow from it.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.ledger import Ledger, NeverRoom, NoRoom, Request
from model.live import Live
from model.memory import PageMemory, prefix_values
from model.misuse import wrong_calls
from model.tables import expected_tables

NAMESPACES: tuple[dict[str, Any], ...] = (
    {},
    {"cache_salt": "a"},
    {"lora_id": "a"},
    {"lora_id": "a", "lora_generation": 1},
    {"lora_id": 1},
)
MAX_BATCH = 5


class Session:
    """One random sequence of calls."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose: Any = self.random.choice
        self.page_size = choose([1, 2, 3, 4, 16])
        pages = self.random.randint(3, 16 if self.page_size < 16 else 8)
        policy = choose(["adopt", "private"])
        chunk = choose([None, None, 1, 3, 7, 20])
        reserve = choose(["chunk", "chunk", "prompt"])
        caching = self.random.random() < 0.95
        self.trace = [
            f"page_size={self.page_size} pages={pages} on_duplicate={policy} max_num_input_tokens={chunk} "
            f"reserve={reserve} enable_prefix_caching={caching}"
        ]
        params = pk.MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=8,
            num_layers=1,
            page_size=self.page_size,
            devices=["cpu"],
            enable_prefix_caching=caching,
            on_duplicate=policy,
            kv_hash_algo=choose(["ahash64", "sha256", "sha256_64"]),
            kv_hash_seed="5a" * 32,
        )
        self.kv = pk.PagedKVCacheManager(
            params=params,
            total_num_pages=pages,
            max_batch_size=MAX_BATCH,
            max_num_input_tokens=chunk,
            reserve=reserve,
            allocate_pools=False,
        )
        self.model = Ledger(
            self.page_size, pages, on_duplicate=policy, caching=caching, chunk=chunk, reserve=reserve
        )
        self.memory = PageMemory(pages, self.page_size)
        self.live: list[Live] = []
        self.gone: list[tuple[Any, int]] = []
        """Released contexts with the slots they had."""
        longest = min(pages * self.page_size, 70) * 3 // 4
        self.copied: dict[int, np.ndarray[Any, Any]] = {}
        """The computed cells of each copy in flight, as they were when it began."""
        self.stems: list[list[int]] = [[choose([1, 2]) for _ in range(longest)] for _ in range(2)]

    def run(self, calls: int) -> None:
        verbs: list[tuple[int, Callable[[], None]]] = [
            (5, self.claim),
            (14, self.alloc),
            (14, self.step),
            (3, self.release),
            (1, self.preempt),
            (2, self.truncate),
            (1, self.look),
            (1, self.commit),
            (1, self.open_step),
            (1, self.start_copy),
            (1, self.end_copy),
            (4, self.misuse),
        ]
        if self.random.random() < 0.3:
            verbs.append((1, self.reset))
        weights, actions = zip(*verbs, strict=True)
        for _ in range(calls):
            self.random.choices(actions, weights)[0]()
            self.compare()
        self.release_all()

    # Calls that should work, or fail for want of room

    def claim(self) -> None:
        if len(self.live) > MAX_BATCH:
            return
        namespace = self.random.choices(range(len(NAMESPACES)), [12, 1, 1, 1, 1])[0]
        tokens = self.prompt()
        image = None
        if self.random.random() < 0.1:
            start = self.random.randrange(len(tokens))
            image = self.random.randint(1, 2), start, min(self.random.randint(1, 5), len(tokens) - start)
        no_read, no_store = self.random.random() < 0.08, self.random.random() < 0.08
        options = f"{NAMESPACES[namespace]} {image=} {no_read=} {no_store=}"
        self.note(f"claim #{len(self.live)} {options} {tokens}")
        items = [(bytes([image[0]]) * 32, image[1], image[2])] if image else []
        ctx = pk.TextContext(
            request_id=pk.RequestID(),
            max_length=1000,
            tokens=pk.TokenBuffer(np.array(tokens)),
            mm_items=items,
            no_read=no_read,
            no_store=no_store,
            **NAMESPACES[namespace],
        )
        live = Live(ctx, namespace, image, tokens)
        slot = self.kv.claim(ctx)
        assert slot == ctx.slot
        self.model.claim(ctx.request_id, live.atoms(tokens), namespace, no_read=no_read, no_store=no_store)
        self.live.append(live)

    def alloc(self) -> None:
        batch = self.pick(self.can_plan)
        if not batch:
            return
        names = [one.ctx.request_id for one in batch]
        bounds: list[int | None] = [None] * len(batch)
        given: Any = None
        if self.random.random() < 0.5:
            bounds = [self.random.randint(1, 9) for _ in batch]
            given = list(bounds)
            if len(batch) == 1 or self.random.random() < 0.3:
                given, bounds = bounds[0], bounds[:1] * len(batch)
        self.note(f"alloc {self.places(batch)} num_tokens={given}")
        refusal = self.model_refuses(names, bounds)
        if refusal is None:
            self.kv.alloc(self.form(batch), num_tokens=given)
            self.copy_pages()
            self.forward(batch)
            return
        error = pk.RequestTooLargeError if isinstance(refusal, NeverRoom) else pk.InsufficientBlocksError
        caught = self.refused(error, lambda: self.kv.alloc(self.form(batch), num_tokens=given))
        assert (type(caught), caught.request_id) == (error, refusal.name)
        self.make_room(refusal)

    def model_refuses(self, names: Sequence[object], bounds: Sequence[int | None]) -> NoRoom | None:
        try:
            self.model.alloc(names, bounds)
        except NoRoom as refusal:
            return refusal
        return None

    def make_room(self, refusal: NoRoom) -> None:
        """What an engine does after a refusal: it rejects, or ends or preempts others, or waits a step."""
        if isinstance(refusal, NeverRoom):
            self.release([one for one in self.live if one.ctx.request_id == refusal.name])
        else:
            self.random.choice([self.release, self.preempt, self.open_step])()

    def step(self) -> None:
        batch = self.pick(lambda one: bool(one.sampled))
        if not batch:
            return
        results = [self.results(one) for one in batch]
        names = [one.ctx.request_id for one in batch]
        self.note(f"step {self.places(batch)} new_tokens={results}")
        atoms = [self.deliver(one, tokens) for one, tokens in zip(batch, results, strict=True)]
        self.model.step(names, atoms)
        flat = [token for tokens in results for token in tokens]
        counts = [len(tokens) for tokens in results]
        if not flat and self.random.random() < 0.5:
            self.kv.step(self.form(batch))
        elif set(counts) == {1} and self.random.random() < 0.5:
            self.kv.step(self.form(batch), new_tokens=flat)
        elif len(batch) == 1 and atoms[0] and self.random.random() < 0.3:
            for token in flat:
                batch[0].ctx.update(token)
            self.kv.step(self.form(batch))
        else:
            self.kv.step(self.form(batch), new_tokens=np.array(flat, np.int32), counts=np.array(counts))

    def release(self, batch: Sequence[Live] | None = None) -> None:
        batch = batch or self.pick(lambda one: True, most=2)
        if not batch:
            return
        self.note(f"release {self.places(batch)}")
        for one in batch:
            self.check_content(one)
        slots = [one.ctx.slot for one in batch]
        self.model.release([one.ctx.request_id for one in batch])
        self.kv.release(self.form(batch))
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

    def reset(self) -> None:
        self.note("reset_prefix_cache")
        self.model.reset()
        self.kv.reset_prefix_cache()

    def commit(self) -> None:
        for one in self.pick(lambda one: True, most=1):
            self.note(f"commit_and_get_block_hashes {self.places([one])}")
            self.model.publish(one.ctx.request_id)
            hashes = self.kv.commit_and_get_block_hashes(one.ctx)
            known = len(self.request(one).known)
            assert len(hashes) == known // self.page_size
            assert len(set(hashes)) == len(hashes)

    def open_step(self) -> None:
        self.note("begin_step")
        self.model.open_step()
        self.kv.begin_step()

    def start_copy(self) -> None:
        """A mover, late on purpose, begins to read blocks that are computed, the last perhaps in part."""
        for one in self.pick(lambda one: self.request(one).processed > 0, most=1):
            request = self.request(one)
            blocks = -(-request.processed // self.page_size)
            first = self.random.randrange(blocks)
            count = self.random.randint(1, blocks - first)
            copy, pages, _ = self.kv._core.start_copy(one.ctx, first, count)
            self.note(f"copy {copy} of {self.places([one])}, blocks {first} to {first + count}")
            assert pages == request.row[first : first + count]
            self.model.start_copy(copy, pages)
            self.copied[copy] = self.memory.read(pages, request.processed - first * self.page_size)

    def end_copy(self) -> None:
        """What the mover read last is what was there when it began: nobody wrote there meanwhile."""
        if not self.copied:
            return
        copy = self.random.choice(list(self.copied))
        self.note(f"end of copy {copy}")
        seen = self.copied.pop(copy)
        assert (self.memory.read(self.model.copies[copy], len(seen)) == seen).all()
        self.model.finish_copy(copy)
        assert self.kv.poll_transfers(completions=[copy]) == []

    # Calls that only look

    def look(self) -> None:
        """The router's probe and the scheduler's summary answer like the model, and change nothing."""
        tokens, namespace = self.prompt(), self.random.randrange(len(NAMESPACES))
        keys = dict(NAMESPACES[namespace])
        if "cache_salt" in keys:
            keys["salt"] = keys.pop("cache_salt")
        self.note(f"probe {keys} {tokens}")
        before = self.kv.fingerprint()
        hits = self.model.match(namespace, tokens) if self.model.caching else []
        assert self.kv.probe_prefix_match_length(tokens, **keys) == len(hits) * self.page_size
        self.kv.analyze_prefix_reuse(tokens, **keys)
        self.kv.metrics()
        self.kv.debug_dump()
        for one in self.live:
            self.kv.get_cache_indices(one.ctx)
        assert self.kv.fingerprint() == before

    # Calls that must be refused

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

    def refused(self, error: type[Exception], call: Callable[[], object]) -> Any:
        """The call fails with `error` and leaves everything as it was."""
        before = self.kv.fingerprint()
        with pytest.raises(error) as caught:
            call()
        assert self.kv.fingerprint() == before, f"a refused call changed the ledger: {caught.value}"
        return caught.value

    # The engine's part

    def forward(self, batch: Sequence[Live]) -> None:
        """Reads every cell the tables allow, then writes the new ones and samples where the prompt ends."""
        self.check_tables(batch)
        for one in batch:
            request = self.request(one)
            step = request.out[-1]
            assert one.ctx.active_length == step.active
            start, end = step.start, step.end
            values = prefix_values(one.namespace, one.atoms(one.truth[:end]))
            assert len(values) == end
            assert (self.memory.read(request.row, start) == values[:start]).all(), "a hit reads foreign KV"
            written = request.row[start // self.page_size : -(-end // self.page_size)]
            assert all(self.model.is_writable(page) for page in written), "a forward writes to a shared page"
            self.memory.write(request.row, start, values[start:])
            if end < len(one.truth):
                one.sampled.append(None)
            else:
                token = self.sample(one)
                one.sampled.append(token)
                one.truth.append(token)

    def copy_pages(self) -> None:
        copies = self.kv.take_page_copies().tolist()
        assert copies == self.model.page_copies
        for source, destination in copies:
            self.memory.cells[destination] = self.memory.cells[source]
        self.model.page_copies.clear()

    def check_tables(self, batch: Sequence[Live]) -> None:
        form: Any = self.random.choice(["max", "vllm", "flashinfer", None])
        if form is None:
            return
        tables: Any = self.kv.runtime_inputs([self.form(batch, single=False)], form=form)[0]
        self.model.close_step()
        requests = [self.request(one) for one in batch]
        expected = expected_tables(
            form,
            [request.row for request in requests],
            [(request.out[-1].start, request.out[-1].end) for request in requests],
            self.page_size,
            self.model.pages,
        )
        for name, value in expected.items():
            found = getattr(tables, name)
            assert (found if isinstance(found, int) else found.tolist()) == value, name

    def results(self, one: Live) -> list[int]:
        """What the engine reports for the oldest step: the sampled token, at times none or several."""
        token = one.sampled[0]
        if token is None:
            return []
        if len(one.sampled) > 1 or self.random.random() < 0.8:
            return [token]
        return [] if self.random.random() < 0.3 else [token, *self.random.choices([1, 2], k=2)]

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

    def prompt(self) -> list[int]:
        stem = self.random.choice(self.stems)
        cut = self.random.choice([len(stem), self.random.randint(0, len(stem))])
        tail = self.random.choices([1, 2], k=self.random.choice([0, 1, 3, self.page_size]))
        return (stem[:cut] + tail) or [1]

    # Comparing

    def compare(self) -> None:
        self.kv.verify()
        count = self.kv.block_count()
        assert (count.free, count.total) == (self.model.free, self.model.pages)
        metrics = self.kv.metrics()
        assert metrics["reused_tokens"] + metrics["late_reused_tokens"] == self.model.hit_tokens
        assert (metrics["evictions"], metrics["cached_blocks"]) == (
            self.model.evictions,
            len(self.model.tree),
        )
        for one in self.live:
            request = self.request(one)
            ctx = one.ctx
            lengths = (ctx.processed_length, ctx.cached_prefix_length, len(ctx))
            where = f"request {self.places([one])}"
            assert self.kv.get_cache_indices(ctx) == [request.row], where
            assert lengths == (request.processed, request.cached, len(request.known)), where
        if self.live:
            self.check_content(self.random.choice(self.live))

    def check_content(self, one: Live) -> None:
        request = self.request(one)
        values = prefix_values(one.namespace, one.atoms(one.truth[: request.processed]))
        assert one.ctx.tokens.all.tolist() == one.truth[: len(request.known)]
        cells = self.memory.read(request.row, request.processed)
        assert (cells == values).all(), "computed KV was overwritten"

    def release_all(self) -> None:
        self.kv.release([one.ctx for one in self.live])
        self.model.release([one.ctx.request_id for one in self.live])
        self.live = []
        while self.copied:
            self.end_copy()
        self.compare()
        assert self.kv.block_count().free == self.model.pages

    # Helpers

    def request(self, one: Live) -> Request:
        return self.model.requests[one.ctx.request_id]

    def can_plan(self, one: Live) -> bool:
        request = self.request(one)
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

    def note(self, line: str) -> None:
        self.trace.append(line)
