"""Events and the index that is built from them alone (EVT-0 to EVT-3, EVT-6); why look-ups missed (MET-3)."""

import dataclasses
import itertools
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, hit, manager, prefilled, store
from pagekeeper.events import (
    BlockIndex,
    Cleared,
    Created,
    Event,
    EventSnapshot,
    Removed,
    Stored,
    block_key,
)
from pagekeeper.params import FullAttention


def telling(pages: int = 8, size: int = 1000, **options: Any) -> pk.PagedKVCacheManager:
    return manager(pages, event_buffer_max_size=size, **options)


def keys(tokens: Any, **options: Any) -> tuple[int, ...]:
    """The hashes of the prompt's full blocks of 4 tokens, as events have them."""
    return tuple(map(block_key, pk.hash_blocks(list(tokens), 4, **options)))


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def event(number: int, kind: type[Any] = Removed, *fields: Any) -> Any:
    return kind(number, 0, 0, None, *(fields or ((),)))


# What events say.


def test_the_first_event_tells_what_was_made() -> None:
    assert telling(pages=8, page_size=4).get_latest_events() == [
        Created(0, 0, 0, None, 4, (8,), FullAttention())
    ]


def test_a_stored_event_has_what_the_call_published() -> None:
    kv = telling()
    store(kv, range(11), lora_id=7, cache_salt="a secret")
    stored = kv.get_latest_events()[1]
    assert stored == Stored(
        id=1,
        dp_rank=0,
        group=0,
        window=None,
        parent_hash=None,
        first_block=0,
        hashes=keys(range(8), lora_id=7, salt="a secret"),
        token_ids=np.arange(8, dtype=np.int32),
        extra_keys=(),
        priority=35,
        tier=0,
        lora_id=7,
    )
    assert stored.token_ids.tolist() == list(range(8))
    assert stored.page_size == 4
    assert "a secret" not in repr(stored)


def told_of_storing(kv: pk.PagedKVCacheManager) -> Stored:
    """The event after the first one."""
    _, event = kv.get_latest_events()[:2]
    assert isinstance(event, Stored)
    return event


def test_tokens_of_an_event_are_int32_and_read_only() -> None:
    kv = telling()
    store(kv, range(4))
    tokens = told_of_storing(kv).token_ids
    assert tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_the_name_of_an_adapter_is_told_as_it_was_given() -> None:
    kv = telling()
    store(kv, range(4), lora_id="rhyme")
    assert told_of_storing(kv).lora_id == "rhyme"


def test_extra_keys_come_with_the_blocks_that_have_some() -> None:
    kv = telling()
    store(kv, range(12), mm_items=[(bytes(32), 5, 2)])
    ((block, content),) = told_of_storing(kv).extra_keys
    # Tag 1, length 48; 1 token into the block, 2 tokens, and the hash of the content.
    assert (block, content[-48:]) == (1, b"\x01" + bytes(7) + b"\x02" + bytes(7) + bytes(32))


def test_the_hash_of_a_sha256_block_is_the_first_8_bytes_of_it() -> None:
    kv = telling(kv_hash_algo="sha256", kv_hash_seed="00" * 32)
    ctx = prefilled(kv, range(4))
    (canonical,) = kv.commit_and_get_block_hashes(ctx)
    assert told_of_storing(kv).hashes == (int.from_bytes(canonical[:8], "big"),)


def test_each_chunk_of_a_prompt_is_an_event_behind_the_last() -> None:
    kv = telling()
    ctx = claimed(kv, range(12))
    compute(kv, ctx, num_tokens=8)
    compute(kv, ctx)
    _, first, second = kv.get_latest_events()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (second.parent_hash, second.first_block) == (first.hashes[-1], 2)


def test_a_block_that_is_hit_or_not_stored_is_no_event() -> None:
    kv = telling()
    store(kv, range(9))
    kv.get_latest_events()
    prefilled(kv, range(9))
    prefilled(kv, range(8))  # computes its last block again, which is stored already
    store(kv, range(50, 54), no_store=True)
    assert kv.get_latest_events() == []


def test_events_are_values() -> None:
    kv = telling()
    store(kv, range(4))
    events = kv.get_latest_events()
    copies = pickle.loads(pickle.dumps(events))
    assert copies == events
    assert len({*copies, *events}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].id = 5  # type: ignore[misc]


# Order, gaps, and what a full buffer does.


def test_ids_have_no_gaps_over_many_calls() -> None:
    kv = telling(pages=3)
    taken = []
    for first in range(0, 200, 10):
        store(kv, range(first, first + 9))
        taken += kv.get_latest_events()
    kv.reset_prefix_cache()
    taken += kv.get_latest_events()
    assert [event.id for event in taken] == list(range(len(taken)))
    assert kinds(taken)[-1] == "Cleared"


def test_a_full_buffer_drops_the_oldest_and_counts_it() -> None:
    kv = telling(size=2)
    for first in (0, 10, 20):
        store(kv, range(first, first + 4))
    events = kv.get_latest_events()
    assert [event.id for event in events] == [2, 3]
    metrics = kv.metrics()
    assert (metrics["events_recorded"], metrics["events_dropped"]) == (4, 2)


def test_a_cache_without_a_buffer_tells_nothing() -> None:
    kv = manager()
    store(kv, range(8))
    assert kv.get_latest_events() == []
    assert kv.metrics()["events_recorded"] == 0


def test_a_wait_for_events_that_never_come_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeout=30: events are off; set event_buffer_max_size"):
        manager().get_latest_events(timeout=30)


def test_a_snapshot_works_without_a_buffer() -> None:
    kv = manager()
    store(kv, range(8))
    index = BlockIndex()
    index.apply_snapshot(kv.event_snapshot())
    assert (index.last_event_id, index.match_length(keys(range(8)))) == (-1, 2)


@pytest.mark.parametrize("size", [-1, 2**31, 1.5, True, None])
def test_a_buffer_size_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"event_buffer_max_size=.*whole number from 0"):
        telling(size=size)


# Waiting.


def test_a_wait_ends_with_the_event_that_it_waits_for() -> None:
    kv = telling()
    kv.get_latest_events()
    took: list[Any] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        start = time.monotonic()
        took.append(kv.get_latest_events(timeout=60))
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    store(kv, range(4))  # nobody holds the ledger or the GIL meanwhile
    thread.join(timeout=60)
    events, seconds = took
    assert kinds(events) == ["Stored"]
    assert seconds < 30


def test_a_wait_ends_when_its_time_is_over() -> None:
    kv = telling()
    kv.get_latest_events()
    start = time.monotonic()
    assert kv.get_latest_events(timeout=0.12) == []
    assert time.monotonic() - start >= 0.12


def test_two_threads_that_wait_share_the_events() -> None:
    kv = telling()
    kv.get_latest_events()
    took: list[list[Event]] = []
    threads = [
        threading.Thread(target=lambda: took.append(kv.get_latest_events(timeout=60))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    number = 0
    while any(thread.is_alive() for thread in threads):
        number += 1
        store(kv, [number] * 4)
        time.sleep(0.01)
    taken = [event.id for events in took for event in events]
    assert len(took) == 2
    assert len(taken) == len(set(taken))


def test_a_wait_can_be_interrupted() -> None:
    program = """
import sys
sys.path.insert(0, "tests")
from model.engine import manager
kv = manager(event_buffer_max_size=1)
kv.get_latest_events()
print("waiting", flush=True)
try:
    kv.get_latest_events(timeout=float("inf"))
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"


@pytest.mark.parametrize("timeout", [-1, float("nan"), -float("inf")])
def test_a_timeout_below_zero_is_refused(timeout: float) -> None:
    kv = telling()
    with pytest.raises(ValueError, match="timeout"):
        kv.get_latest_events(timeout)
    assert kinds(kv.get_latest_events()) == ["Created"]


# The index.


def test_an_event_that_comes_twice_is_applied_once() -> None:
    index = BlockIndex()
    stored = event(0, Stored, None, 0, (5,), np.zeros(4, np.int32), (), 35, 0, None)
    assert index.apply([stored, event(1, Removed, (5,)), stored])
    assert (index.hashes(), index.last_event_id) == (frozenset(), 1)


def test_events_behind_a_gap_wait_for_a_snapshot() -> None:
    # Events 0 to 100; 40 to 50 are lost, a snapshot at 100 closes the gap, and 101 comes three times.
    index = BlockIndex()
    assert index.apply(event(number, Removed, (number,)) for number in range(40))
    assert not index.apply(event(number, Removed, (number,)) for number in range(51, 101))
    assert index.last_event_id == 39
    held = event(100, Stored, None, 0, (7, 8), np.zeros(8, np.int32), (), 35, 0, None)
    index.apply_snapshot(EventSnapshot(100, (event(100, Created, 4, (8,), FullAttention()), held)))
    assert index.last_event_id == 100
    assert index.apply([event(101, Removed, (7,))] * 3)
    assert (index.last_event_id, set(index.hashes())) == (101, {8})


def test_what_is_no_event_is_refused_and_what_came_before_it_holds() -> None:
    index = BlockIndex()
    for wrong in ("Removed", None, (0, 1)):
        with pytest.raises(TypeError, match=f"events: got {type(wrong).__name__}"):
            index.apply([event(index.last_event_id + 1, Removed, (1,)), wrong])  # type: ignore[list-item]
    assert index.last_event_id == 2
    with pytest.raises(TypeError, match="snapshot: got list"):
        index.apply_snapshot([])  # type: ignore[arg-type]


def test_a_snapshot_older_than_the_index_changes_nothing() -> None:
    index = BlockIndex()
    old = EventSnapshot(0, (event(0, Created, 4, (8,), FullAttention()),))
    stored = event(1, Stored, None, 0, (5,), np.zeros(4, np.int32), (), 35, 0, None)
    assert index.apply([event(0, Created, 4, (8,), FullAttention()), stored])
    index.apply_snapshot(old)
    assert (index.last_event_id, set(index.hashes())) == (1, {5})


def test_a_subscriber_that_joins_late_has_snapshot_and_tail() -> None:
    kv = telling(pages=6, size=4)
    for first in range(0, 1000, 10):
        store(kv, range(first, first + 9))
    late = BlockIndex()
    assert not late.apply(kv.get_latest_events())
    late.apply_snapshot(kv.event_snapshot())
    store(kv, range(2000, 2009))
    assert late.apply(kv.get_latest_events())
    assert len(late) == kv.metrics()["cached_blocks"]
    assert late.match_length(keys(range(2000, 2008))) == 2


def test_a_match_ends_at_the_first_block_that_is_not_there() -> None:
    index = BlockIndex()
    index.apply([event(0, Stored, None, 0, (1, 2, 4), np.zeros(12, np.int32), (), 35, 0, None)])
    assert index.match_length([1, 2, 3, 4]) == 2
    assert index.match_length([(number).to_bytes(8, "big") + bytes(24) for number in (1, 2)]) == 2


def test_bytes_that_are_no_hash_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes given, must be 8 or 32"):
        BlockIndex().match_length([bytes(7)])


def test_salts_keep_tenants_apart_in_the_index_as_in_the_cache() -> None:
    kv = telling()
    for tenant in ("a", "b"):
        store(kv, range(5), cache_salt=tenant)
    index = BlockIndex()
    index.apply(kv.get_latest_events())
    assert len(index) == 2
    salts: list[str | None] = ["a", "b", "c", None]
    for salt in salts:
        assert index.match_length(keys(range(4), salt=salt)) * 4 == hit(kv, range(5), salt=salt)


def test_a_block_that_two_requests_computed_is_removed_once_when_it_is_gone() -> None:
    kv = telling(pages=6, on_duplicate="private")
    twins = [claimed(kv, range(9)) for _ in range(2)]
    compute(kv, *twins)
    index = BlockIndex()
    index.apply(kv.get_latest_events())
    kv.release(twins[1])  # the copy that was never shared
    assert kv.get_latest_events() == []
    kv.release(twins[0])
    claimed_all = claimed(kv, range(100, 124))
    kv.alloc(claimed_all)
    events = kv.get_latest_events()
    (removed,) = events
    assert isinstance(removed, Removed)
    assert sorted(removed.hashes) == sorted(keys(range(8)))
    index.apply(events)
    assert index.hashes() == frozenset()


def test_a_reset_empties_the_index() -> None:
    kv = telling()
    store(kv, range(9))
    kv.reset_prefix_cache()
    events = kv.get_latest_events()
    index = BlockIndex()
    index.apply(events)
    assert isinstance(events[-1], Cleared)
    assert len(index) == 0


# Random calls: the index answers like the manager after each.

NAMESPACES: list[dict[str, Any]] = [{}, {"salt": "a"}, {"lora_id": "x"}, {"salt": "a", "lora_id": 1}]
PAGE = 2


class Router:
    """A small manager under random calls, and an index that knows of it by events alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kv = manager(
            pages=self.random.randint(3, 12),
            page_size=PAGE,
            on_duplicate=self.random.choice(["adopt", "private"]),
            event_buffer_max_size=self.random.choice([1, 2, 3, 1000]),
        )
        self.index = BlockIndex()
        self.live: list[pk.TextContext] = []
        self.snapshots = 0

    def prompt(self) -> list[int]:
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, 9))]

    def call(self) -> None:
        choice = self.random.random()
        if choice < 0.35 or not self.live:
            options = dict(self.random.choice(NAMESPACES))
            if "salt" in options:
                options["cache_salt"] = options.pop("salt")
            self.live.append(claimed(self.kv, self.prompt(), **options))
        elif choice < 0.7:
            batch = self.random.sample(self.live, self.random.randint(1, len(self.live)))
            ready = [ctx for ctx in batch if ctx.processed_length < len(ctx)]
            try:
                self.kv.alloc(ready)
            except pk.InsufficientBlocksError:
                self.kv.preempt(batch)
            except pk.RequestTooLargeError:
                self.kv.release(batch)
                self.live = [ctx for ctx in self.live if ctx not in batch]
            else:
                self.kv.step(ready, new_tokens=[self.random.randint(0, 1) for _ in ready])
        elif choice < 0.9:
            self.kv.release(self.live.pop(self.random.randrange(len(self.live))))
        elif choice < 0.96:
            ctx = self.random.choice(self.live)
            ctx.truncate(self.random.randint(1, len(ctx)))
        else:
            self.kv.reset_prefix_cache()

    def check(self) -> None:
        if not self.index.apply(self.kv.get_latest_events()):
            self.index.apply_snapshot(self.kv.event_snapshot())
            self.snapshots += 1
        metrics = self.kv.metrics()
        assert len(self.index) == metrics["cached_blocks"]
        assert self.index.last_event_id == metrics["events_recorded"] - 1
        for options in NAMESPACES:
            prompt = self.prompt()
            reusable = pk.hash_blocks(prompt, PAGE, **options)[: (len(prompt) - 1) // PAGE]
            assert self.index.match_length(reusable) * PAGE == hit(self.kv, prompt, **options)
        fresh = BlockIndex()
        fresh.apply_snapshot(self.kv.event_snapshot())
        assert fresh.hashes() == self.index.hashes()
        self.kv.verify()


def test_the_index_answers_like_the_manager_after_every_call(first_seed: int, long_run: bool) -> None:
    snapshots = 0
    for seed in range(first_seed, first_seed + (10_000 if long_run else 150)):
        router = Router(seed)
        try:
            for _ in range(40):
                router.call()
                router.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        snapshots += router.snapshots
    assert snapshots > 0


# Why a look-up missed, as Python tells it.


def test_a_summary_says_why_the_first_new_block_is_new() -> None:
    kv = manager(pages=3)
    store(kv, range(9))
    assert kv.analyze_prefix_reuse(list(range(9))).miss_reason is None
    assert kv.analyze_prefix_reuse(list(range(50, 59))).miss_reason == "never_stored"
    store(kv, range(50, 59))
    gone = kv.analyze_prefix_reuse(list(range(9)))
    assert (gone.miss_reason, gone.evicted_at_step) == ("evicted", 2)


def test_other_namespaces_are_looked_into_only_when_asked() -> None:
    kv = manager()
    store(kv, range(9), cache_salt="a")
    asked = {flag: kv.analyze_prefix_reuse(list(range(9)), other_namespaces=flag) for flag in (False, True)}
    assert [summary.miss_reason for summary in asked.values()] == ["never_stored", "other_namespace"]
    assert asked[True].reusable_blocks_all == 0


def test_times_are_counted_by_powers_of_two_of_steps() -> None:
    kv = manager(pages=3)
    store(kv, range(9))
    for token in (20, 21, 22, 23):
        store(kv, [token])
    store(kv, range(9))
    histograms = kv.histograms()
    assert {name: len(counts) for name, counts in histograms.items()} == {
        "residency_steps": 16,
        "reuse_gap_steps": 16,
    }
    # Two blocks, hit 5 steps after their last use: 4 to 7 is the fourth count.
    assert histograms["reuse_gap_steps"] == (0, 0, 0, 2, *itertools.repeat(0, 12))
