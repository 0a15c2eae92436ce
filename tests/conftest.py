"""What all tests share: the hypothesis profiles and the project's shared material."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# "default" draws the same few examples on every run, so that a red build is about the change under test;
# `--hypothesis-profile long` (make test-long) draws many fresh ones and prints how to repeat a failing one.
settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
settings.register_profile(
    "long",
    max_examples=2_000,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether the run was asked for many more random examples."""
    return bool(pytestconfig.getoption("--hypothesis-profile") == "long")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of traces, vectors and peers that stands beside the repository for its developers."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared, which is not beside this checkout")
    return folder
