"""Shared by all figures: colours, heads, axes and legends."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

from thinwire_lab.inputs import BadInput

INK, MUTED, FAINT, ALARM = "#333333", "#6B6B6B", "#E4E4E4", "#B00020"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
DASHES = ("-", "--", ":", "-.")


def blank(inches: tuple[float, float]) -> Figure:
    """Return an empty figure."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.03)
    figure = Figure(figsize=inches, dpi=100, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def restrain(axes: Axes) -> None:
    """Leave out the lines around the axes that carry no information; draw faint ones by which values are read."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, which="both")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)


def name(axes: Axes, title: str, along: str) -> None:
    """Set the title of the axes, and what the horizontal one shows."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(along, fontsize=9.5, color=MUTED)


def log_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    """Put numbers on a logarithmic axis, as `text` has them: more of them, the less it spans."""
    low, high = axis.get_view_interval()
    within = LogLocator(subs=(1, 2, 5) if high <= 100 * low else (1,))
    axis.set_major_locator(within if high > 5 * low else AutoLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def head(figure: Figure, *lines: str, colour: str = MUTED) -> None:
    """Write above the figure what it shows."""
    text = "\n".join(textwrap.fill(line, round(12 * figure.get_figwidth())) for line in lines)
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, color=colour, parse_math=False)


def legend(figure: Figure, axes: Axes, *, columns: int) -> None:
    """Put a legend of what the axes show, if anything, below the figure: in so many columns, or as many as fit."""
    handles, labels = axes.get_legend_handles_labels()
    look: dict[str, Any] = {"loc": "outside lower left", "frameon": False, "fontsize": 9, "labelcolor": INK}
    for count in range(columns, 0, -1) if handles else ():
        made = figure.legend(handles, labels, ncols=count, **look)
        if count == 1 or made.get_window_extent().width <= figure.bbox.width:
            break
        made.remove()


def check_drawable(path: Path | None) -> None:
    """Raise BadInput unless figures can be drawn in this format."""
    if path is not None and path.suffix[1:].lower() not in FigureCanvasAgg.filetypes.keys() - {"pgf"}:  # needs TeX
        raise BadInput(f"--plot {path} ends in {path.suffix!r}; expected .png, .svg or .pdf")
