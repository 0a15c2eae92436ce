"""Which eviction policy finds most in the cache: replays traces under each, at several sizes of the pool.

    python benches/policies.py TRACE...

Each TRACE is a file, or a directory whose files are served together in order of time. The table is
Markdown; a row is a trace and a size. A policy's figures are the part of the prompt tokens that it found in
the cache, and the blocks that it evicted.
"""

from __future__ import annotations

from pathlib import Path

import click

from pagekeeper import EvictionPolicy
from pagekeeper.replay import ReplayResult, ReplaySettings, replay
from pagekeeper.traces import read_trace


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--pool-tokens",
    "sizes",
    multiple=True,
    type=click.IntRange(ReplaySettings.page_size),
    default=(400_000, 1_000_000, 4_000_000),
    show_default=True,
    metavar="TOKENS",
    help="Size of the pool; may be given several times.",
)
def main(traces: tuple[Path, ...], sizes: tuple[int, ...]) -> None:
    policies = list(EvictionPolicy)
    print(row("trace", "pool, tokens", *(f"{policy}: found | evicted" for policy in policies)))
    print(row("---", *("---:" for _ in range(1 + 2 * len(policies)))))
    for trace in traces:
        for size in sizes:
            results = (result(trace, size, policy) for policy in policies)
            figures = (f"{each.token_hit_rate:.2%} | {each.evictions:,}" for each in results)
            print(row(trace.stem, f"{size:,}", *figures), flush=True)


def result(trace: Path, size: int, policy: EvictionPolicy) -> ReplayResult:
    pages = size // ReplaySettings.page_size
    return replay(read_trace([trace]), ReplaySettings(pages=pages, eviction_policy=policy))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
