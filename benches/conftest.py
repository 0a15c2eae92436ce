"""The `row` fixture: times one row and says, beside pytest-benchmark's table, what a unit of work costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

_SECOND_IN = {"ns": 1e9, "µs": 1e6, "ms": 1e3}
_FIGURES = pytest.StashKey[list[tuple[str, float, str]]]()


class Row:
    """One row of the table that a run ends with, also kept as `extra_info` in `--benchmark-json`."""

    def __init__(self, benchmark: BenchmarkFixture) -> None:
        self.benchmark = benchmark

    def time(
        self,
        action: Callable[..., object],
        *,
        unit: str,
        units: int = 1,
        rounds: int,
        setup: Callable[[], object] | None = None,
        teardown: Callable[..., object] | None = None,
    ) -> None:
        """Runs `action` once a round, after one round that does not count; the figure is the median round.

        Args:
            action: what is timed; gets what `setup` returns.
            unit: of the figure, such as "ns/token".
            units: how many of them one round does.
            rounds: how many are timed.
            setup: runs before each round, untimed; returns (positional, keyword) arguments or None.
            teardown: runs after each round, untimed, with the same arguments.
        """
        self.benchmark.pedantic(action, setup=setup, teardown=teardown, rounds=rounds, warmup_rounds=1)
        measured: Any = self.benchmark.stats
        self.says(measured.stats.median * _SECOND_IN[unit.split("/")[0]] / units, unit)

    def says(self, figure: float, unit: str) -> None:
        """Gives the row's figure where it is not the time of a round."""
        self.benchmark.extra_info.update(figure=figure, unit=unit)


@pytest.fixture
def row(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Iterator[Row]:
    yield Row(benchmark)
    info: dict[str, Any] = benchmark.extra_info
    if "figure" in info:
        figures = request.config.stash.setdefault(_FIGURES, [])
        figures.append((request.node.name, info["figure"], info["unit"]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.getoption("benchmark_enable"):
        pytest.skip("benchmarks are off: give --benchmark-enable")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.section("medians per unit of work")
    width = max((len(name) for name, _, _ in figures), default=0)
    for name, figure, unit in figures:
        terminalreporter.line(f"{name:{width}}  {figure:10.3f} {unit}")
