"""What was simulated, on the terminal and in files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from json import dumps
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from thinwire.tools.inputs import BadInput, check_writable, write_atomically
from thinwire.tools.show.page import drawn, page, paragraphs
from thinwire.tools.simulate.table import Sheet, print_sheet, say


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What there is to show: tables under a title, notes below them, all of it for a program, and a figure."""

    title: str
    sheets: Sequence[Sheet]
    notes: Sequence[str]
    document: Mapping[str, Any]
    figure: Callable[[], Figure]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where it goes. Raises BadInput for a file that cannot be written, or a plot of a kind that nobody can draw."""

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
        for sheet in outcome.sheets:
            print_sheet(console, sheet)
        for note in ("", *outcome.notes):
            say(console, note, "dim")
        self._write(outcome)
        for path in filter(None, (self.json, self.plot, self.html)):
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)

    def _write(self, outcome: Outcome) -> None:
        if self.json is not None:
            write_atomically(self.json, dumps(outcome.document, indent=1) + "\n")
        if self.plot is not None:
            outcome.figure().savefig(self.plot)
        if self.html is not None:
            write_atomically(self.html, html(outcome))


def html(outcome: Outcome) -> str:
    """Return a page that needs nothing beside it."""
    tables = "\n".join(
        f"<h2>{escape(s.title)}</h2>\n{_table(s)}\n{paragraphs(s.notes, 'soft')}" for s in outcome.sheets
    )
    body = (
        f"<h1>thinwire simulate</h1>\n{paragraphs([outcome.title])}\n{tables}\n{paragraphs(outcome.notes, 'soft')}\n"
        f'<div class="figures">{drawn(outcome.figure())}</div>'
    )
    return page("thinwire simulate", body)


def _table(sheet: Sheet) -> str:
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in sheet.headings)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in sheet.rows)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _cell(text: str) -> str:
    return f'<td class="best">{escape(text)}</td>' if "*" in text else f"<td>{escape(text)}</td>"
