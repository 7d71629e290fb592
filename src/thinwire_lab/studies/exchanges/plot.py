"""The results as a figure: for each link, time and bytes over the number of workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from thinwire_lab.bench.plots import round_bytes
from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED
from thinwire_lab.studies.exchanges.figures import Row
from thinwire_lab.studies.exchanges.worker import WAYS

STYLES = dict(zip(WAYS, zip((INK, *COLOURS, MUTED), "ovs^DPX*", strict=True), strict=True))
APART = 1.022  # between points at one number of workers, which would hide each other


def draw(rows: Sequence[Row], environment: Mapping[str, Any], path: Path) -> None:
    """Write the figure as PNG."""
    links = list(dict.fromkeys(row.link for row in rows))
    figure = Figure(figsize=(13, 4.9 * len(links) + 1), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for place, link in enumerate(links):
        here = [row for row in rows if row.link == link]
        _times(figure.add_subplot(len(links), 2, 2 * place + 1), here, link)
        _bytes(figure.add_subplot(len(links), 2, 2 * place + 2), here, link)
    title = f"{environment['numel']:,} elements, density {environment['density']:g}; {environment['cores']} cores"
    figure.suptitle(f"Exchanges: {title}", x=0.01, ha="left", fontsize=11, color=MUTED)
    handles = [Line2D([], [], color=c, marker=m, label=way, linewidth=1.4) for way, (c, m) in STYLES.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False, fontsize=9.5, labelcolor=INK)
    figure.savefig(path)


def _times(axes: Axes, rows: Sequence[Row], link: str) -> None:
    for way, places, mine in _series(rows):
        colour, marker = STYLES[way]
        middle = [row.seconds["p50"] for row in mine]
        below = [row.seconds["p50"] - row.seconds["p20"] for row in mine]
        above = [row.seconds["p80"] - row.seconds["p50"] for row in mine]
        axes.errorbar(places, middle, (below, above), fmt=marker, color=colour, markersize=6, elinewidth=1.2)
        axes.plot(places, [row.predicted_seconds for row in mine], "_-", color=colour, linewidth=1.2, alpha=0.8)
    _name(axes, rows, f"Time, {link}", "points: measured, with 20th to 80th percentile; lines: predicted")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1000 * seconds:g} ms"))


def _bytes(axes: Axes, rows: Sequence[Row], link: str) -> None:
    for way, places, mine in _series(rows):
        colour, marker = STYLES[way]
        counted = [row.measured_bytes or row.declared_bytes for row in mine]
        axes.plot(places, counted, marker, color=colour, markersize=6)
        axes.plot(places, [row.formula_bytes for row in mine], "_-", color=colour, linewidth=1.2, alpha=0.8)
    how = "declared" if any(row.measured_bytes is None for row in rows) else "measured, headers included"
    _name(axes, rows, f"Bytes sent per worker, {link}", f"points: {how}; lines: formula")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: round_bytes(count)))


def _series(rows: Sequence[Row]) -> list[tuple[str, list[float], list[Row]]]:
    """Yield each exchange with its places along the axis, slightly beside the number of workers, and its rows."""
    found = []
    for number, way in enumerate(WAYS):
        mine = [row for row in rows if row.exchange == way]
        shift = APART ** (number - (len(WAYS) - 1) / 2)
        found.append((way, [row.world_size * shift for row in mine], mine))
    return found


def _name(axes: Axes, rows: Sequence[Row], title: str, meaning: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(f"workers; {meaning}", fontsize=9.5, color=MUTED)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    worlds = sorted({row.world_size for row in rows})
    axes.set_xlim(worlds[0] / 1.25, worlds[-1] * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(worlds))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, which="both")
