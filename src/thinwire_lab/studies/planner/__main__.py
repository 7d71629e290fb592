"""Does the planner keep its word? Real training behind links of many rates, against what it predicted.

    python -m thinwire_lab.studies.planner grid --data ../shared/data --json grid.json --plot grid.png
    python -m thinwire_lab.studies.planner latency --json latency.json --page docs/measurements/planner.md
    python -m thinwire_lab.studies.planner follow --json follow.json --plot follow.png
    python -m thinwire_lab.studies.planner scaling --json scaling.json --plot scaling.png

`grid`: for each model, number of workers and link: the steps that were predicted, and the steps as measured, of plain
DDP, of every candidate for all tensors, of the plan, and of "auto", which take turns. It ends with the median
error of the predictions, with the regret (by what share of its step the best candidate is faster), and with how much
slower "auto" is than plain DDP where it is slowest. `latency`: the same of
plain DDP, the candidates and the plan alone, on links of many latencies and rates; it goes on where its JSON ends.
`follow`: a link that slows down and recovers while a model
trains. `scaling`: steps of 2, 4 and 8 workers against what is simulated for them from a profile of 2.
"""

import json as js
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire.planner import Curve, Profile, step_seconds
from thinwire.planner.profile import Cost
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.machine import environment
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.show.units import milliseconds
from thinwire_lab.studies.planner.figures import Cell, Event, Far, cell, far_page, summary
from thinwire_lab.studies.planner.plot import draw_follow, draw_grid, draw_scaling
from thinwire_lab.studies.planner.worker import AGAIN, BUDGET, PLANNED, SMALLEST, WATCHED

HANDLER = "thinwire_lab.studies.planner.worker:handle"
CHANGES = ((0, "1gbit"), (120, "50mbit"), (270, "1gbit"))  # of the link, at these steps
STEPS = 400

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

Json = Annotated[Path | None, typer.Option(help="Write the results here.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results here, as PNG.")]


@app.command()
def grid(
    models: Annotated[str, typer.Option(help="Of transformer, xml, resnet20.")] = "transformer,xml,resnet20",
    worlds: Annotated[str, typer.Option(help="Numbers of workers.")] = "2,4",
    links: Annotated[
        str, typer.Option(help="Rates of the workers' links, or none.")
    ] = "none,1gbit,300mbit,100mbit,30mbit",
    data: Annotated[Path | None, typer.Option(help="Folder that holds cifar10/*.npz, for resnet20.")] = None,
    seconds: Annotated[float, typer.Option(help="Training that each row is measured for.")] = 2.5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Run the grid."""
    cells: list[Cell] = []
    for model, problem in _problems(models, data).items():
        for workers in map(int, worlds.split(",")):
            for each in _cells(model, problem, workers, links.split(","), seconds):
                cells.append(each)
                print_titled(console, _table(each))
                _save(json, "grid", summary=summary(cells), cells=[asdict(found) for found in cells])
    found = summary(cells)
    for name, value in found.items():
        text = f"{value:.0f}" if name == "predictions" else f"{value:.1%}"
        console.print(f"{name.replace('_', ' ')}: {text}", highlight=False)
    if plot is not None:
        draw_grid(cells, found, plot)


def _cells(
    model: str, problem: Mapping[str, Any], workers: int, links: Sequence[str], seconds: float
) -> Iterator[Cell]:
    with Cluster(workers, parse_rate("1gbit"), HANDLER) as cluster:
        if not cluster.throttled:
            raise typer.BadParameter(f"links cannot be limited here: {cluster.label}")
        for link in links:
            cluster.limit(parse_rate(link))
            events = list(_events(cluster, {"task": "cell", "problem": problem, "seconds": seconds}))
            yield cell(model, workers, link, events)


@app.command()
def latency(
    json: Annotated[Path, typer.Option(help="Write the results here, and go on where they end.")],
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    latencies: Annotated[str, typer.Option(help="From one worker to another.")] = "0ms,5ms,25ms,50ms,100ms",
    rates: Annotated[str, typer.Option(help="Rates of the workers' links.")] = "10mbit,100mbit,1gbit",
    seconds: Annotated[float, typer.Option(help="Training that each row is measured for, at least five steps.")] = 1.0,
    page: Annotated[Path | None, typer.Option(help="Put the table here, between <!-- latency --> and its end.")] = None,
) -> None:
    """Run the grid of latencies: 15 cells, some 25 minutes."""
    cells = [Far(**each) for each in js.loads(json.read_text())["cells"]] if json.exists() else []
    for away, rate in ((away, rate) for away in latencies.split(",") for rate in rates.split(",")):
        if (workers, away, rate) not in {(each.workers, each.latency, each.rate) for each in cells}:
            cells.append(_far(workers, away, rate, seconds))
            _save(json, "latency", cells=[asdict(each) for each in cells])
            console.print(" ".join(cells[-1].row()), highlight=False, markup=False)
    text = far_page(cells)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if page is not None:
        block = "<!-- latency -->\n\n{}\n\n<!-- /latency -->"
        page.write_text(re.sub(block.format(".*"), lambda _: block.format(text), page.read_text(), flags=re.DOTALL))


def _far(workers: int, away: str, rate: str, seconds: float) -> Far:
    with Cluster(workers, parse_rate(f"{rate}/{away}"), HANDLER) as cluster:
        if not cluster.throttled:
            raise typer.BadParameter(f"links cannot be limited here: {cluster.label}")
        events = list(_events(cluster, {"task": "planned", "problem": _TRANSFORMER, "seconds": seconds}))
    plan = _only(events, "plan")
    measured = {event["name"]: event["seconds"] for event in events if event["kind"] == "times"}
    return Far(
        workers=workers,
        latency=away,
        rate=rate,
        planning=plan["seconds"],
        predicted=plan["predicted"],
        measured={name: measured[name] for name in plan["predicted"]},
    )


@app.command()
def follow(
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Change the link while "auto" trains; and train with candidates that stay, the link free, for the loss."""
    runs: dict[str, list[Event]] = {}
    with Cluster(workers, parse_rate(CHANGES[0][1]), HANDLER) as cluster:
        runs[WATCHED] = list(_changing(cluster))
        cluster.limit(None)
        for name in ("dense", "sampled_topk:0.01"):
            job = {"task": "train", "problem": _TRANSFORMER, "steps": STEPS, "name": name}
            runs[name] = list(_events(cluster, job))
    last = runs[WATCHED][-1]
    for decision in last["history"]:
        console.print(f"step {decision['step']}: {decision['reason']}", highlight=False)
    for name, events in runs.items():
        losses = [event["loss"] for event in events if event["kind"] == "step"]
        console.print(f"{name}: mean loss of the last 50 steps {sum(losses[-50:]) / 50:.3f}")
    console.print(f"replicas identical: {last['same']}")
    _save(json, "follow", changes=CHANGES, runs=runs)
    if plot is not None:
        draw_follow(runs, CHANGES, plot)


def _changing(cluster: Cluster) -> Iterator[Event]:
    due = dict(CHANGES[1:])
    for event in _events(cluster, {"task": "follow", "problem": _TRANSFORMER, "steps": STEPS}):
        if event["kind"] == "step" and event["step"] in due:
            cluster.limit(parse_rate(due[event["step"]]))
        yield event


@app.command()
def scaling(
    worlds: Annotated[str, typer.Option(help="Numbers of workers; the smallest gives the profile.")] = "2,4,8",
    links: Annotated[str, typer.Option(help="Rates of the workers' links.")] = "300mbit,100mbit",
    seconds: Annotated[float, typer.Option(help="Training that each row is measured for.")] = 2.5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Simulate more workers from the profile of a few, and run them.

    Workers here share cores, which workers of their own machines do not: computing, encoding and decoding take as many
    times longer as backward was measured to. Messages are simulated from the few workers' links alone.
    """
    rows: list[dict[str, Any]] = []
    for link in links.split(","):
        base: Profile | None = None
        for workers in map(int, worlds.split(",")):
            with Cluster(workers, parse_rate(link), HANDLER) as cluster:
                job = {"task": "cell", "problem": _TRANSFORMER, "seconds": seconds}
                events = list(_events(cluster, job))
            measured = cell("transformer", workers, link, events)
            here = Profile.from_json(js.dumps(_only(events, "plan")["plan"]["profile"]))
            base = base or here
            there = _crowded(base, here)
            large = [g.name for g in there.timeline.gradients if g.numel >= SMALLEST]
            for name in measured.candidates:
                simulated = step_seconds(there, dict.fromkeys(large, name))
                rows.append(_scaled(link, workers, name, measured.seconds(name), simulated))
                console.print(_line(rows[-1]), highlight=False)
    beyond = [row for row in rows if row["workers"] > min(row["workers"] for row in rows)]
    console.print(f"median error beyond the profile: {median(abs(row['error']) for row in beyond):.1%}")
    _save(json, "scaling", rows=rows)
    if plot is not None:
        draw_scaling(rows, plot)


def _crowded(base: Profile, here: Profile) -> Profile:
    """Return the base profile with as many workers as `here`, and slowed down as they share the cores."""
    factor = here.timeline.computed / base.timeline.computed
    costs = {name: _slower(cost, factor) for name, cost in base.costs.items()}
    return replace(base, world_size=here.world_size, timeline=here.timeline, costs=costs, slowdown=here.slowdown)


def _slower(cost: Cost, factor: float) -> Cost:
    stretched = {
        name: Curve(tuple((size, factor * value) for size, value in getattr(cost, name).points))
        for name in ("encode", "decode", "each", "exchange")
    }
    return replace(cost, **stretched)


def _scaled(link: str, workers: int, name: str, measured: float, simulated: float) -> dict[str, Any]:
    error = simulated / measured - 1
    return {
        "link": link,
        "workers": workers,
        "name": name,
        "measured": measured,
        "simulated": simulated,
        "error": error,
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['link']:8} {row['workers']} workers {row['name']:14} measured {milliseconds(row['measured']):>6} ms  "
        f"simulated {milliseconds(row['simulated']):>6} ms  {row['error']:+.0%}"
    )


_TRANSFORMER = {"name": "transformer", "data": None, "scale": 1.0}


def _problems(models: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """Return what to build for each model; resnet20 is left out, which is said, where its data is not given."""
    images = None if data is None else next((str(path) for path in sorted((data / "cifar10").glob("*.npz"))), None)
    known = {
        "transformer": _TRANSFORMER,
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


def _events(cluster: Cluster, job: dict[str, Any]) -> Iterator[Event]:
    for rank, event in cluster.run(job):
        if rank == 0:
            yield event if event["kind"] != "plan" else {**event, "plan": js.loads(event["plan"])}


def _only(events: Sequence[Event], kind: str) -> Event:
    return next(event for event in events if event["kind"] == kind)


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


def _save(path: Path | None, what: str, **results: Any) -> None:
    if path is not None:
        about = environment(budget=str(BUDGET))
        path.write_text(js.dumps({"schema": f"thinwire.{what}/1", "environment": about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    app()
