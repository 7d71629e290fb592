"""Does the planner keep its word? Real training behind links of many rates, against what it predicted.

    python -m thinwire_lab.studies.planner grid --data ../shared/data --json grid.json
    python -m thinwire_lab.studies.planner grid --models transformer --worlds 2 --links 10mbit/25ms,1gbit/25ms

For each model, number of workers and link: the steps that were predicted, and the steps as measured, of plain
DDP, of every candidate for all tensors, of the plan, and of "auto", which take turns. It ends with the median
error of the predictions, with the regret (by what share of its step the best candidate is faster), and with how much
slower "auto" is than plain DDP where it is slowest.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.inputs import write_document
from thinwire_lab.machine import environment
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.show.units import milliseconds
from thinwire_lab.studies.planner.figures import Cell, cell, summary
from thinwire_lab.studies.planner.worker import AGAIN, BUDGET, PLANNED, WATCHED

HANDLER = "thinwire_lab.studies.planner.worker:handle"

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()


@app.callback()
def planner() -> None:
    """Measure what the planner predicts."""


@app.command()
def grid(
    models: Annotated[str, typer.Option(help="Of transformer, xml, resnet20.")] = "transformer,xml,resnet20",
    worlds: Annotated[str, typer.Option(help="Numbers of workers.")] = "2,4",
    links: Annotated[
        str, typer.Option(help="Rates of the workers' links, or none.")
    ] = "none,1gbit,300mbit,100mbit,30mbit",
    data: Annotated[Path | None, typer.Option(help="Folder that holds cifar10/*.npz, for resnet20.")] = None,
    seconds: Annotated[float, typer.Option(help="Training that each row is measured for.")] = 2.5,
    json: Annotated[Path | None, typer.Option(help="Write the results here, after each cell.")] = None,
) -> None:
    """Run the grid."""
    cells: list[Cell] = []
    for model, problem in _problems(models, data).items():
        for workers in map(int, worlds.split(",")):
            for link in links.split(","):
                cells.append(_cell(model, {"problem": problem, "seconds": seconds}, workers, link))
                print_titled(console, _table(cells[-1]))
                about = {"environment": environment(budget=str(BUDGET)), "summary": summary(cells)}
                write_document(json, "thinwire.grid/1", **about, cells=[asdict(each) for each in cells])
    found = summary(cells)
    for name, value in found.items():
        text = f"{value:.0f}" if name == "predictions" else f"{value:.1%}"
        console.print(f"{name.replace('_', ' ')}: {text}", highlight=False)


def _cell(model: str, job: dict[str, Any], workers: int, link: str) -> Cell:
    """Measure a cell, on workers of its own: a link keeps its latency."""
    with Cluster(workers, parse_rate(link) or parse_rate("1gbit"), HANDLER) as cluster:
        if not cluster.throttled:
            raise typer.BadParameter(f"links cannot be limited here: {cluster.label}")
        cluster.limit(parse_rate(link))
        return cell(model, workers, link, [event for rank, event in cluster.run(job) if rank == 0])


def _problems(models: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """Return what to build for each model; resnet20 is left out, which is said, where its data is not given."""
    images = None if data is None else next((str(path) for path in sorted((data / "cifar10").glob("*.npz"))), None)
    known = {
        "transformer": {"name": "transformer", "data": None, "scale": 1.0},
        "xml": {"name": "xml", "data": None, "scale": 0.02},
        "resnet20": {"name": "resnet20", "data": images, "scale": 1.0},
    }
    asked = models.split(",")
    if unknown := [model for model in asked if model not in known]:
        raise typer.BadParameter(f"no model here is called {unknown[0]!r}; expected some of {', '.join(known)}")
    if "resnet20" in asked and images is None:
        console.print("resnet20 is left out: --data names no folder that holds cifar10/*.npz", style="red")
        asked.remove("resnet20")
    return {model: known[model] for model in asked}


def _table(found: Cell) -> Table:
    title = (
        f"{found.model}, {found.workers} workers, {found.link}: planned in {found.planning:.1f} s; auto: wrapped and "
        f"attached in {found.attaching:.1f} s, decided after {found.deciding:.1f} s of training; replicas "
        f"{'identical' if found.same else 'DIFFER'}\n{found.reason}"
    )
    return Table(
        title=title,
        headings=("", "measured ms", "predicted ms", "error", "regret"),
        rows=[_measured(found, name) for name in found.measured],
        notes=[
            f"against plain DDP: auto {found.over_dense(WATCHED):+.1%}, plain DDP again {found.over_dense(AGAIN):+.1%}"
        ],
        left=(0,),
    )


def _measured(found: Cell, name: str) -> tuple[str, ...]:
    known = name in found.predicted
    return (
        name + " (best)" * (name == found.best),
        milliseconds(found.seconds(name)),
        milliseconds(found.predicted[name]) if known else "",
        f"{found.error(name):+.0%}" if known else "",
        f"{found.regret(name):.1%}" if name in (PLANNED, WATCHED) else "",
    )


if __name__ == "__main__":
    app()
