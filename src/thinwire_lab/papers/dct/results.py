"""Runs as a JSON document, from which an interrupted comparison goes on, and as tables for console and page."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinwire_lab.inputs import write_atomically
from thinwire_lab.papers.dct.rows import BASELINE, Row, rows
from thinwire_lab.papers.dct.training import Run
from thinwire_lab.show.table import Table
from thinwire_lab.show.units import UNKNOWN

SCHEMA = "thinwire.pipeline_accuracy/1"


class Unfit(ValueError):  # noqa: N818 - it reads better where it is raised and caught
    """Not a document, or one of another run; the message is one line."""


@dataclass(kw_only=True)
class Document:
    """`settings`: what the runs of each problem share. `runs`: by problem, row and seed."""

    environment: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    runs: dict[tuple[str, str, int], Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Add a run."""
        self.runs[run.problem, run.row, run.seed] = run

    def of(self, problem: str, row: str) -> list[Run]:
        """Return the runs of a row, by seed."""
        found = (run for (*place, _), run in self.runs.items() if place == [problem, row])
        return sorted(found, key=lambda run: run.seed)

    def write(self, path: Path) -> None:
        """Write it; NaN becomes null."""
        whole = {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "settings": self.settings,
            "runs": [_finite(asdict(run)) for run in self.runs.values()],
        }
        write_atomically(path, json.dumps(whole, indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Read what was written. Raises Unfit, and OSError."""
        try:
            found = json.loads(path.read_text())
            if found["schema"] != SCHEMA:
                raise Unfit(f"{path} is of schema {found['schema']!r}; expected {SCHEMA!r}")
            document = cls(environment=found["environment"], settings=found["settings"])
            for entry in found["runs"]:
                document.add(Run(**{key: _number(key, entry[key]) for key in _KEYS}))
        except (KeyError, TypeError, json.JSONDecodeError) as wrong:
            raise Unfit(f"{path} is no document of {SCHEMA}: {wrong!r}") from wrong
        return document


_KEYS = [each.name for each in fields(Run)]
_WHOLE = "diverged_at"


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in entry.items()}


def _number(key: str, value: Any) -> Any:
    return math.nan if value is None and key != _WHOLE else value


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
"""How many columns are words."""


def table(document: Document, problem: str) -> Table:
    """Return the rows of a problem."""
    return Table(
        title=title(document, problem), headings=HEADINGS, rows=list(lines(document, problem)), left=range(TEXTS)
    )


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
    """Yield, for each run, by how many percent its held-out loss is above the baseline's with the same seed."""
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
