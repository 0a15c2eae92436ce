"""Events of a random session, and what whoever hears them makes of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pagekeeper as pk
from model.events import Cleared, Event, Removed, Stored, Updated
from model.pool import Content
from model.stage import NAMESPACES, Stage
from model.windows import needed_blocks
from pagekeeper import events


class Watching(Stage):
    """Hears the cache, and knows from that alone what it holds."""

    def __init__(self, seed: int, **options: bool) -> None:
        super().__init__(seed, **options)
        self.index = events.BlockIndex()
        self.priorities: list[dict[int, int]] = [{} for _ in self.groups]
        """Of each block that the events tell of, by group."""
        self.hashes: dict[Content, int] = {}
        """Of blocks, by the functions for those who are not the manager."""

    def hear(self) -> None:
        """Takes the events of the last call, or, where some are lost, a snapshot."""
        metrics = self.kv.metrics()
        size = self.params.event_buffer_max_size
        expected = self.model.told.take()
        if not size:
            assert metrics["events_recorded"] == 0
            assert self.kv.get_latest_events() == []
            return
        assert metrics["events_recorded"] == self.model.told.count
        heard = self.kv.get_latest_events()
        first = self.index.last_event_id + 1
        if self.index.apply(heard):
            assert [event.id for event in heard] == list(range(first, self.model.told.count))
            self.check_events([event for event in heard if not isinstance(event, events.Created)], expected)
        else:
            assert len(heard) == size
            snapshot = self.kv.event_snapshot()
            self.index.apply_snapshot(snapshot)
            for known in self.priorities:
                known.clear()
            heard = list(snapshot.events)
        self.note_priorities(heard)
        self.check_index()

    def check_events(self, heard: Sequence[events.Event], expected: Sequence[Event]) -> None:
        """What is stored and what goes, in order; and what changes, in order."""
        kinds = (events.Stored, events.Removed, events.Cleared), (events.Updated,)
        modelled = (Stored, Removed, Cleared), (Updated,)
        for found, told in zip(kinds, modelled, strict=True):
            given = [event for event in heard if isinstance(event, found)]
            wanted = [event for event in expected if isinstance(event, told)]
            assert len(given) == len(wanted), f"{given} for {wanted}"
            for one, other in zip(given, wanted, strict=True):
                self.check_event(one, other)

    def check_event(self, event: events.Event, expected: Event) -> None:
        assert event.group == expected.group
        match event, expected:
            case events.Stored(), Stored(_, above, blocks, priority):
                namespace, tokens = blocks[0]
                before = tokens[: -self.page_size]
                parent = None if above is None else self.hash_of(above)
                assert event.hashes == tuple(map(self.hash_of, blocks))
                assert (event.parent_hash, event.priority) == (parent, priority)
                assert event.first_block * self.page_size == len(before)
                assert event.token_ids.tolist() == [plain(atom) for atom in blocks[-1][1][len(before) :]]
                assert isinstance(namespace, int)
                assert event.lora_id == NAMESPACES[namespace].get("lora_id")
            case events.Removed(), Removed(_, blocks):
                assert event.hashes == tuple(map(self.hash_of, blocks))
            case events.Updated(), Updated(_, block, old, new):
                assert (event.block_hash, event.priority) == (self.hash_of(block), (old, new))
            case _:
                assert isinstance(event, events.Cleared) == isinstance(expected, Cleared)

    def note_priorities(self, heard: Sequence[events.Event]) -> None:
        for event in heard:
            known = self.priorities[event.group]
            match event:
                case events.Stored():
                    assert known.keys().isdisjoint(event.hashes)
                    known.update(dict.fromkeys(event.hashes, event.priority))
                case events.Removed():
                    for block in event.hashes:
                        del known[block]
                case events.Updated(priority=(old, new)):
                    assert known[event.block_hash] == old
                    known[event.block_hash] = new
                case events.Cleared():
                    known.clear()

    def check_index(self) -> None:
        """The index knows what each group has, and the events of which priority it is."""
        for group, (pool, priorities) in enumerate(zip(self.model.pools, self.priorities, strict=True)):
            tree = self.model.blocks_in(pool)
            known = {self.hash_of(content): pool.priority[page] for content, page in tree.items()}
            assert self.index.hashes(group) == known.keys()
            assert priorities == known
        assert self.index.last_event_id == self.model.told.count - 1

    def check_answers(self) -> None:
        """The index finds of a prompt what the manager finds.

        It may find less where no group needs the last block, as of a chunk that ends there: no event tells
        which blocks the manager remembers that no group has.
        """
        if self.params.event_buffer_max_size and self.tier is None:
            namespace, tokens, keys = self.prefix()
            whole = len(tokens) // self.page_size
            prefix = [
                self.hash_of((namespace, tuple(tokens[: (block + 1) * self.page_size])))
                for block in range((len(tokens) - 1) // self.page_size)
            ]
            assert len(prefix) <= whole
            found = self.kv.probe_prefix_match_length(tokens, **keys)
            known = self.index.match_length(prefix) * self.page_size
            blocks, kinds = found // self.page_size, [group.kind for group in self.groups]
            needs_last = any(blocks - 1 in needed_blocks(kind, found, self.page_size) for kind in kinds)
            assert known == found or (known < found and not needs_last)

    def hash_of(self, content: Content) -> int:
        """The number that events have for a block."""
        if content not in self.hashes:
            namespace, atoms = content
            assert isinstance(namespace, int)
            keys = dict(NAMESPACES[namespace])
            if "cache_salt" in keys:
                keys["salt"] = keys.pop("cache_salt")
            tokens: list[Any] = [plain(atom) for atom in atoms]
            items: list[tuple[bytes, int, int]] = []
            for place, atom in enumerate(cast(tuple[object, ...], atoms)):
                if isinstance(atom, tuple):
                    _, kind, offset, length = cast(tuple[int, int, int, int], atom)
                    items = [(bytes([kind]) * 32, place - offset, length)]
                    tokens += [0] * (place - offset + length - len(tokens))
                    break
            hashing = partial(pk.hash_blocks, algo=self.params.kv_hash_algo, seed=self.kv.hash_seed)
            hashes = hashing(tokens, self.page_size, mm_items=items, **keys)
            self.hashes[content] = events.block_key(hashes[len(atoms) // self.page_size - 1])
        return self.hashes[content]


def plain(atom: object) -> object:
    """The token of an atom."""
    return atom[0] if isinstance(atom, tuple) else atom
