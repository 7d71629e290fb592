"""Rows as a table, for the console and for a page."""

import math
from collections.abc import Sequence

from thinwire_lab.show.table import Table
from thinwire_lab.show.table import markdown as in_markdown
from thinwire_lab.show.units import UNKNOWN
from thinwire_lab.studies.loops.running import Row

HEADINGS = ("loop", "recipe", "last loss", "plain DDP's", "distance", "replicas alike", "skipped", "verdict")
FAILED = ("differs", "worse", "died")
"""The verdicts that end the script with status 1."""


def table(rows: Sequence[Row]) -> Table:
    """Return a row of cells for each row; messages are numbered, and `notes` spells them out."""
    last = len(HEADINGS) - 1
    return Table(
        headings=HEADINGS,
        rows=[cells(row, rows) for row in rows],
        left=(0, 1, last),
        wrong={(place, last) for place, row in enumerate(rows) if row.verdict in FAILED},
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return table, notes and summary for a page."""
    parts = (in_markdown(table(rows)), "\n".join(f"- {note}" for note in notes(rows)), summary(rows))
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
