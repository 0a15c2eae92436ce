"""What a replay did, as a table that fits 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagekeeper.replay import ReplayResult

__all__ = ["summary"]


def summary(result: ReplayResult, source: str) -> RenderableType:
    """Lay out the result of replaying `source`."""
    settings = result.settings
    title = Text.assemble(("Replay of ", "bold"), (source, "bold cyan"))
    caching = f"{settings.hash_algo}, {settings.eviction_policy}"
    if not settings.prefix_caching:
        caching = "no prefix caching"
    pool = f"{settings.pages:,} pages of {settings.page_size} tokens"
    if settings.host_pages:
        pool += f" and {settings.host_pages:,} in host memory"
    if settings.disk_pages:
        pool += f" and {settings.disk_pages:,} on disk"
    setup = f"{pool}, {settings.concurrency} requests at a time, {caching}"
    total = f"{result.wall_s:.1f} s in all, the making of tokens included"
    return Group("", title, Text(setup, style="dim"), "", _facts(result), "", _calls(result), "", total)


def _facts(result: ReplayResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rate = result.token_hit_rate
    bar = ProgressBar(total=1.0, completed=rate, width=24, complete_style="green", finished_style="green")
    table.add_row("Requests served", f"{result.requests:,}", _but(result.rejected, "too large for the pool"))
    table.add_row("Prompt tokens", f"{result.prompt_tokens:,}", f"in {result.prompt_blocks:,} blocks")
    host, disk = result.settings.host_pages > 0, result.settings.disk_pages > 0
    where = "on the device" if host else "from the cache"
    table.add_row(Text(f"  {where}", "green"), Text(f"{result.hit_tokens:,}", "green"), bar)
    if host:
        table.add_row(Text("  in host memory", "green"), Text(f"{result.host_hit_tokens:,}", "green"), "")
    if disk:
        table.add_row(Text("  on disk", "green"), Text(f"{result.disk_hit_tokens:,}", "green"), "")
    table.add_row(
        "  hit rate",
        Text(f"{rate:.1%}", "bold green"),
        f"of the tokens, {result.block_hit_rate:.1%} of the blocks",
    )
    if host:
        table.add_row("  on the device alone", f"{result.device_token_hit_rate:.1%}", "of the tokens")
    table.add_row("Output tokens", f"{result.output_tokens:,}", f"in {result.decode_steps:,} decode steps")
    table.add_row("Pages at the peak", f"{result.peak_pages:,}", f"of {result.settings.pages:,}")
    table.add_row("Blocks evicted", f"{result.evictions:,}", "")
    if host:
        dropped = _but(result.host_dropped_blocks, "dropped for want of room or time")
        table.add_row("  offloaded to the host", f"{result.offloaded_blocks:,}", dropped)
        table.add_row("  evicted there", f"{result.host_evictions:,}", "")
        if disk:
            dropped = _but(result.disk_dropped_blocks, "dropped for want of room or time")
            table.add_row("  written to disk", f"{result.disk_stored_blocks:,}", dropped)
            table.add_row("  evicted there", f"{result.disk_evictions:,}", "")
            table.add_row("  read from there", f"{result.disk_loaded_blocks:,}", "")
        label = "  loaded from the tiers" if disk else "  loaded from there"
        table.add_row(label, f"{result.loaded_blocks:,}", "each page checked")
    table.add_row(
        "Preemptions", f"{result.preemptions:,}", _but(result.resumed_hit_tokens, "tokens found again")
    )
    return table


def _calls(result: ReplayResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("Manager CPU")
    for heading in ("calls", "median", "total"):
        table.add_column(heading, justify="right")
    for label, times in (
        ("admit a request", result.admit),
        ("step the batch", result.step),
        ("release", result.release),
    ):
        table.add_row(label, f"{times.calls:,}", f"{times.median_us:,.1f} µs", f"{times.total_ms:,.1f} ms")
    total_ms = result.admit.total_ms + result.step.total_ms + result.release.total_ms
    table.add_section()
    table.add_row("all", "", "", f"{total_ms:,.1f} ms", style="bold")
    return table


def _but(count: int, what: str) -> str:
    return f"{count:,} {what}" if count else ""
