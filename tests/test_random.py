"""Random call sequences: the manager and the reference model give the same pages, hits and victims.

`--long` runs many more of them, and fresh ones; `PAGEKEEPER_RANDOM_SEED=1234` runs that one only.
"""

import os
from itertools import count, islice

import pytest

from model.driver import Session

PARTS = 8
SESSIONS = {"one group": (300, 20_000), "several groups": (120, 10_000)}
"""In a normal and in a long run."""
ONLY = os.environ.get("PAGEKEEPER_RANDOM_SEED")


def seeds(part: int, first: int, total: int) -> range:
    if ONLY is not None:
        return range(int(ONLY), int(ONLY) + 1) if part == 0 else range(0)
    return range(first + part, first + total, PARTS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("groups", SESSIONS)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_manager_agrees_with_the_model_after_every_call(
    part: int, groups: str, first_seed: int, long_run: bool
) -> None:
    for seed in seeds(part, first_seed, SESSIONS[groups][long_run]):
        session = Session(seed, several=groups == "several groups")
        try:
            session.run(calls=80)
        except (Exception, pytest.fail.Exception) as error:
            calls = "\n".join(session.trace)
            error.add_note(f"to repeat: PAGEKEEPER_RANDOM_SEED={seed} pytest tests/test_random.py\n{calls}")
            raise


@pytest.mark.timeout(600)
def test_sessions_before_a_tier_load_states(first_seed: int) -> None:
    drawn = (Session(seed, several=True) for seed in count(first_seed))
    loaded = 0
    for session in islice((one for one in drawn if one.tier is not None and one.keeps_states), 8):
        session.run(calls=80)
        loaded += session.model.counts["loaded_states"] > 0
    assert loaded >= 2, "loads of states are hardly met"
