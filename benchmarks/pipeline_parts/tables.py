"""Runs as tables, for the console and for a page."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

from rich import box
from rich.table import Table

from pipeline_parts.document import Document
from pipeline_parts.rows import BASELINE, Row, rows
from pipeline_parts.training import Run
from thinwire.tools.show.units import UNKNOWN

HEADINGS = (
    "method",
    "sparsity",
    "cut",
    "train loss",
    "held-out loss",
    "held-out, % over baseline",
    "accuracy %",
    "kept %",
    "not zero %",
    "kept held-out %",
)
MINUS = "\N{MINUS SIGN}"
TEXTS = 3
"""So many columns are words."""


def table(document: Document, problem: str) -> Table:
    """Return the rows of a problem for the console."""
    found = Table(title=title(document, problem), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for place, heading in enumerate(HEADINGS):
        found.add_column(heading, justify="left" if place < TEXTS else "right", vertical="bottom")
    for cells in lines(document, problem):
        found.add_row(*cells)
    return found


def markdown(document: Document, problem: str) -> str:
    """Return the same for a page."""
    rule = ["---"] * TEXTS + ["---:"] * (len(HEADINGS) - TEXTS)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (HEADINGS, rule, *lines(document, problem)))


def title(document: Document, problem: str) -> str:
    """Return what was run."""
    setting = document.settings[problem]
    return f"{problem}: {setting['description']}; {setting['steps']:,} steps of {setting['samples']} samples"


def lines(document: Document, problem: str) -> Iterator[list[str]]:
    """Yield the cells of every row that was run."""
    baseline = document.of(problem, rows(problem)[0].name)
    for row in rows(problem):
        if runs := document.of(problem, row.name):
            yield _cells(row, runs, baseline)


def _cells(row: Row, runs: Sequence[Run], baseline: Sequence[Run]) -> list[str]:
    sparsity = UNKNOWN if row.method == BASELINE else f"{100 * row.sparsity:.0f} %"
    ended = [run for run in runs if run.diverged_at is None]
    if not ended:
        return [row.method, sparsity, row.place, UNKNOWN, _diverged(runs), *[UNKNOWN] * 5]
    lost = "" if len(ended) == len(runs) else f" ({_diverged(runs)})"
    return [
        row.method,
        sparsity,
        row.place,
        _spread([run.train_loss for run in ended], 4),
        _spread([run.held_out_loss for run in ended], 4) + lost,
        UNKNOWN if row.method == BASELINE else _spread(list(over(ended, baseline)), 2, sign="+"),
        _percent(ended, lambda run: run.held_out_accuracy, 2),
        _percent(ended, lambda run: run.kept, 1),
        _percent(ended, lambda run: run.nonzero, 1),
        _percent(ended, lambda run: run.kept_held_out, 1),
    ]


def over(runs: Sequence[Run], baseline: Sequence[Run]) -> Iterator[float]:
    """Yield by how many percent the held-out loss of each run is above that of the baseline of the same seed."""
    known = {run.seed: run.held_out_loss for run in baseline}
    yield from (100 * (run.held_out_loss / known[run.seed] - 1) for run in runs if run.seed in known)


def _diverged(runs: Sequence[Run]) -> str:
    return f"{sum(run.diverged_at is not None for run in runs)} of {len(runs)} diverged"


def _spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean and sample standard deviation."""
    if not values:
        return UNKNOWN
    mean = f"{fmean(values):{sign}.{digits}f}".replace("-", MINUS)
    return f"{mean} ± {stdev(values):.{digits}f}" if len(values) > 1 else mean


def _percent(runs: Sequence[Run], of: Callable[[Run], float], digits: int) -> str:
    share = 100 * fmean(map(of, runs))
    return UNKNOWN if share != share else f"{share:.{digits}f}"
