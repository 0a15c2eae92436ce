"""Models of several groups: what attention reads from pages is right, whatever the cache did before.

`--long` runs many more schedules, and fresh ones; `PAGEKEEPER_RANDOM_SEED=1234` runs that one only.
"""

import os
from collections import Counter

import pytest

pytest.importorskip("torch")

from model.hybrid import Session

ONLY = os.environ.get("PAGEKEEPER_RANDOM_SEED")
HAPPENED = (
    *("hits", "hits_with_placeholders", "reused_tokens", "late_reused_tokens", "evictions", "out_of_window"),
    *("partial_hits", "stored_tails"),
    *("preemptions", "forks", "page_copies", "overlapped", "adopted_blocks", "private_blocks"),
    *("InsufficientBlocksError", "max", "vllm", "flashinfer", "tensorrt", "asleep", "alone", "events missed"),
    *("chunks", "broken_off"),
)
STATES_HAPPENED = (
    *("states", "scratch", "hits", "reused_tokens", "evictions", "preemptions", "forks", "page_copies"),
    *("overlapped", "InsufficientBlocksError", "chunks", "broken_off"),
)
CROSS_HAPPENED = (
    *("encoded", "encoded_before", "encoded_shared", "hits_of_encoders", "late_reused_tokens", "evictions"),
    *("out_of_window", "partial_hits", "page_copies", "preemptions", "forks", "overlapped", "chunks"),
    *("InsufficientBlocksError", "broken_off", "alone"),
)
LATENTS_HAPPENED = (
    *("hits", "hits_with_placeholders", "reused_tokens", "partial_hits", "evictions", "page_copies", "forks"),
    *("overlapped", "chunks", "preemptions", "InsufficientBlocksError"),
    *("max of latents", "vllm of latents", "flashinfer of latents", "tensorrt of latents"),
)
TIERS_HAPPENED = (
    "loaded_blocks",
    "waits",
    "resumptions",
    "connector_host_stored_blocks",
    "InsufficientBlocksError",
    "moves",
)
"""What random schedules have to have met, or they would prove little."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.usefixtures("one_thread")
def test_attention_over_every_groups_tables_equals_dense_attention(
    groups: int, first_seed: int, long_run: bool
) -> None:
    happened = play(groups, 0, first_seed, 1000 if long_run else 24 if groups == 1 else 14)
    assert ONLY or [name for name in HAPPENED if not happened[name]] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.usefixtures("one_thread")
def test_attention_over_latents_equals_dense_attention(groups: int, first_seed: int, long_run: bool) -> None:
    """What happens in a cache of latents alone happens to latents."""
    happened = play(groups, 0, first_seed, 1000 if long_run else 24 if groups == 1 else 14, latents=True)
    assert ONLY or [name for name in LATENTS_HAPPENED if not happened[name]] == []
    assert not {"max", "vllm", "flashinfer", "tensorrt"} & happened.keys()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("groups", "states"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.usefixtures("one_thread")
def test_every_forward_goes_on_from_the_state_after_the_tokens_before_it(
    groups: int, states: int, first_seed: int, long_run: bool
) -> None:
    happened = play(groups, states, first_seed, 1000 if long_run else 10)
    assert ONLY or [name for name in STATES_HAPPENED if not happened[name]] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("groups", "states", "cross"), [(1, 0, 1), (2, 0, 1), (2, 0, 2), (2, 1, 1)])
@pytest.mark.usefixtures("one_thread")
def test_every_token_attends_to_all_tokens_of_its_encoder(
    groups: int, states: int, cross: int, first_seed: int, long_run: bool
) -> None:
    happened = play(groups, states, first_seed, 1000 if long_run else 14, cross=cross)
    expected = set(CROSS_HAPPENED) - ({"partial_hits"} if states else set())
    assert ONLY or [name for name in sorted(expected) if not happened[name]] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("groups", "states", "cross"),
    [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0), (1, 1, 0), (2, 2, 0), (1, 0, 1), (2, 1, 1)],
)
@pytest.mark.usefixtures("one_thread")
def test_what_comes_back_from_host_and_disk_is_what_each_group_had(
    groups: int, states: int, cross: int, first_seed: int, long_run: bool
) -> None:
    happened = play(groups, states, first_seed, 1000 if long_run else 6, cross=cross, tiers=True)
    assert ONLY or [name for name in TIERS_HAPPENED if not happened[name]] == []


def play(
    groups: int, states: int, first_seed: int, sessions: int, *, cross: int = 0, **options: bool
) -> Counter[str]:
    """Plays so many sessions, and counts what happened."""
    seeds = [int(ONLY)] if ONLY else range(first_seed, first_seed + sessions)
    happened: Counter[str] = Counter()
    for seed in seeds:
        session = Session(seed, groups, states, cross, **options)
        try:
            happened += session.run(calls=160 if options.get("tiers") else 80)
        except Exception as error:
            calls = "\n".join(session.trace)
            error.add_note(
                f"to repeat: PAGEKEEPER_RANDOM_SEED={seed}, {groups} groups, {states} of states, "
                f"{cross} of cross attention\n{calls}"
            )
            raise
        finally:
            session.kv.shutdown()
    return happened
