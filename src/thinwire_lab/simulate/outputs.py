"""Shows a simulation on the terminal and writes its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from thinwire_lab.inputs import BadInput, check_writable, write_atomically
from thinwire_lab.show import page
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import print_table, print_written, say


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What to show: titled tables with notes, the same as a JSON document, and a figure."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str]
    document: Mapping[str, Any]
    figure: Callable[[], Figure]


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files asked for. Raises BadInput for one that cannot be written, or a plot in an unknown format."""

    json: Path | None
    plot: Path | None
    html: Path | None

    def __post_init__(self) -> None:
        check_writable((self.json, self.plot, self.html))
        if self.plot is not None and self.plot.suffix[1:].lower() not in FigureCanvasAgg.filetypes:
            raise BadInput(f"--plot {self.plot} ends in {self.plot.suffix!r}; expected .png, .svg or .pdf")

    def show(self, outcome: Outcome) -> None:
        """Print it and write the files."""
        console = Console()
        say(console, outcome.title, "bold")
        for table in outcome.tables:
            say(console, f"\n{table.title}\n", "bold")
            print_table(console, table)
            for note in ("", *table.notes):
                say(console, note, "dim")
        for note in ("", *outcome.notes):
            say(console, note, "dim")
        self._write(outcome)
        print_written(console, (self.json, self.plot, self.html))

    def _write(self, outcome: Outcome) -> None:
        if self.json is not None:
            write_atomically(self.json, dumps(outcome.document, indent=1) + "\n")
        if self.plot is not None:
            outcome.figure().savefig(self.plot)
        if self.html is not None:
            write_atomically(self.html, html(outcome))


def html(outcome: Outcome) -> str:
    """Return a page that needs nothing beside it."""
    return page.page(
        "thinwire simulate",
        page.chapter("thinwire simulate", page.paragraphs([outcome.title])),
        *(page.section(table.title, page.table(table)) for table in outcome.tables),
        page.paragraphs(outcome.notes, "soft"),
        page.figures(outcome.figure()),
    )


def starred(*, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> Table:
    """Return a table with a star on the best cells. Headings and cells contain most of the space between columns."""
    best = {(place, column) for place, row in enumerate(rows) for column, text in enumerate(row) if "*" in text}
    return Table(title=title, headings=headings, rows=rows, notes=notes, best=best, gap=1)
