"""From options to a report."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from thinwire_lab.bench.results import Results
from thinwire_lab.inputs import write_atomically
from thinwire_lab.machine import environment
from thinwire_lab.papers.shared import figures
from thinwire_lab.papers.shared.claims import Paper, Verdict, judge, number
from thinwire_lab.papers.shared.errors import Measured, compressors, measure
from thinwire_lab.papers.shared.material import Material, Run
from thinwire_lab.papers.shared.recording import all_steps, available, record
from thinwire_lab.papers.shared.report import Report
from thinwire_lab.problems import Problem

STEPS, QUICK_STEPS = 200, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for."""

    data: Path | None
    bench: Results | None
    json: Path | None
    html: Path | None
    png: Path | None
    steps: int
    seed: int
    quick: bool
    paper: Sequence[str]


def parse(arguments: Sequence[str], names: Sequence[str] = ()) -> Options:
    """Read the command line; `names` are those of the papers."""
    parser = argparse.ArgumentParser(
        prog="python -m thinwire_lab.papers.gradients", description="The papers' claims, and errors on real gradients."
    )
    parser.add_argument(
        "--paper",
        action="append",
        default=[],
        choices=names or None,
        help="only this paper's claims, and no table of errors; may be repeated",
    )
    parser.add_argument("--data", type=Path, help="a folder with wikitext2, cifar10 and mnist in it")
    parser.add_argument(
        "--bench", type=_document, help="a document of `thinwire bench --link none --json`, for the frontier"
    )
    parser.add_argument("--json", type=Path, help="where to write the document")
    parser.add_argument("--html", type=Path, help="where to write the page")
    parser.add_argument("--png", type=Path, help="a folder for the figures; papers, to renew those beside the READMEs")
    parser.add_argument(
        "--steps", type=int, help=f"training steps of each model, {STEPS} or {QUICK_STEPS} with --quick"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer steps, densities and repetitions")
    found = vars(parser.parse_args(arguments))
    if found["steps"] is not None and found["steps"] < 3:
        parser.error("--steps must be 3 or more: the gradients are taken early, halfway and late")
    found["steps"] = found["steps"] or (QUICK_STEPS if found["quick"] else STEPS)
    return Options(**found)


def _document(path: str) -> Results:
    """Read a document now, to refuse an unfit one before any training."""
    try:
        return Results.read(Path(path))
    except (OSError, ValueError) as wrong:
        raise argparse.ArgumentTypeError(f"{path}: {wrong}") from wrong


def main(arguments: Sequence[str], papers: Sequence[Paper]) -> None:
    """Run, then write and print the results."""
    options, console = parse(arguments, [paper.name for paper in papers]), Console()
    asked = [paper for paper in papers if paper.name in options.paper] or papers
    with Progress(console=console) as progress:
        runs = train(options, console, progress)
        report = analyse(runs, options, progress, asked)
    report.show(console)
    write(report, options, console)


def train(options: Options, console: Console, progress: Progress) -> list[Run]:
    """Record every model whose data is available, and say which is not."""
    runs = []
    for model, problem in available(options.data, options.seed):
        if not isinstance(problem, Problem):
            console.print(f"skipping {model}: {problem}")
            continue
        tick = _ticks(progress, f"train {model}", all_steps(options.steps))
        runs.append(record(problem, model, options.steps, options.quick, tick))
    return runs


def analyse(runs: list[Run], options: Options, progress: Progress, papers: Sequence[Paper]) -> Report:
    """Measure every method, unless only some papers were asked for; judge their claims and draw their figures."""
    rows = [] if options.paper else list(_errors(runs, options, progress))
    material = Material(runs=runs, data=options.data, seed=options.seed, quick=options.quick)
    facts = {
        "models": ", ".join(run.model for run in runs) or "none: no data",
        "steps": options.steps,
        "seed": options.seed,
    }
    return Report(
        environment=environment(**facts),
        errors=rows,
        claims=list(_verdicts(material, progress, papers)),
        sheets=[tabulate(runs) for paper in papers for tabulate in paper.tables],
        figures=draw(runs, rows, options.bench, papers),
    )


def _errors(runs: list[Run], options: Options, progress: Progress) -> Iterator[Measured]:
    table = list(compressors(options.quick))
    for run in runs:
        tick = _ticks(progress, f"errors {run.model}", len(table) * (1 if options.quick else len(run.snapshots)))
        yield from measure(run, table, tick, options.seed, options.quick)


def _verdicts(material: Material, progress: Progress, papers: Sequence[Paper]) -> Iterator[Verdict]:
    tick = _ticks(progress, "claims", sum(len(paper.checks) for paper in papers))
    for paper in papers:
        yield from sorted(_ticked(judge(paper.checks, material), tick), key=number)


def _ticked(verdicts: Iterable[Verdict], tick: Callable[[], None]) -> Iterator[Verdict]:
    for verdict in verdicts:
        yield verdict
        tick()


def draw(
    runs: list[Run], rows: list[Measured], bench: Results | None, papers: Sequence[Paper]
) -> dict[str, tuple[str, Figure]]:
    """Return captions and figures by file name. There are fewer without gradients or a bench document."""
    found: dict[str, tuple[str, Figure]] = {}
    if rows:
        caption = "Error over bytes: squared relative error of the mean gradient, late in training."
        found["errors"] = caption, figures.error_over_bytes(rows)
    for paper in papers if runs else ():
        for name, (caption, make) in paper.figures.items():
            found[f"{paper.name}/{name}"] = caption, make(runs)
    if bench is not None:
        found["frontier"] = "Loss over bytes: the frontier.", figures.frontier(bench)
    return found


def write(report: Report, options: Options, console: Console) -> None:
    """Write what was asked for."""
    if options.bench is None:
        console.print("no --bench document: the frontier of loss over bytes is left out")
    if options.json is not None:
        write_atomically(options.json, json.dumps(report.document(), indent=1, allow_nan=False) + "\n")
    if options.html is not None:
        write_atomically(options.html, report.html())
    if options.png is not None:
        for name, (_, figure) in report.figures.items():
            path = options.png / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)


def _ticks(progress: Progress, text: str, total: int) -> Callable[[], None]:
    task = progress.add_task(text, total=total)
    return lambda: progress.advance(task)
