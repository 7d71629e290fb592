"""Text on a terminal or in a log: sentences, names of written files, and tables."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from thinwire_lab.show.table import Table

_ASCII = str.maketrans({"✓": "yes", "✗": "NO", "—": "-", "–": "-", "·": "|", "─": "-", "±": "+-", "…": "..."})  # noqa: RUF001
_NARROWEST = 12  # of the column of names
_LOG_WIDTH = 160


def report_console() -> Console:
    """Return a console for tables: as wide as the terminal, and in a log wide enough."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def say(console: Console, text: str, style: str = "", indent: str = "") -> None:
    """Print sentences, wrapped at spaces to the console's width; further lines of each begin with `indent`."""
    for line in text.split("\n"):
        _put(console, Text(_filled(console, _plain(console, line), then=indent), style=style))


def print_raw(console: Console, line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_written(console: Console, paths: Iterable[Path | None]) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None and path.exists():
            print_raw(console, f"written: {path}")


def complain(command: str, reason: str) -> None:
    """Say on standard error why a command did not reach its end."""
    print_raw(Console(stderr=True), f"thinwire {command}: {reason}")


def fits(console: Console, table: Table) -> bool:
    """Return whether the console is wide enough for the table."""
    return sum(_widths(table)) + table.gap * (len(table.headings) - 1) <= console.width


def print_table(console: Console, table: Table) -> None:
    """Print headings, a rule unless the rows explain themselves, and rows.

    A narrow console leaves less room to the first column: a name that does not fit has a line of its own. Figures are
    never cut short.
    """
    table = table.mapped(lambda text: _plain(console, text))
    widths = _widths(table)
    others = sum(widths[1:]) + table.gap * len(widths[1:])
    widths[0] = max(min(_NARROWEST, widths[0]), min(console.width - others, widths[0]))
    for line in _heading(table, widths):
        _put(console, Text(line, style="bold"))
    if not table.under:
        _put(console, Text(_plain(console, "─" * (widths[0] + others))))
    for place, (name, *figures) in enumerate(table.rows):
        if len(name) > widths[0]:
            _put(console, Text(name))
            name = ""
        _put(console, Text(" " * table.gap).join(_cells(table, place, [name, *figures], widths)))
        if table.under and table.under[place]:
            _put(console, Text(_filled(console, table.under[place], "  ", "  "), style="dim"))


def print_titled(console: Console, table: Table) -> None:
    """Print the table between its title and its notes."""
    say(console, f"\n{table.title}", "italic")
    print_table(console, table)
    for note in table.notes:
        say(console, note, "dim")


def print_chapter(console: Console, table: Table) -> None:
    """Print the same with more room, as a part of a longer report."""
    say(console, f"\n{table.title}\n", "bold")
    print_table(console, table)
    for note in ("", *table.notes):
        say(console, note, "dim")


def _cells(table: Table, place: int, row: Sequence[str], widths: Sequence[int]) -> Iterator[Text]:
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        cell = (place, column)
        style = "bold red" if cell in table.wrong else "bold green" if cell in table.best else ""
        yield Text(_aligned(table, column, text, width), style=style)


def _heading(table: Table, widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the headings, which end on the last one."""
    parts = [heading.split("\n") for heading in table.headings]
    height = max(map(len, parts))
    for line in zip(*([""] * (height - len(part)) + part for part in parts), strict=True):
        cells = (_aligned(table, column, *of) for column, of in enumerate(zip(line, widths, strict=True)))
        yield (" " * table.gap).join(cells)


def _aligned(table: Table, column: int, text: str, width: int) -> str:
    return text.ljust(width) if column in table.left else text.rjust(width)


def _widths(table: Table) -> list[int]:
    columns = zip(table.headings, *table.rows, strict=True)
    return [max(len(line) for text in column for line in text.split("\n")) for column in columns]


def _filled(console: Console, text: str, first: str = "", then: str = "") -> str:
    return textwrap.fill(text, console.width, initial_indent=first, subsequent_indent=then, break_long_words=False)


def _plain(console: Console, text: str) -> str:
    return text.translate(_ASCII) if console.options.ascii_only else text


def _put(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
