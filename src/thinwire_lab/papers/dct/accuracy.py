"""`accuracy`: every row of the comparison, on every seed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from thinwire_lab.inputs import BadInput
from thinwire_lab.machine import environment
from thinwire_lab.papers.dct.results import Document, Unfit, table, title
from thinwire_lab.papers.dct.rows import Row, rows
from thinwire_lab.papers.dct.training import Material, run
from thinwire_lab.problems import Problem, build
from thinwire_lab.show.table import markdown
from thinwire_lab.show.terminal import print_titled

STEPS = {"dlrm": 1500}
OTHERWISE = 300


def accuracy(
    json: Annotated[Path, typer.Option(help="Write the runs here, after each.")],
    problem: Annotated[list[str] | None, typer.Option(help="Of dlrm, transformer, mlp; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="The problem's data, where it is not generated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, of initial weights and of the order of the data.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.  [default: 1500 of dlrm, else 300]")] = None,
    only: Annotated[str, typer.Option(help="Only rows with this in their name, and what they need.")] = "",
    resume: Annotated[bool, typer.Option(help="Skip the runs that the document has.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the tables here, as Markdown.")] = None,
) -> None:
    """Train unsplit with boundaries where a split would be, and compare losses."""
    console, problems = Console(width=None if sys.stdout.isatty() else 150), problem or ["dlrm", "transformer"]
    try:
        document = Document.read(json) if resume and json.exists() else Document(environment=environment())
        plans = [(seed, _built(name, seed, data)) for seed in range(seeds) for name in problems]
        for _, built in plans:
            _agree(document, built, steps or STEPS.get(built.name, OTHERWISE))
    except (BadInput, Unfit, OSError) as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(1 for _, built in plans for _ in _chosen(built, only)))
        for seed, built in plans:
            for row in _runs(document, built, seed, only):
                progress.update(task, advance=1, description=f"{built.name}, seed {seed}, {row.name}")
                document.write(json)
    document.write(json)
    for name in problems:
        print_titled(console, table(document, name))
    if page is not None:
        page.write_text(
            "\n\n".join(f"{title(document, name)}\n\n{markdown(table(document, name))}" for name in problems) + "\n"
        )


def _built(name: str, seed: int, data: Path | None) -> Problem:
    found = build(name, seed=seed, data=data)
    if found.parts is None:
        raise BadInput(f"the model {name} does not fall into stages")
    return found


def _agree(document: Document, problem: Problem, steps: int) -> None:
    """Note what the runs share. Raises Unfit if the document's runs are of something else."""
    samples = len(problem.batch(0, 0, 1)[0])
    setting = {"description": problem.description, "steps": steps, "samples": samples}
    before = document.settings.get(problem.name)
    if before != setting and any(run.problem == problem.name for run in document.runs.values()):
        raise Unfit(f"the document has runs of {before}, not of {setting}; name another with --json")
    document.settings[problem.name] = setting


def _chosen(problem: Problem, only: str) -> Iterator[Row]:
    baseline, *others = rows(problem.name)
    taken_from = {row.like for row in others if only in row.name}
    yield from (baseline, *(row for row in others if only in row.name or row.name in taken_from))


def _runs(document: Document, problem: Problem, seed: int, only: str) -> Iterator[Row]:
    """Run what is missing, and yield every row once it is complete."""
    steps = document.settings[problem.name]["steps"]
    material = Material(problem=problem, batches=[problem.batch(step, 0, 1) for step in range(steps)])
    for row in _chosen(problem, only):
        if (problem.name, row.name, seed) not in document.runs:
            density = _density(document, problem, row, seed)
            found = run(material, row.name, seed, density, row.cuts, row.inside, lambda: row.make(density, seed))  # noqa: B023
            document.add(found)
        yield row


def _density(document: Document, problem: Problem, row: Row, seed: int) -> float:
    """The density of a row: its own, or the real density of the row it is compared with."""
    if row.like is None:
        return 1 - row.sparsity
    return document.runs[problem.name, row.like, seed].kept
