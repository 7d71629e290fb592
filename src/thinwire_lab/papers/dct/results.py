"""Runs as a JSON document, from which an interrupted comparison goes on."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from thinwire_lab.inputs import reading, require, write_document
from thinwire_lab.papers.dct.training import Run

SCHEMA = "thinwire.pipeline_accuracy/1"


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
        runs = [{key: None if x != x else x for key, x in asdict(run).items()} for run in self.runs.values()]
        write_document(path, SCHEMA, environment=dict(self.environment), settings=self.settings, runs=runs)

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Read what was written. Raises BadInput."""
        with reading(path, f"a document of {SCHEMA}"):
            found = json.loads(path.read_text())
            require(found["schema"] == SCHEMA, path, f"a document of {SCHEMA}, not of {found['schema']!r}")
            document = cls(environment=found["environment"], settings=found["settings"])
            for entry in found["runs"]:
                known: dict[str, Any] = {each.name: entry[each.name] for each in fields(Run)}
                known |= {key: math.nan for key, x in known.items() if x is None and key != "diverged_at"}
                document.add(Run(**known))
        return document


def over(runs: Sequence[Run], baseline: Sequence[Run]) -> Iterator[float]:
    """Yield, for each run, by how many percent its held-out loss is above the baseline's with the same seed."""
    known = {run.seed: run.held_out_loss for run in baseline}
    yield from (100 * (run.held_out_loss / known[run.seed] - 1) for run in runs if run.seed in known)
