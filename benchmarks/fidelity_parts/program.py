"""From options to a report."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from fidelity_parts import (  # noqa: F401 - importing registers their checks
    claims_bytes,
    claims_convex,
    claims_dct,
    claims_dragonn,
    claims_fft,
    claims_gtopk,
    claims_lemmas,
    claims_s2,
    figures,
)
from fidelity_parts.claims import CHECKS, Verdict, in_order, judge, untestable
from fidelity_parts.elsewhere import ELSEWHERE
from fidelity_parts.errors import Measured, measure
from fidelity_parts.material import Material, Run
from fidelity_parts.methods import methods
from fidelity_parts.recording import available, record
from fidelity_parts.report import Report, environment
from fidelity_parts.tuning import tuned
from thinwire.tools.bench.results import Results
from thinwire.tools.inputs import write_atomically
from thinwire.tools.problems import Problem

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


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="fidelity.py", description="Errors on real gradients, and the papers' claims."
    )
    parser.add_argument("--data", type=Path, help="a folder with wikitext2, cifar10 and mnist in it")
    parser.add_argument(
        "--bench", type=_document, help="a document of `thinwire bench --link none --json`, for the frontier"
    )
    parser.add_argument("--json", type=Path, help="where to write the document")
    parser.add_argument("--html", type=Path, help="where to write the page")
    parser.add_argument("--png", type=Path, help="a folder for the figures")
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
    """Read a document now, so that one that is unfit is refused before any training."""
    try:
        return Results.read(Path(path))
    except (OSError, ValueError) as wrong:
        raise argparse.ArgumentTypeError(f"{path}: {wrong}") from wrong


def main(arguments: Sequence[str]) -> None:
    """Run, and write and print what was found."""
    options, console = parse(arguments), Console()
    with Progress(console=console) as progress:
        runs = train(options, console, progress)
        report = analyse(runs, options, progress)
    report.show(console)
    write(report, options, console)


def train(options: Options, console: Console, progress: Progress) -> list[Run]:
    """Record every model whose data is there, and say which is not."""
    runs = []
    for model, problem in available(options.data, options.seed):
        if not isinstance(problem, Problem):
            console.print(f"skipping {model}: {problem}")
            continue
        tick = _ticks(progress, f"train {model}", options.steps)
        runs.append(record(problem, model, options.steps, options.quick, tick))
    return runs


def analyse(runs: list[Run], options: Options, progress: Progress) -> Report:
    """Measure every method, judge every claim and draw every figure."""
    table = list(methods(options.quick))
    rows: list[Measured] = []
    for run in runs:
        tick = _ticks(progress, f"errors {run.model}", len(table) * (1 if options.quick else len(run.snapshots)))
        rows += measure(run, table, tick, options.seed, options.quick)
    material = Material(runs=runs, data=options.data, seed=options.seed, quick=options.quick)
    tick, verdicts = _ticks(progress, "claims", len(CHECKS)), list[Verdict]()
    for verdict in judge(material):
        verdicts.append(verdict)
        tick()
    claims = sorted([*verdicts, *untestable(ELSEWHERE)], key=in_order)
    facts = {
        "models": ", ".join(run.model for run in runs) or "none: no data",
        "steps": options.steps,
        "seed": options.seed,
    }
    return Report(
        environment=environment(facts),
        errors=rows,
        claims=claims,
        tuning=[row for run in runs for row in tuned(run)],
        figures=draw(runs, rows, options.bench),
    )


def draw(runs: list[Run], rows: list[Measured], bench: Results | None) -> dict[str, Figure]:
    """Return the figures by caption; without gradients, and without a bench document, fewer."""
    found = {}
    if runs:
        found["Error over bytes: squared relative error of the mean gradient, late in training."] = (
            figures.error_over_bytes(rows)
        )
        found["Distribution of the absolute error, θ = 0.85."] = figures.error_distribution(runs)
        found["The constant of Assumption 3.2 over training."] = figures.alpha_over_training(runs)
        found["Exact 95 % thresholds over training."] = figures.threshold_drift(runs)
    if bench is not None:
        found["Loss over bytes: the frontier."] = figures.frontier(bench)
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
        options.png.mkdir(parents=True, exist_ok=True)
        for place, figure in enumerate(report.figures.values(), 1):
            figure.savefig(options.png / f"fidelity-{place}.png")


def _ticks(progress: Progress, text: str, total: int) -> Callable[[], None]:
    task = progress.add_task(text, total=total)
    return lambda: progress.advance(task)
