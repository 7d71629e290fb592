"""Rows as a table, for the console and for a page."""

import math
from collections.abc import Sequence

from thinwire_lab.show.table import Table
from thinwire_lab.show.table import markdown as in_markdown
from thinwire_lab.show.units import UNKNOWN
from thinwire_lab.studies.loops.running import PLAIN, Row

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
    """Return a row for each loop, notes and summary for a page."""
    parts = (in_markdown(by_loop(rows)), "\n".join(f"- {note}" for note in notes(rows)), summary(rows))
    return "\n\n".join(filter(None, parts)) + "\n"


def by_loop(rows: Sequence[Row]) -> Table:
    """Return plain DDP's loss, the verdicts where everything is sent, and the losses where less is, for each loop."""
    sparse = list(dict.fromkeys(row.way for row in rows if not row.everything))
    lines = []
    for loop in dict.fromkeys(row.loop for row in rows):
        own = [row for row in rows if row.loop == loop]
        plain = next((row.plain_loss for row in own if row.plain_loss is not None), None)
        whole = dict.fromkeys(_verdict(row, rows) for row in own if row.everything and row.way != PLAIN)
        less = {row.way: _ended(row, rows) for row in own if not row.everything}
        lines.append([loop, _loss(plain), ", ".join(whole), *(less.get(way, UNKNOWN) for way in sparse)])
    return Table(headings=("loop", PLAIN, "all is sent", *sparse), rows=lines, left=(0, 2))


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
        _verdict(row, rows),
    ]


def _verdict(row: Row, rows: Sequence[Row]) -> str:
    return f"{row.verdict} ({_messages(rows).index(row.message) + 1})" if row.message else row.verdict


def _ended(row: Row, rows: Sequence[Row]) -> str:
    """Return a loss, with its verdict where that is not the usual one; or the verdict alone."""
    verdict = "" if row.verdict == "trains" else _verdict(row, rows)
    return ", ".join(filter(None, ("" if row.last_loss is None else _loss(row.last_loss), verdict)))


def _messages(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.message for row in rows if row.message))


def _loss(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4g}" if math.isfinite(loss) else "diverged"
