"""A table, for any output, and numbers with units. `terminal.print_table` prints it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

UNKNOWN = "—"


def milliseconds(seconds: float) -> str:
    """Seconds as bare milliseconds: ``118``, ``2.3``."""
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"


def duration(seconds: float) -> str:
    """Seconds for a reader: ``41.2 s``, ``12 min 05 s``, ``3 h 12 min``."""
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 100 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def human_bytes(count: float | None) -> str:
    """Bytes in decimal units, as links are rated: ``4.38 MB``."""
    if count is None:
        return UNKNOWN
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:#.3g}".rstrip(".") + f" {unit}"


def loss_text(loss: float) -> str:
    """A loss to three decimals; ``diverged`` where it is no longer a number."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Texts in rows under headings, which may have several lines. The first column names the rows.

    left: the columns aligned on the left. best: (row, column) of cells to highlight. wrong: the same, of cells that
    report a failure. under: a sentence below each row; empty where a later row's holds for several. notes: remarks on
    the table. gap: spaces between columns.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    left: Collection[int] = ()
    best: Collection[tuple[int, int]] = ()
    wrong: Collection[tuple[int, int]] = ()
    under: Sequence[str] = ()
    gap: int = 2

    def mapped(self, change: Callable[[str], str]) -> Self:
        """Return the same with other texts in headings, rows and below them."""
        rows = [[change(text) for text in row] for row in self.rows]
        headings, under = ([change(text) for text in texts] for texts in (self.headings, self.under))
        return replace(self, headings=headings, rows=rows, under=under)


@dataclass(frozen=True, kw_only=True)
class Column(Generic[T]):
    """A column: how to show each of several things, and which are `wrong`.

    With two or more things, the lowest `rank` is the best.
    """

    heading: str
    text: Callable[[T], str]
    left: bool = False
    rank: Callable[[T], float | None] = lambda _: None
    wrong: Callable[[T], bool] = lambda _: False

    def best(self, things: Sequence[T]) -> set[int]:
        """Return the places of the best: several, if they read alike."""
        ranks = [(rank, self.text(x)) for x in things if (rank := self.rank(x)) is not None and math.isfinite(rank)]
        text = min(ranks)[1] if len(ranks) > 1 else None
        return {place for place, x in enumerate(things) if self.text(x) == text}


def tabulated(
    columns: Sequence[Column[T]],
    things: Sequence[T],
    *,
    title: str = "",
    under: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Table:
    """Return the table with a row for each thing."""
    return Table(
        title=title,
        headings=[column.heading for column in columns],
        rows=[[column.text(thing) for column in columns] for thing in things],
        left={place for place, column in enumerate(columns) if column.left},
        best={(row, place) for place, column in enumerate(columns) for row in column.best(things)},
        wrong={(row, place) for place, column in enumerate(columns) for row, x in enumerate(things) if column.wrong(x)},
        under=under,
        notes=notes,
    )


def plain(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Return a row for each of these, with a column for each name. The first says what the row is of."""
    return Table(
        title=title,
        headings=[name.replace("_", "\n") for name in rows[0]],
        rows=[[_shown(value) for value in row.values()] for row in rows],
        left=(0,),
        wrong={(at, column) for at, row in enumerate(rows) for column, x in enumerate(row.values()) if x is False},
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(map(_shown, value.values()))
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return UNKNOWN if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
