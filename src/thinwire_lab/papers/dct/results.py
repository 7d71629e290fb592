"""Runs as a JSON document, from which an interrupted comparison goes on."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from thinwire_lab.inputs import write_atomically
from thinwire_lab.papers.dct.training import Run

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
            "runs": [
                {key: None if value != value else value for key, value in asdict(run).items()}
                for run in self.runs.values()
            ],
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
            raise Unfit(f"{path} is not a document of {SCHEMA}: {wrong!r}") from wrong
        return document


_KEYS = [each.name for each in fields(Run)]
_WHOLE = "diverged_at"


def _number(key: str, value: Any) -> Any:
    return math.nan if value is None and key != _WHOLE else value


def over(runs: Sequence[Run], baseline: Sequence[Run]) -> Iterator[float]:
    """Yield, for each run, by how many percent its held-out loss is above the baseline's with the same seed."""
    known = {run.seed: run.held_out_loss for run in baseline}
    yield from (100 * (run.held_out_loss / known[run.seed] - 1) for run in runs if run.seed in known)
