"""Figures over all methods, and a panel for each run."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from thinwire_lab.papers.shared.errors import Measured
from thinwire_lab.papers.shared.material import Run
from thinwire_lab.show.canvas import COLOURS, DASHES, FAINT, INK, MUTED, blank, name, restrain

MARKS = "os^Dv*PX"


def error_over_bytes(rows: Sequence[Measured]) -> Figure:
    """Relative error over bits per element, late in training: a column per group of methods, a row per model."""
    models, groups = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("model", "group"))
    figure = blank((5 * len(groups), 3.9 * len(models) + 0.8))
    grid = figure.subplots(len(models), len(groups), squeeze=False)
    for model, line in zip(models, grid, strict=True):
        last = max(row.step for row in rows if row.model == model)
        for group, axes in zip(groups, line, strict=True):
            shown = [row for row in rows if row.model == model and row.step == last]
            _curves(axes, shown, group)
            label(
                axes, f"{model}, step {last}: {group}", "bits per element, headers included", "relative error, squared"
            )
    for axes in grid[-1]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False, fontsize=9)
    return figure


def _curves(axes: Axes, rows: Sequence[Measured], group: str) -> None:
    """Draw a group's families, and exact Top-k in every panel to compare with."""
    families = ["topk", *(f for f in dict.fromkeys(row.family for row in rows if row.group == group) if f != "topk")]
    for place, family in enumerate(families):
        found = sorted((row.bits_per_element, row.error) for row in rows if row.family == family)
        colour = INK if family == "topk" else COLOURS[(place - 1) % len(COLOURS)]
        dash = DASHES[(place - 1) // len(COLOURS)] if place else "-"
        bits, errors = zip(*found, strict=True)
        axes.plot(
            bits, errors, dash, marker=MARKS[place % len(MARKS)], markersize=4.5, color=colour, label=family, lw=1.5
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.axhline(1, color=MUTED, linewidth=0.8)
    axes.grid(color=FAINT, linewidth=0.7)


def side_by_side(runs: Sequence[Run], draw: Callable[[Axes, Run], None]) -> Figure:
    """Draw a panel for each run."""
    figure = blank((6 * max(1, len(runs)), 4.6))
    for axes, run in zip(figure.subplots(1, max(1, len(runs)), squeeze=False)[0], runs, strict=False):
        draw(axes, run)
    return figure


def label(axes: Axes, title: str, along: str, up: str) -> None:
    """Write the title and the axes' labels."""
    restrain(axes)
    name(axes, title, along)
    axes.set_ylabel(up, fontsize=9.5, color=MUTED)
