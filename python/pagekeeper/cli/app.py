"""The command group."""

from __future__ import annotations

import click

from pagekeeper.cli.doctor import doctor
from pagekeeper.cli.replay import replay

__all__ = ["app"]


@click.group(
    epilog="\b\nExamples:\n  pagekeeper replay --generate 1000\n  pagekeeper doctor /var/cache/kv",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="pagekeeper")
def app() -> None:
    """Tools around PageKeeper, the KV-cache manager."""


app.add_command(replay)
app.add_command(doctor)
