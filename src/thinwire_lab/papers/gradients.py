"""Judge the claims that gradients decide, and measure every method's error on real gradients.

python -m thinwire_lab.papers.gradients --data DATA --json out.json [--paper fft]
"""

import json as js
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from thinwire.files import write_atomically
from thinwire_lab.inputs import prepare_file
from thinwire_lab.machine import environment
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared.claims import Paper, Verdict, judge
from thinwire_lab.papers.shared.errors import Measured, compressors, measure
from thinwire_lab.papers.shared.material import Material
from thinwire_lab.papers.shared.recording import available, record
from thinwire_lab.problems import Problem
from thinwire_lab.show.terminal import say

SCHEMA = "thinwire.fidelity/1"
STEPS, QUICK_STEPS = 200, 8


def main(
    paper: Annotated[list[str] | None, typer.Option(help="Only this paper's claims; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder with wikitext2, cifar10 and mnist in it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the document here.")] = None,
    steps: Annotated[int | None, typer.Option(min=3, help="Steps of each model, 200 or with --quick 8.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, densities and repetitions.")] = False,
) -> None:
    """Train, measure, judge, print verdicts, and write what came of it."""
    if unknown := set(paper or ()) - {each.name for each in PAPERS}:
        raise typer.BadParameter(f"no paper is called {', '.join(unknown)}")
    prepare_file(json)
    material, console = Material(runs=[], data=data, seed=seed, quick=quick), Console()
    asked = [each for each in PAPERS if not paper or each.name in paper]
    with Progress(console=console) as progress:
        taken = steps or (QUICK_STEPS if quick else STEPS)
        train(material, taken, console, progress)
        document = analyse(material, taken, progress, asked, errors=not paper)
    for claim in document["claims"]:
        say(console, f"{claim['id']}: {claim['verdict']}: {claim['figure']} ({claim['how']})", indent="  ")
    if json is not None:
        write_atomically(json, js.dumps(document, indent=1, allow_nan=False) + "\n")


def train(material: Material, steps: int, console: Console, progress: Progress) -> None:
    """Record every model whose data is available, and say which is not."""
    for model, problem in available(material.data, material.seed):
        if not isinstance(problem, Problem):
            console.print(f"skipping {model}: {problem}")
            continue
        tick = _ticks(progress, f"train {model}", steps)
        material.runs.append(record(problem, model, steps, material.quick, tick))


def analyse(
    material: Material, steps: int, progress: Progress, papers: Sequence[Paper], *, errors: bool = True
) -> dict[str, Any]:
    """Judge the papers' claims, and measure every method if `errors` are asked for. Return the document."""
    models = ", ".join(run.model for run in material.runs) or "none: no data"
    return {
        "schema": SCHEMA,
        "environment": environment(models=models, steps=steps, seed=material.seed),
        "errors": [asdict(row) for row in _errors(material, progress)] if errors else [],
        "claims": [asdict(verdict) for verdict in _verdicts(material, progress, papers)],
    }


def _errors(material: Material, progress: Progress) -> Iterator[Measured]:
    table, quick = list(compressors(material.quick)), material.quick
    for run in material.runs:
        tick = _ticks(progress, f"errors {run.model}", len(table) * (1 if quick else len(run.snapshots)))
        yield from measure(run, table, tick, material.seed, quick)


def _verdicts(material: Material, progress: Progress, papers: Sequence[Paper]) -> Iterator[Verdict]:
    tick = _ticks(progress, "claims", sum(len(paper.checks) for paper in papers))
    for paper in papers:
        yield from sorted(judge(paper.checks, material, tick), key=lambda verdict: int(verdict.id[1:]))


def _ticks(progress: Progress, text: str, total: int) -> Callable[[], None]:
    task = progress.add_task(text, total=total)
    return lambda: progress.advance(task)


if __name__ == "__main__":
    typer.run(main)
