"""What was simulated, as tables for a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.planner.scaling import PLANNED, SMALLEST, Scale
from thinwire.tools.show.terminal import ASCII

NOTES = (
    "predicted, not measured. Every worker's share of the work stays as it is (weak scaling).",
    f"recipes: for all tensors from {SMALLEST:,} elements on, the rest uncompressed. *: the fastest of them.",
    f"{PLANNED}: tensor by tensor the planner's choice among them; it takes what is kinder to the loss within 3 %.",
    "efficiency: throughput over that of as many workers that never wait for each other.",
)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table with its title, and what must be said beside it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def scale_sheets(found: Sequence[Scale]) -> list[Sheet]:
    """Return the two tables, of times and of efficiencies."""

    def sheet(title: str, cell: Callable[[Scale, str], str]) -> Sheet:
        names = list(found[0].seconds)
        rows = [
            [f"{scale.world_size:,}", *(cell(scale, name) + ("*" if name == scale.best else " ") for name in names)]
            for scale in found
        ]
        headings = [name.replace(":", " \n") + " " for name in names]
        return Sheet(title=title, headings=["workers", *headings], rows=rows)

    return [
        sheet("step, ms", lambda scale, name: _digits(1e3 * scale.seconds[name])),
        sheet("efficiency, %", lambda scale, name: _digits(100 * scale.efficiency(name))),
    ]


def print_sheet(console: Console, sheet: Sheet) -> None:
    """Print a table, its title above and its notes below."""
    plain = ASCII if console.options.ascii_only else {}
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for heading in sheet.headings:
        table.add_column(heading.translate(plain), justify="right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*(Text(cell.translate(plain), style="bold green" if "*" in cell else "") for cell in row))
    say(console, f"\n{sheet.title}", "bold")
    wide = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.print(table, width=max(wide, console.width), crop=False, no_wrap=True)  # numbers are not cut short
    for note in sheet.notes:
        say(console, note, "dim")


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is."""
    console.print(Text(text.translate(ASCII if console.options.ascii_only else {}), style=style))


def _digits(number: float) -> str:
    return f"{number:,.{0 if number >= 999.5 else 1 if number >= 9.95 else 2}f}"
