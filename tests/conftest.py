"""What all tests share: which random examples are drawn, and the project's shared material."""

import importlib.util
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Who runs the tests in the background may have interrupts ignored, which processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

FIRST_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native", type=Path, help="test this build of the native module, not the installed one"
    )
    parser.addoption("--long", action="store_true", help="draw many more random examples, and fresh ones")


def pytest_configure(config: pytest.Config) -> None:
    if native := config.getoption("--native"):
        load_native(native)
    given = getattr(config, "workerinput", {})  # by the process that shares the tests out among several
    if given:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # each of them has a processor of its own
    # Normal runs draw the same examples every time, so that a red build is about the change under test.
    drawn = secrets.randbits(32) if config.getoption("--long") else 0
    config.stash[FIRST_SEED] = given.get("first_seed", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Every process of pytest-xdist counts from the same seed."""
    node.workerinput["first_seed"] = node.config.stash[FIRST_SEED]


def load_native(path: Path) -> None:
    """Puts a build of the native module where the package imports its own."""
    spec = importlib.util.spec_from_file_location("pagekeeper._native", path)
    if spec is None or spec.loader is None:
        raise pytest.UsageError(f"--native {path}: no native module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--long"):
        return None
    return f"random examples: seeds from {config.stash[FIRST_SEED]}; a failure names its own"


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether the run was asked for many more random examples."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def first_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the run's first random example; the next ones follow it."""
    return pytestconfig.stash[FIRST_SEED]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of traces, vectors and peers that stands beside the repository for its developers."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared, which is not beside this checkout")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: small products are slower on two, and much slower on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
