"""What a comparison found, as a table that is read at a glance, or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .engine import Request, Stats


@dataclass(frozen=True)
class Run:
    """One pass over the workload."""

    requests: list[Request]
    """In the order of conversation and turn."""
    stats: Stats

    @property
    def outputs(self) -> list[list[int]]:
        """The generated tokens of every request."""
        return [request.output for request in self.requests]


@dataclass(frozen=True)
class Comparison:
    """The same workload without and with prefix reuse."""

    description: str
    pages: dict[str, int]
    """Usable ones of each group of layers."""
    without: Run
    reuse: Run

    @property
    def equal(self) -> bool:
        """Whether tokens were generated and every one of them is the same."""
        return self.reuse.stats.generated_tokens > 0 and self.without.outputs == self.reuse.outputs

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Label, without reuse, with reuse, what was saved."""
        old, new = self.without.stats, self.reuse.stats
        saved = old.prefilled_tokens - new.prefilled_tokens
        return [
            ("requests", f"{old.requests:,}", f"{new.requests:,}", ""),
            ("prompt tokens", f"{old.prompt_tokens:,}", f"{new.prompt_tokens:,}", ""),
            ("reused tokens", f"{old.reused_tokens:,}", f"{new.reused_tokens:,}", ""),
            (
                "prefill computed",
                f"{old.prefilled_tokens:,}",
                f"{new.prefilled_tokens:,}",
                f"{saved:,} tokens ({_percent(saved, old.prefilled_tokens)})",
            ),
            ("hit rate", f"{old.hit_rate:.1%}", f"{new.hit_rate:.1%}", ""),
            ("generated tokens", f"{old.generated_tokens:,}", f"{new.generated_tokens:,}", ""),
            ("steps", f"{old.steps:,}", f"{new.steps:,}", ""),
            (
                "time",
                f"{old.seconds:.2f} s",
                f"{new.seconds:.2f} s",
                f"{old.seconds - new.seconds:.2f} s ({old.seconds / max(new.seconds, 1e-9):.1f} x as fast)",
            ),
            *(
                (
                    f"peak pages of {count:,}" if len(self.pages) == 1 else f"{name}, peak of {count:,}",
                    f"{old.peak_pages[name]:,}",
                    f"{new.peak_pages[name]:,}",
                    "",
                )
                for name, count in self.pages.items()
            ),
            ("evicted blocks", f"{old.evictions:,}", f"{new.evictions:,}", ""),
            ("preemptions", f"{old.preemptions:,}", f"{new.preemptions:,}", ""),
        ]

    def verdict(self) -> str:
        """One sentence: are the tokens equal, and if not, where they part."""
        if self.equal:
            count = self.reuse.stats.generated_tokens
            return f"All {count:,} generated tokens are equal with and without reuse."
        for old, new in zip(self.without.requests, self.reuse.requests, strict=False):
            if old.output != new.output:
                pairs = list(zip(old.output, new.output, strict=False))
                same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
                return (
                    f"TOKENS DIFFER: conversation {new.conversation + 1}, turn {new.turn + 1}, "
                    f"from generated token {same + 1} on."
                )
        return "NO TOKENS WERE GENERATED."

    def warnings(self) -> list[str]:
        """A line for each run that refused requests."""
        lines = []
        for name, run in (("without", self.without), ("with", self.reuse)):
            refused = [request for request in run.requests if request.rejected]
            if refused:
                reason = refused[0].rejected
                lines.append(f"{len(refused)} requests were rejected {name} reuse; the first: {reason}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Counts of both runs, and every output."""
        return {
            "equal": self.equal,
            "pages": self.pages,
            "without_reuse": asdict(self.without.stats),
            "with_reuse": asdict(self.reuse.stats) | {"hit_rate": self.reuse.stats.hit_rate},
            "requests": [
                {
                    "conversation": request.conversation,
                    "turn": request.turn,
                    "prompt": request.prompt,
                    "output": request.output,
                    "rejected": request.rejected,
                }
                for request in self.reuse.requests
            ],
        }

    def show(self) -> None:
        """Prints the table, with rich where it is installed."""
        columns = ("", "without reuse", "with reuse", "saved")
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            self._show_plain(columns)
            return
        table = Table(title=self.description, title_justify="left", title_style="bold")
        label, old, new, saved = columns
        table.add_column(label)
        table.add_column(old, justify="right")
        table.add_column(new, justify="right")
        table.add_column(saved, style="green")
        for row in self.rows():
            table.add_row(*row)
        console = Console()
        console.print(table)
        for line in self.warnings():
            console.print(line, style="yellow", highlight=False)
        console.print(self.verdict(), style="bold green" if self.equal else "bold red", highlight=False)

    def _show_plain(self, columns: tuple[str, ...]) -> None:
        print(self.description)
        for label, old, new, saved in [columns, *self.rows()]:
            print(f"{label:<28} {old:>14} {new:>14}  {saved}".rstrip())
        for line in (*self.warnings(), self.verdict()):
            print(line)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
