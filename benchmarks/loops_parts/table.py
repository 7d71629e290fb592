"""Rows as a table, for the console and for a page."""

import math
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from loops_parts.running import Row
from thinwire.tools.show.units import UNKNOWN

HEADINGS = ("loop", "recipe", "last loss", "plain DDP's", "distance", "replicas alike", "skipped", "verdict")
TEXTS = 2
"""How many columns are words."""
_STYLES = {"differs": "bold red", "worse": "bold red", "died": "bold red", "raised": "yellow", "left out": "dim"}


def table(rows: Sequence[Row]) -> Table:
    """Return rows for the console; a loop is named once."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for place, heading in enumerate(HEADINGS):
        words = place < TEXTS or place == len(HEADINGS) - 1
        found.add_column(heading, justify="left" if words else "right", no_wrap=place < TEXTS)
    for place, row in enumerate(rows):
        again = place > 0 and rows[place - 1].loop == row.loop
        if place and not again:
            found.add_section()
        name, *rest = (escape(text) for text in cells(row, rows))
        found.add_row("" if again else name, *rest, style=_STYLES.get(row.verdict, ""))
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the same for a page."""
    rule = ["---"] * TEXTS + ["---:"] * (len(HEADINGS) - TEXTS - 1) + ["---"]
    lines = ("| " + " | ".join(texts) + " |" for texts in (HEADINGS, rule, *(cells(row, rows) for row in rows)))
    parts = ("\n".join(lines), "\n".join(f"- {note}" for note in notes(rows)), summary(rows))
    return "\n\n".join(filter(None, parts)) + "\n"


def notes(rows: Sequence[Row]) -> list[str]:
    """Return each message that replaces a figure, numbered as in the table."""
    return [f"({number}) {message}" for number, message in enumerate(_messages(rows), 1)]


def summary(rows: Sequence[Row]) -> str:
    """Say how many rows got each verdict."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in sorted({row.verdict for row in rows})}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return a row's cells; its message is numbered among those of `rows`."""
    skipped = UNKNOWN
    if row.skipped is not None:
        skipped = str(row.skipped) if row.same_skips else f"{row.skipped} for {row.plain_skipped}"
    return [
        row.loop,
        row.way,
        _loss(row.last_loss),
        _loss(row.plain_loss),
        UNKNOWN
        if row.distance is None
        else f"{row.distance:.3f}"
        if 1e-3 <= row.distance < 1e3
        else f"{row.distance:.0e}",
        {True: "yes", False: "no", None: UNKNOWN}[row.identical],
        skipped,
        f"{row.verdict} ({_messages(rows).index(row.message) + 1})" if row.message else row.verdict,
    ]


def _messages(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.message for row in rows if row.message))


def _loss(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4g}" if math.isfinite(loss) else "diverged"
