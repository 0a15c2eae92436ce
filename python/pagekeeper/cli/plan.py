"""`pagekeeper plan`: what fits of a model on a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagekeeper.cli.sizes import parse_size, shown_size
from pagekeeper.cli.terminal import show
from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.models import HuggingFaceModel
from pagekeeper.models.weights import estimate_weights, weights_on_disk
from pagekeeper.params import KVCacheParams, MultiKVCacheParams
from pagekeeper.planning.demand import LONGEST
from pagekeeper.planning.planners import DEVICE_MEMORY_UTILIZATION
from pagekeeper.planning.report import DeviceMemory, PlanReport, WeightsSource, report

__all__ = ["plan"]

_POSITIVE = click.IntRange(min=1)
_EPILOG = """\b
The settings come from options, PAGEKEEPER_ variables and --config: docs/configuration.md has them.

\b
Exit codes: 0 the longest request fits, 1 it does not, 2 what was given cannot be planned with.

\b
Examples:
  pagekeeper plan models/qwen3-32b --memory 80GiB --tp 2
  pagekeeper plan config.json --kv-memory 40GiB --lengths 4096,32768 --kv-cache-format float8_e4m3fn
  pagekeeper plan models/gpt-oss-20b --memory 24GiB --max-model-len 65536 --json
"""


class _Refused(click.ClickException):
    exit_code = 2


class _Command(click.Command):
    """Has an option for each setting of a configuration, if an argument may be one or asks for help.

    Configurations take longer to load than all the rest, and most plans need none.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {flag for option in self.params for flag in option.opts}
        if any(arg.startswith("-") and arg.partition("=")[0] not in own for arg in args):
            self.params += [option for option in _settings() if option.opts[0] not in own]
        return super().parse_args(ctx, args)


def _settings() -> Iterator[click.Option]:
    from pagekeeper.cache_config import KVCacheConfig
    from pagekeeper.config_document import descriptions

    for name, said in descriptions(KVCacheConfig).items():
        told = said.partition(". ")[0].rstrip(".")
        yield click.Option([_flag(name), name], metavar="VALUE", help=f"Setting: {told}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@click.command(cls=_Command, epilog=_EPILOG, short_help="Say what fits of a model on a machine.")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--memory",
    type=parse_size,
    metavar="SIZE",
    help="Free memory of each device, before anything is loaded: 80GiB.",
)
@click.option(
    "--kv-memory",
    type=parse_size,
    metavar="SIZE",
    help="Memory of the pools on each device, instead of --memory.",
)
@click.option(
    "--tp", type=_POSITIVE, default=1, show_default=True, metavar="N", help="Devices that divide the model."
)
@click.option(
    "--weights",
    type=parse_size,
    metavar="SIZE",
    help="Size of all weights.  [default: of the safetensors files, or estimated]",
)
@click.option(
    "--max-model-len",
    type=_POSITIVE,
    metavar="TOKENS",
    help="Longest request.  [default: the model's longest]",
)
@click.option(
    "--max-batch-size",
    type=_POSITIVE,
    default=256,
    show_default=True,
    metavar="N",
    help="Requests at a time.",
)
@click.option(
    "--max-num-input-tokens",
    type=_POSITIVE,
    default=8192,
    show_default=True,
    metavar="TOKENS",
    help="Most tokens of a request that one forward computes; windows hold them.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Draft tokens of each decode step.",
)
@click.option(
    "--encoder-length",
    type=_POSITIVE,
    metavar="TOKENS",
    help="Tokens that an encoder makes for each request.  [default: the model's]",
)
@click.option(
    "--snapshot-interval",
    type=_POSITIVE,
    metavar="TOKENS",
    help="Tokens between two snapshots of states.  [default: at the ends of prompts alone]",
)
@click.option(
    "--lengths",
    metavar="TOKENS,...",
    help="Lengths of requests to tell of.  [default: some, and the longest]",
)
@click.option("--config", metavar="FILE", help="Settings, in YAML or JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: Path,
    memory: int | None,
    kv_memory: int | None,
    tp: int,
    weights: int | None,
    max_model_len: int | None,
    max_batch_size: int,
    max_num_input_tokens: int,
    draft_tokens: int,
    encoder_length: int | None,
    snapshot_interval: int | None,
    lengths: str | None,
    config: str | None,
    as_json: bool,
    **settings: str | None,
) -> None:
    """Say how much memory the KV cache of MODEL takes, and how many requests fit at a time.

    MODEL is a config.json of Hugging Face's, or the directory that has it. Nothing is fetched or loaded.
    """
    if (memory is None) == (kv_memory is None):
        raise click.UsageError("give either --memory, of which weights are taken off, or --kv-memory")
    if weights is not None and memory is None:
        raise click.UsageError("--weights goes with --memory")
    try:
        read = HuggingFaceModel.read(model)
        params, utilization = _configured(read, config, settings, tp, snapshot_interval)
        longest = max_model_len or read.max_position_embeddings
        if longest is None:
            raise click.UsageError("--max-model-len: missing, the configuration does not say it")
        if longest > LONGEST:
            raise click.UsageError(
                f"--max-model-len: must be up to {LONGEST}; {longest} cannot be planned for"
            )
        planned = report(
            read,
            params,
            _memory(model, memory, kv_memory, weights, utilization, tp),
            devices=tp,
            max_seq_len=longest,
            max_batch_size=max_batch_size,
            max_num_input_tokens=max_num_input_tokens,
            num_draft_tokens=draft_tokens,
            encoder_length=encoder_length or read.encoder_length,
            lengths=_lengths(lengths, longest),
        )
    except CacheTooSmallError as error:
        if as_json:
            refused = {"needed": error.needed, "available": error.available, "error": str(error)}
            click.echo(json.dumps({"fits": False, "longest": 0, **refused}, indent=2))
        raise click.ClickException(f"it does not fit: {error}") from None  # exit code 1
    except (ValueError, OSError) as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(planned.as_dict(), indent=2))
    else:
        show(_summary(planned))
    click.get_current_context().exit(0 if planned.fits else 1)


def _configured(
    model: HuggingFaceModel,
    file: str | None,
    settings: dict[str, str | None],
    devices: int,
    snapshot_interval: int | None,
) -> tuple[KVCacheParams | MultiKVCacheParams, float]:
    """The parameters of the model's cache, and the part of the memory that may be used."""
    argv = [] if file is None else ["--config", file]
    argv += [f"{_flag(name)}={text}" for name, text in settings.items() if text is not None]
    if not argv and not any(variable.upper().startswith("PAGEKEEPER_") for variable in os.environ):
        params = model.to_params(tensor_parallel_degree=devices, snapshot_interval=snapshot_interval)
        return params, DEVICE_MEMORY_UTILIZATION
    from pagekeeper.cache_config import KVCacheConfig

    config = KVCacheConfig.from_args(argv)
    params = config.to_model_params(
        model, tensor_parallel_degree=devices, snapshot_interval=snapshot_interval
    )
    return params, config.device_memory_utilization


def _memory(
    model: Path, free: int | None, pools: int | None, weights: int | None, utilization: float, devices: int
) -> DeviceMemory:
    if free is None:
        return DeviceMemory(
            free=None, utilization=utilization, weights=0, weights_from="none", cache=pools or 0
        )
    source: WeightsSource = "given"
    if weights is None:
        weights, source = weights_on_disk(model), "files"
    if weights is None:
        weights, source = estimate_weights(model), "estimated"
    if weights is None:
        raise click.UsageError(
            "--weights: missing; there are no safetensors files, and the shape does not say it"
        )
    return DeviceMemory.of(free, utilization, weights, source, devices)


def _lengths(given: str | None, longest: int) -> list[int]:
    if given is None:
        return [*(tokens for tokens in (1024, 4096, 16_384, 65_536) if tokens < longest), longest]
    try:
        lengths = [int(length) for length in given.split(",")]
    except ValueError:
        lengths = [0]
    if not all(1 <= length <= longest for length in lengths):
        raise click.UsageError(
            f"--lengths {given}: must be numbers of tokens from 1 to {longest}, as in 4096,32768"
        )
    return lengths


def _summary(planned: PlanReport) -> RenderableType:
    known = "" if planned.is_known else ", a type that is not known"
    name = planned.model_type or "a model"
    name = name if name.isprintable() and len(name) <= 60 else shown(name)
    title = Text.assemble(("KV cache of ", "bold"), (name, "bold cyan"), known)
    parts: list[RenderableType] = [
        "",
        title,
        "",
        _facts(planned),
        "",
        _groups(planned),
        "",
        _requests(planned),
    ]
    for note in planned.notes:
        parts += ["", Text(f"Note: {note}", "yellow")]
    for warning in planned.warnings:
        parts += ["", Text(f"Warning: {warning}.", "yellow")]
    return Group(*parts, "", _verdict(planned))


def _facts(planned: PlanReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    memory, each = planned.memory, " on each device" if planned.devices > 1 else ""
    if memory.free is not None:
        usable = int(memory.free * memory.utilization)
        table.add_row("Memory that is free", shown_size(memory.free), each.strip())
        table.add_row("  may be used", shown_size(usable), f"{memory.utilization:g} of it")
        source = {"files": "the files", "given": "as given", "estimated": "estimated: give --weights"}
        table.add_row("  weights", shown_size(memory.weights), source.get(memory.weights_from, ""))
    table.add_row("Memory of the cache", Text(shown_size(memory.cache), "bold green"), each.strip())
    table.add_row(
        "Bytes per token", f"{planned.bytes_per_token:,}", f"in pages of {planned.page_size} tokens"
    )
    if planned.bytes_per_token_kept != planned.bytes_per_token or planned.fixed_bytes_per_request:
        table.add_row(
            "  that a request keeps", f"{planned.bytes_per_token_kept:,}", "the rest leaves its window"
        )
        fixed = shown_size(planned.fixed_bytes_per_request)
        table.add_row("  beside, per request", fixed, "in windows, states, an encoder's pages")
    table.add_row("Tokens in the cache", f"{planned.capacity_tokens:,}", "of requests as long as may be")
    table.add_row("Tiers, if wanted", f"{planned.host_gb:,} GiB", "of host memory: host_offload_max_gb")
    table.add_row("", f"{planned.disk_gb:,} GiB", "of disk: disk_offload_max_gb")
    return table


def _groups(planned: PlanReport) -> Table:
    table = _listing("Layers", "count", "bytes a page", "pages")
    for group in planned.groups:
        count, size = f"{group.layers:,}", f"{group.bytes_per_page:,}"
        table.add_row(group.reads, count, size, f"{group.pages:,}")
    if planned.is_shared:
        table.caption = "They share their memory: each count is of a group that has it alone."
        table.caption_justify = "left"
    return table


def _requests(planned: PlanReport) -> Table:
    table = _listing("Requests of", "memory each", "at a time")
    for length in planned.lengths:
        style = "" if length.requests else "red"
        size = shown_size(length.bytes_per_request)
        table.add_row(f"{length.tokens:,} tokens", size, f"{length.requests:,}", style=style)
    return table


def _listing(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 2, 0, 0), show_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _verdict(planned: PlanReport) -> Text:
    if planned.fits:
        return Text(f"A request of {planned.max_seq_len:,} tokens fits.", "bold green")
    told = (
        f"A request of {planned.max_seq_len:,} tokens does not fit; --max-model-len {planned.longest} does."
    )
    return Text(told, "bold red")
