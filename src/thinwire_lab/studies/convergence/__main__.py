"""What does each recipe cost in loss under each optimizer, and how many bits does it send?

    python -m thinwire_lab.studies.convergence run runs.jsonl --optimizer "adamw(betas=(0.9, 0.95))" --rate 1e-3,3e-3
    python -m thinwire_lab.studies.convergence run runs.jsonl --recipe "topk()" --recipe "powersgd(rank=4)" --seeds 0,1
    python -m thinwire_lab.studies.convergence run runs.jsonl --recipe "sparseloco(every=30)"
    python -m thinwire_lab.studies.convergence run runs.jsonl --scale 150 --device cuda --autocast --batch 8
    python -m thinwire_lab.studies.convergence contest large.jsonl --scale 150 --device cuda --autocast --batch 8
    python -m thinwire_lab.studies.convergence table runs.jsonl

One process trains with virtual workers: a thread for each rank, its own replica, optimizer and `thinwire.replicate`.
There is no network; cluster/virtual.py says what takes its place, and that sums have the bits of Gloo's. So a
run ends with the bits of real workers that use `replicate`. With attach and DDP it does too for two workers; with more,
DDP's other buckets make the ring add in another order.

Recipes and optimizers are expressions: what thinwire.recipes has, or parts put together, as in `MinimumSize(...)`; and
`sgd`, `adamw`, `muon` of optimizers.py. Outer steps may stand in a recipe's place, as in
`OuterSteps(every=10, recipe=topk(), make_optimizer=partial(torch.optim.SGD, lr=1.0))`. The held-out loss then is that
of the global parameters, so let H divide the steps. Every run is a line in a file, and what the file has of this
version is not run again. `bits`: payload bytes · 8 / parameters, a mean over workers and steps, headers and indices
included. A payload counts once, however often the exchange has it travel.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from thinwire_lab.inputs import append_line, prepare_file
from thinwire_lab.machine import TODAY, code
from thinwire_lab.problems import build
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_raw, print_table
from thinwire_lab.studies.convergence.optimizers import Schedule
from thinwire_lab.studies.convergence.results import read, several
from thinwire_lab.studies.convergence.training import DATA, Run, Settings, problem_of, text_of, train

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

File = Annotated[Path, typer.Argument(help="The runs, as JSON lines.")]
Model = Annotated[str, typer.Option(help=f"transformer, {', '.join(DATA)}, or another of `thinwire bench`.")]
WarmUp = Annotated[int, typer.Option(help="Steps over which the learning rate rises.")]
Workers = Annotated[int, typer.Option(help="Virtual workers.")]
Samples = Annotated[int | None, typer.Option(help="Samples per worker and step, if not the model's own.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder that holds cifar10/, wikitext2/ and mnist/; the transformer needs none.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Scale = Annotated[float, typer.Option(help="Size of the model transformer or xml; 1 is 0.83 M or 126.7 M parameters.")]
Autocast = Annotated[bool, typer.Option("--autocast", help="Forward in bfloat16, other products in TF32.")]


class Entry(NamedTuple):
    """A recipe under an optimizer, and the rate at which its search begins."""

    recipe: str
    optimizer: str
    rate: float


ENTRIES = (
    Entry("dense()", "adamw(betas=(0.8, 0.95))", 1e-3),
    Entry("dense()", "adamw(betas=(0.9, 0.95))", 1e-3),
    Entry("dense()", "muon()", 3e-3),
    Entry("orthogonal()", "adamw(betas=(0.9, 0.9), small=(0.9, 0.95))", 2e-3),
    Entry("fading(density=0.025, decay=None)", "adamw(betas=(0.95, 0.9))", 2e-3),
    Entry("sparseloco(every=30)", "muon()", 3e-3),
    Entry("topk(density=0.01)", "adamw(betas=(0.9, 0.95))", 1e-3),
    Entry("powersgd(rank=4)", "adamw(betas=(0.9, 0.95))", 1e-3),
)


@app.command("run")
def run_all(
    file: File,
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe; may be repeated.")] = None,
    optimizer: Annotated[list[str] | None, typer.Option(help="An optimizer; may be repeated.")] = None,
    rate: Annotated[str, typer.Option(help="Learning rates.")] = "2e-3",
    seeds: Annotated[str, typer.Option(help="Seeds, of initial weights and of batches.")] = "0",
    model: Model = "transformer",
    schedule: Annotated[Schedule, typer.Option(help="After the warm-up; drop: to a tenth after 70 %.")] = "constant",
    warm_up: WarmUp = 20,
    steps: Annotated[int, typer.Option(help="Steps.")] = 300,
    workers: Workers = 4,
    batch: Samples = None,
    data: Data = None,
    elsewhere: Annotated[
        Path | None, typer.Option(help="Data of another kind, on which to look at the accuracy, too.")
    ] = None,
    device: Device = "cpu",
    scale: Scale = 1.0,
    autocast: Autocast = False,
    anew: Annotated[bool, typer.Option("--anew", help="Run again what other sources of this version wrote.")] = False,
) -> None:
    """Train with every combination that the file does not have, and add each to it."""
    asked = {name: value for name, value in locals().items() if name in Settings.__dataclass_fields__}
    asked |= {"data": text_of(model, data), "elsewhere": "/".join(elsewhere.parts[-2:]) if elsewhere else ""}
    combinations = product(
        recipe or ["dense()"], optimizer or ["adamw()"], map(float, rate.split(",")), map(int, seeds.split(","))
    )
    for each, by, at, seed in combinations:
        settings = Settings(**asked | {"recipe": each, "optimizer": by, "rate": at, "seed": seed})
        _run(settings, file, data, elsewhere, anew)


@app.command("contest")
def compete(
    file: File,
    entry: Annotated[
        list[str] | None, typer.Option(help="Who takes part: recipe; optimizer; rate to begin at. May be repeated.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the finals; the search takes the first.")] = "0,1,2",
    search: Annotated[int, typer.Option(help="Steps of the search for each entry's best rate.")] = 250,
    finals: Annotated[int, typer.Option(help="Entries in the finals, beside the best of dense AdamW.")] = 4,
    model: Model = "transformer",
    schedule: Annotated[Schedule, typer.Option(help="After the warm-up.")] = "cosine",
    warm_up: WarmUp = 20,
    steps: Annotated[int, typer.Option(help="Steps of the finals.")] = 2000,
    workers: Workers = 4,
    batch: Samples = None,
    data: Data = None,
    device: Device = "cpu",
    scale: Scale = 1.0,
    autocast: Autocast = False,
) -> None:
    """Find each entry's best rate, then run the best of them with several seeds. What the file has is not run again.

    A rate is best once half and twice of it end higher. Searches are shorter than the finals, so that a rate that only
    a long training wants is missed. The best of `dense()` under AdamW is in the finals, wherever it ends.
    """
    asked = {name: value for name, value in locals().items() if name in Settings.__dataclass_fields__}
    named, every = [each.split(";") for each in entry or ()], list(map(int, seeds.split(",")))
    entries = [Entry(recipe.strip(), by.strip(), float(rate)) for recipe, by, rate in named] or ENTRIES
    asked |= {"data": text_of(model, data), "steps": search, "seed": every[0]}
    run = partial(_run, file=file, data=data)
    found = sorted((_searched(Settings(**asked | each._asdict()), run) for each in entries), key=_loss)
    settings = [best.settings for best in found]
    dense = [each for each in settings if each.recipe == "dense()" and "adamw" in each.optimizer]
    for each in dict.fromkeys([*settings[:finals], *dense[:1]]):
        for seed in every:
            run(replace(each, steps=steps, seed=seed))


def _searched(settings: Settings, run: Callable[[Settings], Run]) -> Run:
    best = run(settings)
    while True:
        rate = best.settings.rate
        better = min(best, *(run(replace(best.settings, rate=times * rate)) for times in (0.5, 2)), key=_loss)
        if better is best:
            return best
        best = better


def _loss(run: Run) -> float:
    return run.loss if math.isfinite(run.loss) else math.inf


def _run(settings: Settings, file: Path, data: Path | None, elsewhere: Path | None = None, anew: bool = False) -> Run:
    """Return this version's run of the file, or train, and add it."""
    for run in read(file):
        if run.settings == settings and run.thinwire == TODAY and (not anew or run.made.get("code") == code()):
            return run
    prepare_file(file)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if settings.autocast else "highest")
    model, seed, scale = settings.model, settings.seed, settings.scale
    other = build(model, seed=seed, data=elsewhere, scale=scale) if elsewhere else None
    done = train(settings, problem_of(model, seed, data, scale), other=other)
    append_line(file, done.document())
    print_raw(console, _line(done))
    return done


@app.command("table")
def tabulate(file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The runs.")]) -> None:
    """Print the runs, best first: means and standard deviations over seeds. To see some, grep the file's lines."""
    print_table(console, plain(several(read(file))))


def _line(run: Run) -> str:
    settings = run.settings
    return (
        f"{settings.model}, {settings.workers} workers, {run.looks[-1].step} steps, {settings.recipe} "
        f"{settings.optimizer}, lr {settings.rate:g}, seed {settings.seed}: loss {run.loss:.4f} at {run.bits:.3f} bit, "
        f"{run.seconds:.2f} s a step"
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    app()
