"""When is training at dense bf16's loss, over links from 10 Mbit/s to 10 Gbit/s? Steps measured, their time predicted.

    for optimizer in sgd adamw muon; do
        thinwire plan --optimizer $optimizer --candidates bf16,sampled_topk,orthogonal --save-profile $optimizer.json
    done
    python -m thinwire_lab.studies.thin_links runs.jsonl --profiles . --png thin-links.png

The runs are those of `studies.convergence`, with 2, 4 and 8 virtual workers: of each optimizer uncompressed, and with
the method that suits it best. A profile has what computing and coding take. The planner predicts a step of that over
each link; every worker has a core of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from thinwire.exchanges import AllGather
from thinwire.planner import Profile, step_seconds
from thinwire_lab.apart import Scheme
from thinwire_lab.bench.rows import first_at
from thinwire_lab.inputs import parse_link
from thinwire_lab.show.canvas import COLOURS, FAINT, blank, head, legend, log_ticks, name, restrain
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.studies.convergence import results
from thinwire_lab.studies.convergence.training import Run

RATES = ("10mbit", "25mbit", "100mbit", "300mbit", "1gbit", "10gbit")
WORLDS = (2, 4, 8)
SMALLEST = 1024  # elements: smaller tensors stay uncompressed


class Method(NamedTuple):
    """What may stand in for an optimizer's dense training: a recipe, as runs name it, and the seconds of its step.

    under: the optimizer that it trains with.
    """

    optimizer: str
    under: str
    recipe: str
    seconds: Callable[[Profile, Sequence[Run]], float]


class Cell(NamedTuple):
    """Seconds to dense's loss of an optimizer: of bf16, of the fastest method here, and of computing alone.

    more: how many times dense's steps that method takes.
    """

    optimizer: str
    recipe: str
    workers: int
    rate: str
    more: float
    bf16: float
    best: float
    free: float


def _candidate(name: str) -> Callable[[Profile, Sequence[Run]], float]:
    return lambda profile, _runs: step_seconds(
        profile, {g.name: name for g in profile.timeline.gradients if g.numel >= SMALLEST}
    )


def _apart(every: int) -> Callable[[Profile, Sequence[Run]], float]:
    """Return what predicts a step with outer steps, which send as many bits as the runs did."""

    def seconds(profile: Profile, runs: Sequence[Run]) -> float:
        bits = every * fmean(run.bits for run in runs)
        return Scheme(bits=bits, exchange=AllGather()).seconds(profile, every)

    return seconds


BF16 = _candidate("bf16")
METHODS = (
    # dgc sends what Top-k sends, and its selection takes as long
    Method("sgd", "sgd", "dgc(density=0.01)", _candidate("sampled_topk:0.01")),
    Method("adamw", "adamw", "orthogonal()", _candidate("orthogonal:0.0234375")),
    Method("muon", "muon", "sparseloco(every=10, density=0.05)", _apart(10)),
    Method("muon", "adamw", "orthogonal()", _candidate("orthogonal:0.0234375")),  # which is Muon, sent
)
OPTIMIZERS = tuple(dict.fromkeys(method.optimizer for method in METHODS))


def cells(runs: Sequence[Run], profiles: Mapping[str, Profile]) -> Iterator[Cell]:
    """Return every cell; raises ValueError where a method's runs do not reach dense's loss."""
    for optimizer, workers, rate in product(OPTIMIZERS, WORLDS, RATES):
        dense = _of(runs, optimizer, "dense()", workers)
        until, total = fmean(run.loss for run in dense), dense[0].settings.steps
        found = []
        for method in METHODS:
            if method.optimizer == optimizer:
                mine = _of(runs, method.under, method.recipe, workers)
                steps = fmean(_steps(run, until) for run in mine)
                there = profiles[method.under].on(parse_link(rate), world_size=workers)
                found.append((steps * method.seconds(there, mine), steps / total, method.recipe))
        best, more, recipe = min(found)
        own = profiles[optimizer]
        bf16 = total * BF16(own.on(parse_link(rate), world_size=workers), ())
        free = total * (own.timeline.computed + own.timeline.rest)
        yield Cell(optimizer, recipe, workers, rate, more, bf16, best, free)


def _of(runs: Sequence[Run], optimizer: str, recipe: str, workers: int) -> list[Run]:
    """Return the runs of a recipe under an optimizer, all seeds."""
    asked = [run for run in runs if run.settings.recipe == recipe and run.settings.workers == workers]
    return [run for run in asked if run.settings.optimizer.startswith(optimizer)]


def _steps(run: Run, loss: float) -> float:
    """Return after how many steps a run is at this loss, between two looks along a line."""
    found = first_at(loss, ((look.step, look.loss) for look in run.looks))
    if found is None:
        who = f"{run.settings.recipe} with {run.settings.workers} workers"
        raise ValueError(f"{who} ends at {run.loss:.4f}; expected dense's {loss:.4f}: train for more steps")
    return found


def drawn(found: Sequence[Cell]) -> Figure:
    """Draw a panel for each number of workers: bf16 dashed, the method solid, both over a free network's dense."""
    figure = blank((12.0, 4.6))
    panels = figure.subplots(1, len(WORLDS), sharey=True)
    for workers, axes in zip(WORLDS, panels, strict=True):
        for optimizer, colour in zip(OPTIMIZERS, COLOURS, strict=False):
            mine = [c for c in found if (c.workers, c.optimizer) == (workers, optimizer)]
            names = " or ".join(m.recipe.partition("(")[0] for m in METHODS if m.optimizer == optimizer)
            for label, dash, seconds in (
                (f"{optimizer}: bf16", "--", [c.bf16 / c.free for c in mine]),
                (f"{optimizer}: {names}", "-", [c.best / c.free for c in mine]),
            ):
                axes.plot(range(len(mine)), seconds, dash, color=colour, marker="o", markersize=3.5, label=label)
        _dress(axes, workers)
    legend(figure, panels[0], columns=6)
    head(figure, "Time to dense bf16's loss, over uncompressed training's if sending took no time (1)")
    return figure


def _dress(axes: Axes, workers: int) -> None:
    axes.set_yscale("log")
    log_ticks(axes.yaxis, "{:g}".format)
    axes.set_xticks(range(len(RATES)), [rate.replace("mbit", " M").replace("gbit", " G") for rate in RATES])
    axes.axhline(1.0, color=FAINT, linewidth=1.2, zorder=1)
    restrain(axes)
    name(axes, f"{workers} workers", "bit/s of each worker's link")


def main(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The runs, as JSON lines.")],
    profiles: Annotated[Path, typer.Option(exists=True, help="Folder of sgd.json, adamw.json and muon.json.")] = Path(),
    png: Annotated[Path | None, typer.Option(help="Draw here.")] = None,
) -> None:
    measured = {name: Profile.from_json((profiles / f"{name}.json").read_text()) for name in OPTIMIZERS}
    found = list(cells(results.read(file), measured))
    rows = [c._asdict() | {"over_bf16": c.bf16 / c.best, "over_free": c.best / c.free} for c in found]
    print_titled(Console(), plain(rows, "Seconds to dense's loss"))
    if png:
        drawn(found).savefig(png)


if __name__ == "__main__":
    typer.run(main)
