"""Figures over all methods; and a paper's figure, from the numbers in its text, beside the same from our runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from thinwire_lab.papers.shared.errors import Measured
from thinwire_lab.papers.shared.material import Run
from thinwire_lab.papers.shared.trials import Series
from thinwire_lab.show.canvas import COLOURS, DASHES, FAINT, INK, MUTED, blank, head, name, restrain

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


class Panel(Protocol):
    """Half of a figure."""

    def draw(self, axes: Axes) -> None:
        """Draw it."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Groups of bars: group -> series -> height. `line` is drawn across, such as dense's 1."""

    title: str
    up: str
    groups: Mapping[str, Mapping[str, float]]
    line: float | None = 1.0

    def draw(self, axes: Axes) -> None:
        names = list(dict.fromkeys(each for bars in self.groups.values() for each in bars))
        width = 0.8 / len(names)
        for i, each in enumerate(names):
            there = [(at, bars[each]) for at, bars in enumerate(self.groups.values()) if each in bars]
            places = [at + (i - (len(names) - 1) / 2) * width for at, _ in there]
            heights, colour = [height for _, height in there], COLOURS[i % len(COLOURS)]
            found = axes.bar(places, heights, width, label=each, color=colour)
            axes.bar_label(found, fmt="%.3g", fontsize=8, color=MUTED)
        axes.set_xticks(range(len(self.groups)), list(self.groups))
        if self.line is not None:
            axes.axhline(self.line, color=INK, linewidth=0.9, linestyle=":")
        label(axes, self.title, "", self.up)
        axes.margins(y=0.3)  # room for the legend above the bars
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines by name: (x, y). `log`: which axes are logarithmic, of "x" and "y"."""

    title: str
    along: str
    up: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log: str = ""

    def draw(self, axes: Axes) -> None:
        for i, (each, (x, y)) in enumerate(self.lines.items()):
            colour = INK if each == "dense" else COLOURS[i % len(COLOURS)]
            axes.plot(x, y, marker=MARKS[i % len(MARKS)], markersize=4, color=colour, label=each, linewidth=1.5)
        for axis in self.log:
            getattr(axes, f"set_{axis}scale")("log")
        axes.grid(color=FAINT, linewidth=0.7)
        label(axes, self.title, self.along, self.up)
        axes.legend(frameon=False, fontsize=9)


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the text says of a figure that it gives no numbers of."""

    title: str
    text: str

    def draw(self, axes: Axes) -> None:
        label(axes, self.title, "", "")
        axes.text(0.5, 0.5, self.text, ha="center", va="center", wrap=True, color=MUTED, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)


def beside(drawn: Panel | tuple[Panel, Panel], told: Mapping[str, Any]) -> Figure:
    """Draw ours beside the published figure, of which the paper's text has `told` us; or two panels of our own."""
    figure = blank((12.5, 4.8))
    panels = drawn if isinstance(drawn, tuple) else (_published(**told), drawn)
    for panel, axes in zip(panels, figure.subplots(1, 2), strict=True):
        panel.draw(axes)
    head(figure, told["above"])
    return figure


def _published(above: str, title: str, text: str = "", *, line: bool = True, **bars: Any) -> Panel:
    return Words(title=title, text=text) if text else Bars(title=title, line=1.0 if line else None, **bars)


def curve(series: Series) -> tuple[list[float], list[float]]:
    """Return steps and the mean loss over seeds, at the looks that all have."""
    looks = list(zip(*(zip(trial.steps, trial.losses, strict=True) for trial in series), strict=False))
    return [at[0][0] for at in looks], [sum(loss for _, loss in at) / len(at) for at in looks]
