"""A check, printed, as a page, and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from rich.console import Console

from thinwire_lab.check.findings import Finding
from thinwire_lab.check.sections import Asked
from thinwire_lab.show.page import page
from thinwire_lab.show.table import UNKNOWN, Column, Table, duration, human_bytes, milliseconds, tabulated
from thinwire_lab.show.terminal import print_raw, print_titled, say

SCHEMA = "thinwire.check/1"
_WIDEST = 110
_WAY_OUT = (
    "Until that is fixed, THINWIRE_BACKEND=reference runs every kernel in plain torch: slower, and without these."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings, and how they were made.

    asked: with which options. ranks: of torchrun, or 1. began: when. seconds: how long it took. complete: nothing of
    what was asked is left to check.
    """

    findings: Sequence[Finding]
    versions: Mapping[str, str]
    asked: Asked
    ranks: int
    began: datetime
    seconds: float
    complete: bool = True

    @property
    def failed(self) -> Sequence[Finding]:
        """What is ✗."""
        return [found for found in self.findings if found.ok is False]

    @property
    def conclusion(self) -> str:
        """The whole in a line, with the options that leave something out."""
        well = sum(found.ok is True for found in self.findings)
        wrong = len(self.failed)
        counts = f"{well} checks passed" + (f", {wrong} failed" if wrong else "")
        if not self.complete:
            return f"{'✗ ' if wrong else ''}not complete: {counts} so far, in {duration(self.seconds)}"
        only = f"only {','.join(self.asked.only)}" if self.asked.only else ""
        less = ", ".join(filter(None, ("quick" if self.asked.quick else "", only)))
        return f"{'✗' if wrong else '✓'} {counts}, in {duration(self.seconds)}" + (less and f" ({less})")

    @property
    def origin(self) -> str:
        """When and where, in a line."""
        ranks = "1 process" if self.ranks == 1 else f"{self.ranks} ranks of torchrun"
        return f"{self.began:%Y-%m-%d %H:%M} UTC, {ranks}, {self.asked.device}"

    def pasted(self) -> list[str]:
        """Return a line for each failure that can be pasted into an issue."""
        device = next((f.said for f in self.findings if f.section == "machine" and f.name == "device"), "?")
        where = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [f"thinwire check: {f.section}: {f.name}: {f.said} [{device}; {where}]" for f in self.failed]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema": SCHEMA,
            "passed": self.complete and not self.failed,
            "complete": self.complete,
            "asked": {"device": self.asked.device, "quick": self.asked.quick, "only": list(self.asked.only)},
            "ranks": self.ranks,
            "began": self.began.isoformat(timespec="seconds"),
            "seconds": self.seconds,
            "versions": dict(self.versions),
            "findings": [asdict(found) for found in self.findings],
            "issue": self.pasted(),
        }

    def html(self) -> str:
        """Return a page that needs nothing beside it."""
        return page("thinwire check", self.print, made={"began": self.origin})

    def print(self, console: Console) -> None:
        """Print a table for each section; what failed last, and what to do until a kernel is fixed."""
        for section, found in groupby(self.findings, key=lambda each: each.section):
            print_titled(console, _table(section, list(found)).mapped(_cut))
        console.print()
        say(console, self.conclusion, "bold red" if self.failed else "bold green")
        for line in self.pasted():
            print_raw(console, line)
        if any(found.section == "kernels" for found in self.failed):
            say(console, _WAY_OUT)


_MARK = Column[Finding](heading="", text=lambda found: found.mark, left=True, wrong=lambda found: found.ok is False)
_SAID = Column[Finding](heading="found", text=lambda found: found.said, left=True)


def _table(section: str, found: Sequence[Finding]) -> Table:
    kind = section.partition(",")[0]
    name = Column[Finding](heading=_NAMES.get(kind, ""), text=lambda each: each.name, left=True)
    figures = (column for column in _FIGURES.get(kind, ()) if any(column.text(each) != UNKNOWN for each in found))
    columns = [name, _MARK, *figures, _SAID]
    return tabulated(columns, found, title=section)


def _cut(text: str) -> str:
    """Return a cell of the printed table; the line to paste below has all of it."""
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _figure(heading: str, name: str, text: str = "{:g}") -> Column[Finding]:
    def shown(found: Finding) -> str:
        value = found.figures.get(name)
        return UNKNOWN if value is None else text.format(value)

    return Column(heading=heading, text=shown)


_NAMES: Mapping[str, str] = {"kernels": "kernel", "exchanges": "recipe", "recipes": "recipe"}
_FIGURES: Mapping[str, Sequence[Column[Finding]]] = {
    "kernels": (
        Column(heading="runs in", text=lambda found: "+".join(found.figures.get("ran", ())) or UNKNOWN, left=True),
        Column(heading="s", text=lambda found: f"{found.seconds:.1f}"),
    ),
    "exchanges": (_figure("bytes sent", "sent_bytes", "{:,.0f}"),),
    "recipes": (
        Column(
            heading="sent a step",
            text=lambda f: human_bytes(f.figures["sent_bytes"] / f.figures["steps"] if "steps" in f.figures else None),
        ),
        _figure("ms a step", "step_ms", "{:.1f}"),
        _figure("host waits a step", "host_waits"),
    ),
}


def progress_line(found: Finding) -> str:
    """Return what a log says when a row is done."""
    return f"{found.mark} {found.section}: {found.name} ({milliseconds(found.seconds)} ms) {found.said}"
