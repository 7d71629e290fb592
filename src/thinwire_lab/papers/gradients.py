"""Judge the claims that gradients decide, and measure every method's error on real gradients.

python -m thinwire_lab.papers.gradients --data DATA --json out.json [--paper fft]
"""

import json as js
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from thinwire.files import write_atomically
from thinwire_lab.machine import environment
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared.claims import Paper, Verdict, judge
from thinwire_lab.papers.shared.errors import Measured, compressors, measure
from thinwire_lab.papers.shared.material import Material, Run
from thinwire_lab.papers.shared.recording import available, record
from thinwire_lab.problems import Problem
from thinwire_lab.show.terminal import say

SCHEMA = "thinwire.fidelity/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Errors and verdicts."""

    environment: Mapping[str, Any]
    errors: Sequence[Measured]
    claims: Sequence[Verdict]

    def document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows, claims = ([asdict(each) for each in some] for some in (self.errors, self.claims))
        return {"schema": SCHEMA, "environment": dict(self.environment), "errors": rows, "claims": claims}

    def show(self, console: Console) -> None:
        """Print the verdicts; all else is in the document."""
        for claim in self.claims:
            say(console, f"{claim.id}: {claim.verdict}: {claim.figure} ({claim.how})", indent="  ")


STEPS, QUICK_STEPS = 200, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. paper: only these papers' claims, and no table of errors."""

    data: Path | None = None
    steps: int = STEPS
    seed: int = 0
    quick: bool = False
    paper: Sequence[str] = field(default=())


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
    taken = steps or (QUICK_STEPS if quick else STEPS)
    options, console = Options(data=data, steps=taken, seed=seed, quick=quick, paper=paper or ()), Console()
    asked = [each for each in PAPERS if each.name in options.paper] or PAPERS
    with Progress(console=console) as progress:
        report = analyse(train(options, console, progress), options, progress, asked)
    report.show(console)
    if json is not None:
        write_atomically(json, js.dumps(report.document(), indent=1, allow_nan=False) + "\n")


def train(options: Options, console: Console, progress: Progress) -> list[Run]:
    """Record every model whose data is available, and say which is not."""
    runs = []
    for model, problem in available(options.data, options.seed):
        if not isinstance(problem, Problem):
            console.print(f"skipping {model}: {problem}")
            continue
        tick = _ticks(progress, f"train {model}", options.steps)
        runs.append(record(problem, model, options.steps, options.quick, tick))
    return runs


def analyse(runs: list[Run], options: Options, progress: Progress, papers: Sequence[Paper]) -> Report:
    """Measure every method, unless only some papers were asked for; judge their claims."""
    rows = [] if options.paper else list(_errors(runs, options, progress))
    material = Material(runs=runs, data=options.data, seed=options.seed, quick=options.quick)
    models = ", ".join(run.model for run in runs) or "none: no data"
    return Report(
        environment=environment(models=models, steps=options.steps, seed=options.seed),
        errors=rows,
        claims=list(_verdicts(material, progress, papers)),
    )


def _errors(runs: list[Run], options: Options, progress: Progress) -> Iterator[Measured]:
    table = list(compressors(options.quick))
    for run in runs:
        tick = _ticks(progress, f"errors {run.model}", len(table) * (1 if options.quick else len(run.snapshots)))
        yield from measure(run, table, tick, options.seed, options.quick)


def _verdicts(material: Material, progress: Progress, papers: Sequence[Paper]) -> Iterator[Verdict]:
    tick = _ticks(progress, "claims", sum(len(paper.checks) for paper in papers))
    for paper in papers:
        yield from sorted(judge(paper.checks, material, tick), key=lambda verdict: int(verdict.id[1:]))


def _ticks(progress: Progress, text: str, total: int) -> Callable[[], None]:
    task = progress.add_task(text, total=total)
    return lambda: progress.advance(task)


if __name__ == "__main__":
    typer.run(main)
