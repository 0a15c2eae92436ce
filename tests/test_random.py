"""Random call sequences: the manager and the reference model give the same pages, hits and victims.

`--long` runs many more of them, and fresh ones; `PAGEKEEPER_RANDOM_SEED=1234` runs that one only.
"""

import os

import pytest

from model.driver import Session

GROUPS = 8
ONLY = os.environ.get("PAGEKEEPER_RANDOM_SEED")


def seeds(group: int, first: int, total: int) -> range:
    if ONLY is not None:
        return range(int(ONLY), int(ONLY) + 1) if group == 0 else range(0)
    return range(first + group, first + total, GROUPS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", range(GROUPS))
def test_the_manager_agrees_with_the_model_after_every_call(
    group: int, first_seed: int, long_run: bool
) -> None:
    for seed in seeds(group, first_seed, 20_000 if long_run else 800):
        session = Session(seed)
        try:
            session.run(calls=80)
        except Exception as error:
            calls = "\n".join(session.trace)
            error.add_note(f"to repeat: PAGEKEEPER_RANDOM_SEED={seed} pytest tests/test_random.py\n{calls}")
            raise
