"""A paper's figure, redrawn from the numbers in its text, beside the same figure from our runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire_lab.papers.shared.figures import MARKS, label
from thinwire_lab.papers.shared.trials import Series
from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED, blank, head


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
        """See `Panel`."""
        names = list(dict.fromkeys(name for bars in self.groups.values() for name in bars))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            places = [
                at + (i - (len(names) - 1) / 2) * width for at, bars in enumerate(self.groups.values()) if name in bars
            ]
            heights = [bars[name] for bars in self.groups.values() if name in bars]
            found = axes.bar(places, heights, width, label=name, color=COLOURS[i % len(COLOURS)])
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
        """See `Panel`."""
        for i, (name, (x, y)) in enumerate(self.lines.items()):
            colour = INK if name == "dense" else COLOURS[i % len(COLOURS)]
            axes.plot(x, y, marker=MARKS[i % len(MARKS)], markersize=4, color=colour, label=name, linewidth=1.5)
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
        """See `Panel`."""
        label(axes, self.title, "", "")
        axes.text(0.5, 0.5, self.text, ha="center", va="center", wrap=True, color=MUTED, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)


def beside(published: Panel, ours: Panel, above: str) -> Figure:
    """Draw the two side by side."""
    figure = blank((12.5, 4.8))
    for panel, axes in zip((published, ours), figure.subplots(1, 2), strict=True):
        panel.draw(axes)
    head(figure, above)
    return figure


def curve(series: Series) -> tuple[list[float], list[float]]:
    """Return steps and the mean loss over seeds, at the looks that all have."""
    looks = list(zip(*(zip(trial.steps, trial.losses, strict=True) for trial in series), strict=False))
    return [at[0][0] for at in looks], [sum(loss for _, loss in at) / len(at) for at in looks]
