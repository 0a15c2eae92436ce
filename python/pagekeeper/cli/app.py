"""The command group. A command's module is loaded when the command is run, or told of."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["app"]

_COMMANDS = ("doctor", "plan", "replay")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"pagekeeper.cli.{cmd_name}"), cmd_name)
        return command


@click.group(
    cls=_Commands,
    epilog="""\b
Examples:
  pagekeeper plan models/qwen3-32b --memory 80GiB
  pagekeeper replay --generate 1000
  pagekeeper doctor /var/cache/kv""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="pagekeeper")
def app() -> None:
    """Tools around PageKeeper, the KV-cache manager."""
