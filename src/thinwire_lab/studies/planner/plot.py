"""The grid, and a link that changes, as figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED
from thinwire_lab.studies.planner.figures import Cell
from thinwire_lab.studies.planner.worker import AGAIN, BUDGET, PLANNED, WATCHED

COLOUR = dict(zip((candidate.name for candidate in BUDGET.candidates()[1:]), COLOURS, strict=False)) | {
    "dense": INK,
    AGAIN: INK,
    PLANNED: MUTED,
    WATCHED: "#B00020",
}


def draw_grid(cells: Sequence[Cell], summary: Mapping[str, float], path: Path) -> None:
    """Draw measured steps as points and predicted ones as lines, over the links, for each model and worker count."""
    models, worlds = (list(dict.fromkeys(getattr(each, key) for each in cells)) for key in ("model", "workers"))
    figure = _figure((5.2 * len(models), 4.4 * len(worlds) + 1.2))
    for row, workers in enumerate(worlds):
        for column, model in enumerate(models):
            mine = [each for each in cells if (each.model, each.workers) == (model, workers)]
            axes = figure.add_subplot(len(worlds), len(models), row * len(models) + column + 1)
            _panel(axes, mine, f"{model}, {workers} workers")
    figure.suptitle(
        f"Step time: measured (points) and predicted (lines). {summary['predictions']:.0f} predictions, median error "
        f"{summary['median_error']:.1%}; median regret of the plan {summary['median_regret']:.1%}",
        x=0.01,
        ha="left",
        fontsize=11,
        color=INK,
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=9, frameon=False, labelcolor=INK)
    figure.savefig(path)


def _panel(axes: Axes, cells: Sequence[Cell], title: str) -> None:
    places = range(len(cells))
    for name, colour in COLOUR.items():
        if name in cells[0].measured:
            axes.plot(
                places, [each.seconds(name) for each in cells], _mark(name), color=colour, label=name, markersize=6
            )
        if name in cells[0].predicted and name != PLANNED:
            axes.plot(places, [each.predicted[name] for each in cells], "-", color=colour, linewidth=1, alpha=0.7)
    axes.set_xticks(list(places), [each.link for each in cells], fontsize=9)
    _restrain(axes, title)


def _mark(name: str) -> str:
    return {PLANNED: "s", WATCHED: "x", AGAIN: "+"}.get(name, "o")


def draw_follow(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], changes: Sequence[tuple[int, str]], path: Path
) -> None:
    """Draw step time and loss over steps; `changes` are of the link, and the history of the plan is drawn beside."""
    figure = _figure((13, 8))
    upper, lower = figure.add_subplot(2, 1, 1), figure.add_subplot(2, 1, 2)
    history = next(event["history"] for event in runs[WATCHED] if event["kind"] == "same")
    for name, events in runs.items():
        steps = [event for event in events if event["kind"] == "step"]
        where = [event["step"] for event in steps]
        upper.plot(where, [event["seconds"] for event in steps], color=COLOUR[name], label=name, linewidth=1)
        losses = [event["loss"] for event in steps]
        smooth = [median(losses[max(0, i - 10) : i + 1]) for i in range(len(losses))]
        lower.plot(where, smooth, color=COLOUR[name], label=name, linewidth=1.2)
    for step, link in changes:
        for axes in (upper, lower):
            axes.axvline(step, color=MUTED, linewidth=1, linestyle="--")
        upper.annotate(
            f" link: {link}", (step, 1), xycoords=("data", "axes fraction"), va="top", color=MUTED, fontsize=9
        )
    for decision in history:
        upper.axvline(decision["step"], color=COLOURS[2], linewidth=1.4)
        text = ", ".join(dict.fromkeys(decision["choice"].values())) or "dense"
        at = ("data", "axes fraction")
        upper.annotate(f" plan: {text}", (decision["step"], 0.9), xycoords=at, va="top", color=COLOURS[2], fontsize=9)
    _restrain(upper, "Step time, logarithmic")
    _restrain(lower, "Training loss, median of ten steps")
    lower.set_yscale("linear")
    lower.yaxis.set_major_locator(MaxNLocator(8))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    lower.set_xlabel("step", color=MUTED)
    lower.legend(frameon=False, labelcolor=INK)
    figure.savefig(path)


def draw_scaling(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw steps over the number of workers: measured as points, simulated from the smallest run as lines."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    figure = _figure((6.5 * len(links), 5.2))
    for place, link in enumerate(links):
        axes = figure.add_subplot(1, len(links), place + 1)
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if (row["link"], row["name"]) == (link, name)]
            worlds = [row["workers"] for row in mine]
            axes.plot(worlds, [row["measured"] for row in mine], "o", color=COLOUR[name], label=name)
            axes.plot(worlds, [row["simulated"] for row in mine], "-", color=COLOUR[name], linewidth=1, alpha=0.7)
        axes.set_xscale("log", base=2)
        axes.set_xticks(worlds, [str(world) for world in worlds])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("workers", color=MUTED)
        _restrain(axes, f"{link}: measured (points), simulated from 2 workers (lines)")
        axes.legend(frameon=False, labelcolor=INK)
    figure.savefig(path)


def _figure(inches: tuple[float, float]) -> Figure:
    figure = Figure(figsize=inches, dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _restrain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1000 * seconds:g} ms"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", which="both", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelcolor=MUTED)
