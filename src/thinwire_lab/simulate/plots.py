"""Step time and scaling efficiency over the number of workers."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from thinwire_lab.show.canvas import COLOURS, DASHES, FAINT, INK, MUTED, blank, head, legend, name, restrain
from thinwire_lab.simulate.scaling import PLANNED, Scale

_INCHES = (12.0, 5.0)


def scales_figure(found: Sequence[Scale], title: str) -> Figure:
    """Draw the step on logarithmic axes, and beside it the efficiency from 0 to 1."""
    figure = blank(_INCHES)
    step, efficiency = figure.subplots(1, 2)
    for label, colour, dash, width in _styled(list(found[0].seconds)):
        worlds = [scale.world_size for scale in found]
        seconds = [1e3 * scale.seconds[label] for scale in found]
        shares = [scale.efficiency(label) for scale in found]
        for axes, values in ((step, seconds), (efficiency, shares)):
            axes.plot(worlds, values, dash, color=colour, linewidth=width, marker="o", markersize=3.5, label=label)
    _step_axes(step, found[0].alone)
    over_workers(efficiency, [scale.world_size for scale in found])
    over_workers(step, [scale.world_size for scale in found])
    share_axes(efficiency, max(scale.efficiency(label) for scale in found for label in scale.seconds))
    handles, labels = step.get_legend_handles_labels()
    legend(figure, handles, labels, columns=8)
    head(figure, title)
    return figure


def over_workers(axes: Axes, worlds: Sequence[int]) -> None:
    """Put workers on the horizontal axis, doubling."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds[:: -(-len(worlds) // 12)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    restrain(axes)


def share_axes(axes: Axes, most: float = 1.0) -> None:
    """Show shares from 0 to 1, or only to somewhat above the largest if that is small."""
    axes.set_ylim(0, 1.05 if most > 0.3 else 1.15 * most)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    name(axes, "Scaling efficiency", "workers; throughput over that of as many that never wait")


def _step_axes(axes: Axes, alone: float) -> None:
    axes.set_yscale("log")
    axes.axhline(1e3 * alone, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, label="one worker alone")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.9g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    name(axes, "Time of one step", "workers; milliseconds, both on log scales")


def _styled(labels: Sequence[str]) -> Iterator[tuple[str, str, str, float]]:
    """Give each its own colour; dense and the plan stand apart."""
    others = [label for label in labels if label not in ("dense", PLANNED)]
    for label in labels:
        if label in others:
            turn, place = divmod(others.index(label), len(COLOURS))
            yield label, COLOURS[place], DASHES[turn % len(DASHES)], 1.8
    yield from ((label, INK, "-", 1.8) for label in labels if label == "dense")
    yield PLANNED, MUTED, "--", 2.6
