"""Forwards that are computed twice: through every form of each group's tables, and densely.

The KV of a token is made from all tokens up to it and from what the encoder was given, so that attention is
right only if each page that is read holds what this very prefix left there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch

import pagekeeper as pk
from model.attention import LAYER, AnyTables, dense_attention, mask_arguments
from model.drawn import HEAD_DIM, Drawn, Input, Layers
from model.memory import prefix_values
from model.recurrence import States, advance, state_after
from model.windows import Everything, Kind
from pagekeeper.params import Scratch
from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import CrossTables, Form, StateTables

TOLERANCE = 1e-5
"""Of an element: pages, queries and scores are float32, dense attention is computed in float64."""


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
    given: Input | None = None
    """What its encoder was given."""
    launched: int = 0
    """Tokens whose KV is computed, by forwards out too."""
    out: list[Forward] = field(default_factory=list)
    encoded: dict[str | None, list[int]] = field(default_factory=dict)
    """Pages of each group that hold the KV of all of the encoder's tokens."""
    family: object = None
    """The request that it is a fork of, or itself."""

    def __post_init__(self) -> None:
        self.family = self.family or self.ctx.request_id

    @property
    def alive(self) -> list[Forward]:
        return [forward for forward in self.out if forward.alive]

    @property
    def encoder_length(self) -> int:
        return self.given.length if self.given else 0

    def atoms(self, end: int) -> list[int]:
        """What the KV of the first tokens depends on: each token, and the encoder's input."""
        number = self.given.number if self.given else 0
        return [token + 10 * number for token in self.tokens[:end]]

    def start_over(self, launched: int) -> None:
        """What is out is void, and the first so many tokens still have KV; without any nothing has."""
        for forward in self.out:
            forward.alive = False
        self.tokens = self.ctx.tokens.all.tolist()
        self.launched = launched
        if not launched:
            self.encoded.clear()


class Forwards(Drawn):
    """Computes the forwards that the cache has planned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scratch: dict[tuple[str, object], float] = {}
        """What each request left in the memory of each group to work in."""

    def compute(self, batch: Sequence[Live]) -> None:
        tables = self.tables(batch)
        self.check_positions(batch, tables)
        for group in self.groups:
            self.attend(group, batch, tables[group.name])
        for states in self.states:
            self.advance(states, batch, tables[states.name])
        for cross in self.cross:
            self.encode(cross, batch, tables[cross.name])
            self.attend_to_encoders(cross, batch, tables[cross.name])

    def break_off(self, batch: Sequence[Live]) -> bool:
        """Half of some pages is copied or zeroed when that fails. Gives whether there were any."""
        calls = itertools.count(self.random.choice([0, 1, 1]))

        def fails_in_the_end(carry_out: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
            def half(pages: np.ndarray) -> None:
                carry_out(pages[: len(pages) // 2])
                if next(calls) == 1:
                    raise OSError("the test says so")
                carry_out(pages)

            return half

        with ExitStack() as broken:
            for pool, verb in itertools.product(self.kv._pools, ["copy_pages", "fill_pages"]):
                broken.enter_context(patch.object(pool, verb, fails_in_the_end(getattr(pool, verb))))
            try:
                self.kv.runtime_inputs([[one.ctx for one in batch]])
            except OSError:
                self.counts["broken_off"] += 1
                return True
        return False

    def tables(self, batch: Sequence[Live]) -> dict[str | None, dict[str, Any]]:
        """Each group's tables in every form that its pages allow."""
        contexts, forms = [one.ctx for one in batch], list(get_args(Form))
        if self.page_size not in (2, 4, 8):  # TensorRT-LLM wants a power of two above 1
            forms.remove("tensorrt")
        self.random.shuffle(forms)
        tables: dict[str | None, dict[str, Any]] = {group.name: {} for group in self.every}
        for form in forms:
            inputs: Any = self.kv.runtime_inputs([contexts], form=form)
            for name in tables:
                of_group = inputs if name is None else inputs[name]
                tables[name][form] = (of_group.replicas or of_group.states or of_group.cross)[0]
        return tables

    def check_positions(self, batch: Sequence[Live], tables: dict[str | None, dict[str, Any]]) -> None:
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
                self.counts["hits_of_encoders"] += one.given is not None
                self.counts["hits_with_placeholders"] += any(
                    0 in self.row(one, group)[: past // self.page_size] for group in self.groups
                )
            one.launched = end

    def row(self, one: Live, group: Layers | States) -> list[int]:
        return self.kv.get_cache_indices(one.ctx, group.name)[0]

    # Attention

    def attend(self, group: Layers, batch: Sequence[Live], tables: dict[str, AnyTables]) -> None:
        layer_kv = self.kv.get_buffers(LAYER, group=group.name)
        counts = [one.ctx.active_length for one in batch]
        starts = [0, *itertools.accumulate(counts)]
        query, key, value, dense = [], [], [], []
        for one, count in zip(batch, counts, strict=True):
            prefixes = prefix_values(group.name, one.atoms(one.launched))
            keys, values = keys_and_values(group, prefixes)
            queries = random_vectors(prefixes[-count:], 3, group.heads)
            dense.append(dense_in_float64(queries, keys, values, group.kind))
            query.append(queries)
            key.append(keys[-count:])
            value.append(values[-count:])
        writer = self.random.choice(list(tables))
        values_too = None if group.latent else flat(value)
        write_kv(layer_kv, flat(key), values_too, tables[writer], query_start_loc=starts)
        for form, of_form in tables.items():
            output = paged_attention(
                flat(query),
                layer_kv,
                of_form,
                query_start_loc=starts,
                v_head_dim=group.latent,
                **mask_arguments(group.kind),
            )
            worst = np.abs(output.numpy() - np.concatenate(dense)).max()
            assert worst <= TOLERANCE, f"{group}, written by {writer}, read by {form}: {worst}"
            self.counts[f"{form} of latents" if group.latent else form] += 1

    def encode(self, group: Layers, batch: Sequence[Live], tables: dict[str, CrossTables]) -> None:
        """Encoders run for those who have no KV of theirs yet: with the first forward."""
        new = [one.given is not None and group.name not in one.encoded for one in batch]
        self.counts["encoded"] += sum(new)
        self.counts["encoded_before"] += sum(one.given is not None for one in batch) - sum(new)
        if not any(new):
            return
        first = [one for one, is_new in zip(batch, new, strict=True) if is_new]
        for one in first:
            one.encoded[group.name] = self.row(one, group)
        prefixes = np.concatenate([encoder_values(group, one) for one in first])
        key, value = map(torch.from_numpy, keys_and_values(group, prefixes))
        of_form = self.random.choice(list(tables.values()))
        written = replace(of_form, encoder_lens=np.where(new, of_form.encoder_lens, 0))
        layer_kv = self.kv.get_buffers(LAYER, group=group.name)
        write_kv(layer_kv, key, None if group.latent else value, written)

    def attend_to_encoders(
        self, group: Layers, batch: Sequence[Live], tables: dict[str, CrossTables]
    ) -> None:
        """Each new token attends to all of its encoder's tokens."""
        query, dense = [], []
        for one in batch:
            prefixes = prefix_values(group.name, one.atoms(one.launched))[-one.ctx.active_length :]
            query.append(random_vectors(prefixes, 3, group.heads))
            keys, values = keys_and_values(group, encoder_values(group, one))
            attended = dense_in_float64(query[-1], keys, values, Everything()) if one.given else 0
            dense.append(np.broadcast_to(attended, (*query[-1].shape[:2], values.shape[2])))
        layer_kv = self.kv.get_buffers(LAYER, group=group.name)
        for form, of_form in tables.items():
            assert of_form.encoder_lens.tolist() == [one.encoder_length for one in batch]
            output = paged_attention(flat(query), layer_kv, of_form, v_head_dim=group.latent)
            worst = np.abs(output.numpy() - np.concatenate(dense)).max()
            assert worst <= TOLERANCE, f"{group}, read by {form}: {worst}"
        rows = [tuple(self.row(one, group)) for one in batch if one.given]
        self.counts["encoded_shared"] += len(rows) - len(set(rows))

    # States

    def advance(self, group: States, batch: Sequence[Live], tables: dict[str, StateTables]) -> None:
        """Each request's state is that after all tokens before the forward; what it works in is its own."""
        pool, counts = self.pool_of(group), [one.ctx.active_length for one in batch]
        for of_form in tables.values():
            assert of_form.query_start_loc.tolist() == [0, *itertools.accumulate(counts)]
            assert len({*of_form.indices.tolist()} - {0}) == len(batch)
        for one, count, page in zip(batch, counts, of_form.indices.tolist(), strict=True):
            past = one.launched - count
            if isinstance(group.kind, Scratch):
                mark = self.scratch.get((group.name, one.ctx.request_id), 0.0)
                assert pool[page].tolist() in ([mark] * group.values, [0.0] * group.values)
                pool[page] = self.scratch[group.name, one.ctx.request_id] = self.random.random()
                self.scratch[group.name, one.ctx.request_id] = pool[page, 0].item()
                self.counts["scratch"] += 1
                continue
            atoms = one.atoms(one.launched)
            assert pool[page, :3].tolist() == state_after(atoms[:past]).tolist(), f"{group}, at {past}"
            assert not pool[page, 3:].any()
            pool[page, :3] = advance(pool[page, :3], atoms[past:])
            self.counts["states"] += 1


def encoder_values(group: Layers, one: Live) -> np.ndarray:
    """What the KV of each of an encoder's tokens depends on."""
    number = one.given.number if one.given else 0
    return prefix_values((group.name, number), range(one.encoder_length))


def keys_and_values(group: Layers, prefixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of tokens with these prefixes: [len(prefixes), KV heads, elements]."""
    keys = random_vectors(prefixes, 1, group.kv_heads)
    return keys, keys[..., : group.latent] if group.latent else random_vectors(prefixes, 2, group.kv_heads)


def random_vectors(prefixes: np.ndarray, field: int, heads: int) -> np.ndarray:
    """Numbers from -2 to 2 that depend on the prefix: float32 [len(prefixes), heads, HEAD_DIM]."""
    lanes = np.arange(1, heads * HEAD_DIM + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + field)
    mixed = prefixes.astype(np.uint64)[:, None] ^ lanes
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    unit = (mixed >> np.uint64(11)).astype(np.float64) / 2**53
    return (4 * unit - 2).astype(np.float32).reshape(len(prefixes), heads, HEAD_DIM)


def dense_in_float64(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kind: Kind | Everything
) -> np.ndarray:
    query, key, value = (part.astype(np.float64) for part in (query, key, value))
    return dense_attention(query, key, value, kind)


def flat(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """Those of all requests, in batch order."""
    return torch.from_numpy(np.concatenate(parts))
