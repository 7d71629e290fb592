"""DCT-MP: what sparsified boundaries between pipeline stages do to training.

    python -m thinwire_lab.papers.dct.model_parallel accuracy --json out.json
    python -m thinwire_lab.papers.dct.model_parallel figures --json figures.json

`accuracy`: losses and accuracies of every method of the paper, on every seed, as in its Tables 1, 4, 6, 7, 8.
`figures`: thresholds over training, which law activations follow, and how far a fitted threshold strays.
Step times are those of `thinwire_lab.studies.pipeline`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary
from thinwire_lab.inputs import BadInput, prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.papers.dct.looking import DENSITIES, activations, criteria, follow
from thinwire_lab.papers.dct.rows import Row, rows
from thinwire_lab.papers.dct.training import Document, Material, run
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.base import parts_of
from thinwire_lab.show.terminal import report_console

SCHEMA = "thinwire.pipeline_figures/1"
DENSE = "dense"
Make = Callable[[], Boundary | None]


def trainings() -> dict[str, Make]:
    """The modules to put at the first cut, by name."""
    found: dict[str, Make] = {DENSE: lambda: None}
    for each in DENSITIES:
        found[f"exact {each:g}"] = lambda each=each: TopKBoundary(each)  # type: ignore[misc]
        found[f"Laplace {each:g}"] = lambda each=each: LaplaceBoundary(each)  # type: ignore[misc]
        found[f"Laplace {each:g}, unbounded"] = lambda each=each: LaplaceBoundary(each, bound=1 / each)  # type: ignore[misc]
    return found


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except BadInput as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def figures(
    json: Annotated[Path, typer.Option(help="Write them here, after each training.")],
    problem: Annotated[str, typer.Option(help="One that can be split into stages.")] = "dlrm",
    data: Annotated[Path | None, typer.Option(help="The problem's data, where it is not generated.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
) -> None:
    """Train with and without a boundary at the first cut, and note what the activations did."""
    console = report_console()
    with _refusing():
        prepare_file(json)
        built = build(problem, seed=seed, data=data)
        parts_of(built)  # which refuses what cannot be split
    count = steps or STEPS.get(problem, OTHERWISE)
    document: dict[str, Any] = {
        "environment": environment(),
        "settings": {"description": built.description, "steps": count, "seed": seed},
        "runs": {},
        "shapes": {},
    }
    material = Material(problem=built, batches=[built.batch(step, 0, 1) for step in range(count)])
    for name, make in trainings().items():
        with console.status(f"{name}, {count} steps"):
            network, looks = follow(material, make())
            if name == DENSE:
                placed = activations(network, material).items()
                document["shapes"] = {place: {"aic": criteria(x.double())} for place, x in placed}
            document["runs"][name] = [asdict(each) for each in looks]
        write_document(json, SCHEMA, **document)


STEPS = {"dlrm": 1500}
OTHERWISE = 300


def accuracy(
    json: Annotated[Path, typer.Option(help="Write the runs here, after each.")],
    problem: Annotated[list[str] | None, typer.Option(help="Of dlrm, transformer, mlp; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="The problem's data, where it is not generated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, of initial weights and of the order of the data.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.  [default: 1500 of dlrm, else 300]")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only rows with this in their name, and what they need; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Skip the runs that the document has.")] = False,
) -> None:
    """Train unsplit with boundaries where a split would be, and compare losses."""
    console, problems = report_console(), problem or ["dlrm", "transformer"]
    with _refusing():
        prepare_file(json)
        document = Document.read(json) if resume and json.exists() else Document(environment=environment())
        plans = [(seed, build(name, seed=seed, data=data)) for seed in range(seeds) for name in problems]
        for _, built in plans:
            parts_of(built)
            _agree(document, built, steps or STEPS.get(built.name, OTHERWISE))
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(len(_missing(document, *plan, only)) for plan in plans))
        for seed, built in plans:
            for row in _runs(document, built, seed, _missing(document, seed, built, only)):
                progress.update(task, advance=1, description=f"{built.name}, seed {seed}, {row.name}")
                document.write(json)
    document.write(json)
    for name in problems:
        for row in rows(name):
            losses = [f"{run.held_out_loss:.4f}" for run in document.of(name, row.name)]
            console.print(f"{name} | {row.name}: held-out loss {', '.join(losses)}" if losses else "", highlight=False)


def _agree(document: Document, problem: Problem, steps: int) -> None:
    """Note what the runs share. Raises BadInput if the document's runs are of something else."""
    samples = len(problem.batch(0, 0, 1)[0])
    setting = {"description": problem.description, "steps": steps, "samples": samples}
    before = document.settings.get(problem.name)
    if before != setting and any(run.problem == problem.name for run in document.runs.values()):
        raise BadInput(f"the document has runs of {before}, not of {setting}; name another with --json")
    document.settings[problem.name] = setting


def _missing(document: Document, seed: int, problem: Problem, only: Sequence[str] | None) -> list[Row]:
    """Return what has yet to run of the rows asked for, dense's, and those whose density they take."""
    baseline, *others = rows(problem.name)
    asked = [row for row in others if any(each in row.name for each in only or [""])]
    names = {baseline.name} | {name for row in asked for name in (row.name, row.like)}
    return [
        row for row in rows(problem.name) if row.name in names and (problem.name, row.name, seed) not in document.runs
    ]


def _runs(document: Document, problem: Problem, seed: int, missing: Sequence[Row]) -> Iterator[Row]:
    """Run what is missing, and yield each row once it is there."""
    steps = document.settings[problem.name]["steps"] if missing else 0
    material = Material(problem=problem, batches=[problem.batch(step, 0, 1) for step in range(steps)])
    for row in missing:
        density = 1 - row.sparsity if row.like is None else document.runs[problem.name, row.like, seed].kept
        found = run(material, row.name, seed, density, row.cuts, row.inside, lambda: row.make(density, seed))  # noqa: B023
        document.add(found)
        yield row


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.command()(accuracy)
app.command()(figures)


@app.callback()
def threads(count: int = typer.Option(1, "--threads", min=1, help="Threads of torch and of the kernels.")) -> None:
    """Set how many threads compute."""
    torch.set_num_threads(count)


if __name__ == "__main__":
    app()
