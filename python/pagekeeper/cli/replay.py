"""`pagekeeper replay`: drive the manager with a trace and show what the cache did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagekeeper import EvictionPolicy
from pagekeeper.cli.report import summary
from pagekeeper.cli.terminal import show
from pagekeeper.contents import WrongPageError
from pagekeeper.params import HashAlgorithm
from pagekeeper.replay import POOL_TOKENS, ReplayResult, ReplaySettings
from pagekeeper.replay import replay as run
from pagekeeper.traces import FORMATS, TraceError, TraceRequest, read_trace
from pagekeeper.workloads import ChatWorkload

__all__ = ["replay"]

_POSITIVE = click.IntRange(min=1)


class BadInput(click.ClickException):
    """What was given cannot be replayed."""

    exit_code = 2


def _chat_option(flag: str, field: str, least: int, what: str) -> Callable[[Any], Any]:
    """An option for a field of `ChatWorkload`; None when it is not given."""
    default = getattr(ChatWorkload, field)
    return click.option(
        flag, field, type=click.IntRange(least), metavar="N", help=f"Generated: {what}.  [default: {default}]"
    )


_EXAMPLES = """\b
Examples:
  pagekeeper replay --generate 1000
  pagekeeper replay conversation_trace.jsonl --requests 600 --pool-tokens 500000
  pagekeeper replay conversation_trace.jsonl --pool-tokens 500000 --host 4x
  pagekeeper replay conversation_trace.jsonl --pool-tokens 500000 --host 2x --disk 8x --disk-dir kv
  pagekeeper replay sessions/ --page-size 64 --json
"""


@click.command(epilog=_EXAMPLES, short_help="Replay a request trace on the manager.")
@click.argument("trace", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--format", type=click.Choice(FORMATS), help="Format of TRACE.  [default: recognised]")
@click.option(
    "--hash-block-size",
    type=_POSITIVE,
    metavar="TOKENS",
    help="Tokens that a hash id of TRACE names.  [default: mooncake 512, agent 64]",
)
@click.option("--requests", type=_POSITIVE, metavar="N", help="Stop after N requests.")
@click.option(
    "--page-size",
    type=_POSITIVE,
    default=ReplaySettings.page_size,
    show_default=True,
    metavar="TOKENS",
    help="Tokens a page.",
)
@click.option(
    "--pool-tokens", type=_POSITIVE, metavar="TOKENS", help=f"Size of the pool.  [default: {POOL_TOKENS}]"
)
@click.option("--pages", type=_POSITIVE, metavar="N", help="Size of the pool, in pages.")
@click.option(
    "--host",
    metavar="SIZE",
    help="Keep blocks in host memory too: so many tokens, or times the pool, as in 2000000 or 4x. Real "
    "memory is used, 8 bytes a token, and every page that is found is checked.",
)
@click.option(
    "--disk",
    metavar="SIZE",
    help="Keep blocks on disk too, behind host memory: as for --host.  [default with --disk-dir: 2x]",
)
@click.option(
    "--disk-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep them in DIR, where the next replay finds them.  [default: nowhere for longer than this one]",
)
@click.option(
    "--concurrency",
    type=_POSITIVE,
    default=ReplaySettings.concurrency,
    show_default=True,
    metavar="N",
    help="Requests at a time.",
)
@click.option(
    "--hash-algo",
    type=click.Choice(get_args(HashAlgorithm)),
    default=ReplaySettings.hash_algo,
    show_default=True,
)
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in EvictionPolicy]),
    default=ReplaySettings.eviction_policy.value,
    show_default=True,
    help="Which cached block gives way to a new one.",
)
@click.option("--no-prefix-caching", is_flag=True, help="Let no request reuse what others computed.")
@click.option(
    "--generate", type=_POSITIVE, metavar="N", help="Replay N requests of a generated chat, not a TRACE."
)
@_chat_option("--users", "users", 1, "conversations at a time")
@_chat_option("--turns", "turns", 1, "turns of a conversation")
@_chat_option("--system-tokens", "system_tokens", 0, "length of the shared system prompt")
@_chat_option("--message-tokens", "message_tokens", 1, "mean length of a message")
@_chat_option("--answer-tokens", "answer_tokens", 1, "mean length of an answer")
@_chat_option("--seed", "seed", 0, "seed of lengths and tokens")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(
    trace: tuple[Path, ...],
    format: str | None,
    hash_block_size: int | None,
    requests: int | None,
    page_size: int,
    pool_tokens: int | None,
    pages: int | None,
    host: str | None,
    disk: str | None,
    disk_dir: Path | None,
    concurrency: int,
    hash_algo: str,
    policy: str,
    no_prefix_caching: bool,
    generate: int | None,
    as_json: bool,
    **chat: int | None,
) -> None:
    """Serve the requests of TRACE from a KV cache, without a model, and report what the cache saved.

    TRACE is files, or directories of .json and .jsonl files, merged by arrival time: Mooncake JSON lines
    (timestamp, input_length, output_length, hash_ids), agent sessions (JSON, one session a file), or JSON
    lines of tokens (tokens, output_length).
    """
    chat_fields = {field: value for field, value in chat.items() if value is not None}
    if bool(trace) == bool(generate):
        raise click.UsageError("give either a TRACE or --generate N")
    if generate and (format or hash_block_size):
        raise click.UsageError("--format and --hash-block-size go with a TRACE, not with --generate")
    if chat_fields and not generate:
        flag = next(iter(chat_fields)).replace("_", "-")
        raise click.UsageError(f"--{flag} goes with --generate, not with a TRACE")
    if pages and pool_tokens:
        raise click.UsageError("give either --pages or --pool-tokens")
    pages = pages or (pool_tokens or POOL_TOKENS) // page_size
    if not pages:
        raise click.UsageError(
            f"--pool-tokens {pool_tokens or POOL_TOKENS}: not one page of {page_size} tokens"
        )
    if host and no_prefix_caching:
        raise click.UsageError("--host goes with the prefix cache, not with --no-prefix-caching")
    if (disk or disk_dir) and not host:
        raise click.UsageError(f"{'--disk' if disk else '--disk-dir'} goes with --host")
    host_pages = _tier_pages("--host", host, pages, page_size)
    disk_pages = _tier_pages("--disk", disk or ("2x" if disk_dir else None), pages, page_size)
    try:
        settings = ReplaySettings(
            page_size=page_size,
            pages=pages,
            concurrency=concurrency,
            hash_algo=cast(HashAlgorithm, hash_algo),
            eviction_policy=EvictionPolicy(policy),
            prefix_caching=not no_prefix_caching,
            host_pages=host_pages,
            disk_pages=disk_pages,
            disk_dir=None if disk_dir is None else str(disk_dir),
        )
        generated = ChatWorkload(requests=generate, **chat_fields) if generate else None
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    def read() -> Iterator[TraceRequest]:
        source = generated or read_trace(trace, format=format, hash_block_size=hash_block_size)
        return islice(source, requests)

    try:
        result = _replay_with_progress(read, settings)
    except TraceError as error:
        raise BadInput(str(error)) from None
    except MemoryError:
        raise BadInput(
            f"no memory for the tables of {concurrency} requests of up to {pages} pages"
            f"{', or for the pages' if host else ''}"
        ) from None
    except WrongPageError as error:
        raise click.ClickException(f"the cache is wrong: {error}") from None
    except (ValueError, OSError) as error:
        if not host:
            raise
        sizes = f"--host {host}: {host_pages} pages of {8 * page_size} bytes"
        if disk_pages:
            sizes += f", and {disk_pages} on disk"
        raise BadInput(f"{sizes}: {error}") from None
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        show(summary(result, _source(trace)))


def _tier_pages(flag: str, size: str | None, pages: int, page_size: int) -> int:
    """Pages of a tier whose size is given in tokens or in pools; 0 if it is not."""
    if not size:
        return 0
    number = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)x", size, re.ASCII)
    if not number:
        raise click.UsageError(
            f"{flag} {size}: must be a number of tokens, or of pools with an x behind it, as in 4x"
        )
    tokens, pools = number.groups()
    tier_pages = int(tokens) // page_size if tokens else int(Decimal(pools) * pages)
    if not tier_pages:
        raise click.UsageError(f"{flag} {size}: not one page of {page_size} tokens")
    return tier_pages


def _source(trace: tuple[Path, ...]) -> str:
    """What was replayed, in a few words."""
    if not trace:
        return "a generated chat"
    return str(trace[0]) if len(trace) == 1 else f"{trace[0]} and {len(trace) - 1} more"


def _replay_with_progress(
    read: Callable[[], Iterator[TraceRequest]], settings: ReplaySettings
) -> ReplayResult:
    """Replay what `read` gives; a first reading finds a bad line before any work is done."""
    terminal = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    ) as progress:
        task = progress.add_task("Reading", total=None)
        total = sum(1 for _ in read())
        if not total:
            raise TraceError("the trace holds no request")
        progress.update(task, description="Replaying", total=total)
        return run(read(), settings, lambda: progress.advance(task))
