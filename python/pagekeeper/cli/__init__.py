"""The command line: `pagekeeper` and `python -m pagekeeper`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits with its status."""
    try:
        from pagekeeper.cli.app import app

        app(prog_name="pagekeeper")  # which loads the command that is asked for
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        sys.exit(f"pagekeeper: the command line needs {library}: pip install 'pagekeeper[cli]'")
