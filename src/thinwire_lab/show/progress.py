"""The bench's progress: bars in a terminal, and a line per finished row everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from thinwire_lab.show.table import duration, loss_text, milliseconds


class BenchProgress:
    """Live progress of a bench, drawn within `with progress.bars`: the row that runs, and all of them."""

    def __init__(self, console: Console, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to show ``rows`` rows; a console that is not interactive gets the plain lines only.

        ``clock`` returns monotonic seconds; the time left is estimated from them.
        """
        self._console = console
        self._rows = rows
        self._clock = clock
        self._started = clock()
        self._spent: list[float] = []
        self._label, self._steps, self._loss = "", 1, ""
        name, *rest = (
            TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("name", "count", "note", "left")
        )
        self.bars = Progress(name, BarColumn(16), *rest, console=console, disable=not console.is_interactive)
        self._row = self._add("", 1, visible=False)
        self._overall = self._add("all rows", rows)

    def start_row(self, label: str, steps: int) -> None:
        """Begin a row that is to take ``steps`` steps."""
        self._label, self._steps, self._loss = label, steps, ""
        self._started = self._clock()
        self.bars.reset(self._row, total=steps, visible=True, name=label, count=f"0/{steps}", note="", left="")

    def advance(self, step: int, loss: float | None, step_seconds: float) -> None:
        """Note that ``step`` steps are done, the last in ``step_seconds``; ``loss`` is None where not taken.

        Steps beyond the row's own search for its time to target, and have no known end.
        """
        if loss is not None:
            self._loss = f"loss {loss_text(loss)}"
        elapsed = self._clock() - self._started
        left = elapsed * max(self._steps / max(step, 1) - 1, 0)
        self._show_row(step, f"{milliseconds(step_seconds)} ms/step  {self._loss}", left)
        to_come = self._rows - len(self._spent) - 1
        self._show_overall(min(step / self._steps, 1), left + to_come * fmean([*self._spent, elapsed + left]))

    def finish_row(self, summary: str) -> None:
        """End the row, and leave one line about it."""
        self._spent.append(self._clock() - self._started)
        left = (self._rows - len(self._spent)) * fmean(self._spent)
        self.bars.update(self._row, visible=False)
        self._show_overall(0, left)
        line = f"{len(self._spent)}/{self._rows} {self._label}: {summary}"
        when = f" (about {_left(left)})" if left > 0 else ""
        self._console.print(line + when, markup=False, highlight=False, soft_wrap=True)

    def _add(self, name: str, total: int, visible: bool = True) -> TaskID:
        return self.bars.add_task("", total=total, visible=visible, name=name, count=f"0/{total}", note="", left="")

    def _show_row(self, step: int, note: str, left: float) -> None:
        count, when = f"{step}/{self._steps}", _left(left)
        if step > self._steps:
            count, when = str(step), "on to the target"
        self.bars.update(self._row, completed=min(step, self._steps), count=count, note=note, left=when)

    def _show_overall(self, share: float, left: float) -> None:
        done = len(self._spent)
        self.bars.update(self._overall, completed=done + share, count=f"{done}/{self._rows}", left=_left(left))


def _left(seconds: float) -> str:
    return f"{duration(seconds)} left" if seconds > 0 else ""
