"""`thinwire bench`, from checked options to printed table and written files."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.bench.cluster import Cluster, SupervisorDied, WorkerDied
from thinwire.bench.hybrid import check_stages
from thinwire.bench.methods import METHODS
from thinwire.bench.options import Options
from thinwire.bench.outputs import check_writable
from thinwire.bench.problems import PROBLEMS, build
from thinwire.bench.progress import BenchProgress
from thinwire.bench.report import write_html
from thinwire.bench.results import Results
from thinwire.bench.session import Session, Workers
from thinwire.bench.table import print_table
from thinwire.bench.torchrun import ThisGroup, in_group, is_first
from thinwire.bench.worker import handle

DIED, INTERRUPTED = 1, 130


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go. Raises BadInput when a file cannot be written, before anything has been measured."""

    console: Console
    json: Path | None
    html: Path | None

    def __post_init__(self) -> None:
        check_writable((self.json, self.html))

    def save(self, results: Results) -> None:
        """Write the files."""
        if self.json is not None:
            results.write(self.json)
        if self.html is not None:
            write_html(results, self.html)

    def show(self, results: Results) -> None:
        """Write the files and print the table."""
        self.save(results)
        if results.rows:
            print_table(self.console, results)
        for path in (self.json, self.html):
            if path is not None and path.exists():
                self.say(f"written: {path}")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(options: Options, *, json: Path | None, html: Path | None) -> int:
    """Run the bench, print the table, write the files, and return the exit code.

    Rows that are finished are printed and written whatever ends the run. Raises BadInput before anything is started.
    """
    first = is_first()
    outputs = Outputs(console=Console(quiet=not first), json=json if first else None, html=html if first else None)
    session = Session(options, _describe(options))
    code, reason = _train(session, outputs)
    outputs.show(session.results(reason))
    if reason:
        Console(stderr=True).print(f"thinwire bench: {reason}", markup=False, highlight=False, soft_wrap=True)
    return code


def _train(session: Session, outputs: Outputs) -> tuple[int, str | None]:
    """Train every row, and return the exit code and what cut the run short, if anything did."""
    try:
        with _workers(session.options) as workers:
            outputs.say(f"{session.description}; {session.options.workers} workers; {workers.label}")
            with BenchProgress(outputs.console, rows=len(session.options.rows())) as progress:
                session.run(workers, progress, on_row=outputs.save)
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except WorkerDied as death:
        return DIED, f"{death}\n{death.reason}" if "\n" in death.reason.strip() else str(death)
    except SupervisorDied as death:
        return DIED, str(death)
    return 0, None


def print_listing() -> None:
    """Print the recipes and models."""
    console = Console()
    for title, entries in (
        ("recipe", {name: method.description for name, method in METHODS.items()}),
        ("model", {name: entry.summary for name, entry in PROBLEMS.items()}),
    ):
        table = Table(title, "what it is", box=None, title_justify="left")
        for name, text in entries.items():
            table.add_row(name, text)
        console.print(table)


def _describe(options: Options) -> str:
    """Build the problem once here, so that bad data ends the run before workers start."""
    problem = build(options.model, seed=options.seed, data=options.data, scale=options.scale)
    if options.pipeline > 1:
        check_stages(problem, options.pipeline, options.micro_batches)
    return problem.description


def _workers(options: Options) -> AbstractContextManager[Workers]:
    if in_group():
        return nullcontext(ThisGroup(handle))
    return Cluster(options.workers, options.rate, "thinwire.bench.worker:handle")
