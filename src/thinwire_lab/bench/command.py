"""`thinwire bench`, from checked options to printed table and written files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import Options
from thinwire_lab.bench.plots import loss_over_seconds
from thinwire_lab.bench.report import html, left_out, print_report
from thinwire_lab.bench.results import Results
from thinwire_lab.bench.session import Session
from thinwire_lab.bench.worker import handle
from thinwire_lab.cluster.workers import ended, is_first, started
from thinwire_lab.problems import PROBLEMS, build
from thinwire_lab.problems.base import check_stages
from thinwire_lab.show.page import Files
from thinwire_lab.show.progress import BenchProgress
from thinwire_lab.show.terminal import complain, print_raw, print_written, say


def run(options: Options, **files: Path | None) -> int:
    """Run the bench, print the table, write the `files`, and return the exit code.

    Finished rows are printed and written, whatever ends the run. Raises BadInput before anything starts.
    """
    first = is_first()
    console, wanted = Console(quiet=not first), Files(**(files if first else {}))
    description = _describe(options)
    sessions = [Session(act, description) for act in options.acts]
    code = 1
    reason: str | None = "an error ended the run"
    try:
        code, reason = ended(
            lambda: _train(sessions, console, lambda: _save(wanted, _joined(sessions, "the run goes on")))
        )
    finally:
        results = _joined(sessions, reason)
        if results.rows:
            print_report(console, results)
        _save(wanted, results)
    print_written(console, wanted.paths if results.rows else (wanted.json, wanted.html))
    if reason:
        complain("bench", reason)
    return code


def _save(files: Files, results: Results) -> None:
    figure = partial(loss_over_seconds, results) if results.rows else None
    files.write(results.to_json(), partial(html, results), figure)


def _joined(sessions: Sequence[Session], reason: str | None) -> Results:
    """Return what was measured in all acts that have begun."""
    first, *later = sessions
    found = first.results(reason)
    if later and later[0].begun:
        return replace(found, then=_joined(later, reason))
    if later:  # whatever this act has, the run does not end with it
        return replace(found, environment={**found.environment, "complete": False, "reason": reason})
    return found


def _train(sessions: Sequence[Session], console: Console, save: Callable[[], None]) -> None:
    options = sessions[0].options
    with started(options.processes, options.rate, handle, options.island) as workers:
        count = "1 worker" if options.workers == 1 else f"{options.workers} workers"
        print_raw(console, f"{sessions[0].description}; {count}; {workers.label}")
        if options.left_out:
            print_raw(console, left_out(options.left_out, options.optimizer))
        rows = sum(len(session.options.rows()) * session.options.seeds for session in sessions)
        progress = BenchProgress(console, rows=rows)
        with progress.bars:
            for session in sessions:
                if len(sessions) > 1:
                    print_raw(console, f"{session.options.optimizer}, {session.options.steps} steps:")
                session.run(workers, progress, on_row=save)


def print_listing() -> None:
    """Print the recipes and models."""
    console = Console()
    for title, entries in (
        ("recipe", {name: method.description for name, method in BENCHED.items()}),
        ("model", {name: entry.summary for name, entry in PROBLEMS.items()}),
    ):
        width = max(map(len, (title, *entries)))
        say(console, f"{title:{width}}  what it is", "bold")
        for name, text in entries.items():
            say(console, f"{name:{width}}  {text}", indent=" " * (width + 2))


def _describe(options: Options) -> str:
    """Build the problem once here, so that bad data ends the run before workers start."""
    problem = build(options.model, seed=options.seed, data=options.data, scale=options.scale)
    if options.pipeline > 1:
        check_stages(problem, options.pipeline, options.micro_batches)
    return problem.description
