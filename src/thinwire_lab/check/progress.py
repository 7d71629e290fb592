"""Shows how far a check is: a bar in a terminal; in a log, a line for each section and each failure."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire_lab.check.findings import Finding
from thinwire_lab.check.report import progress_line
from thinwire_lab.check.sections import Section
from thinwire_lab.show.terminal import print_raw


class CheckProgress:
    """Progress on `console`, as a context manager."""

    def __init__(self, console: Console, rows: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_interactive, transient=True
        )
        self._task = self._bar.add_task("starting", total=rows)

    def __enter__(self) -> CheckProgress:
        """Start to draw."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._bar.stop()

    def start(self, section: Section) -> None:
        """Say which section comes."""
        self._bar.update(self._task, description=section.title)
        if not self._console.is_interactive:
            print_raw(self._console, f"{section.title}: {len(section.rows)} rows")

    def found(self, found: Finding) -> None:
        """Note that a row is done."""
        self._bar.update(self._task, advance=1, description=f"{found.section}: {found.name}")
        if found.ok is False:
            print_raw(self._console, progress_line(found))
