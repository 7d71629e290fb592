"""The results as a figure: distance from the floor over size, bits over density, decode time over workers."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED
from thinwire_lab.studies.kernels.rows import Row
from thinwire_lab.studies.kernels.runner import TARGET_DENSITY

GROUPS = {
    "steps": "Whole encodes",
    "scatter": "Decode",
    "select": "Selection",
    "codes": "Codes",
    "index": "At indices",
    "sketch": "Sketches",
    "chunks": "Chunks",
    "sums": "Sums in one order",
}
VALUE_BITS = {"wire_fp16": 16, "wire_offset8": 8}
STYLES = [(colour, marker) for marker in "os^" for colour in (*COLOURS, INK)]


def draw(rows: Sequence[Row], environment: Mapping[str, Any], path: Path) -> None:
    """Write the figure as PNG."""
    figure = Figure(figsize=(19, 11), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = _panels([row for row in rows if row.seconds])
    columns = min(4, max(1, len(panels)))
    for place, panel in enumerate(panels, start=1):
        panel(figure.add_subplot(-(-len(panels) // columns), columns, place))
    where = environment["processor"] if environment["device"] == "cpu" else environment["device"]
    title = f"Kernels over their floors: {where}, {environment['threads']} threads, torch {environment['torch']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=MUTED)
    figure.savefig(path)


def _panels(rows: Sequence[Row]) -> list[Callable[[Axes], None]]:
    """Return the panels that have something to show."""
    by_group = {group: [row for row in rows if row.group == group] for group in GROUPS}
    panels = [partial(_floor_panel, rows=mine, title=GROUPS[group]) for group, mine in by_group.items() if mine]
    if any(row.name in VALUE_BITS for row in rows):
        panels.append(partial(_bits_panel, rows=rows))
    if any(row.name == "decode" for row in rows):
        panels.append(partial(_workers_panel, rows=rows))
    return list(panels)


def _floor_panel(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """Draw the ratio to the floor over size, at the targets' density and the largest number of workers."""
    names = list(dict.fromkeys(row.name for row in rows))
    for name, (colour, marker) in zip(names, STYLES, strict=False):
        mine = _typical([row for row in rows if row.name == name])
        ratios = [row.ratio_to_floor or math.nan for row in mine]
        axes.plot([row.d for row in mine], ratios, marker + "-", color=colour, markersize=5, linewidth=1.4, label=name)
    axes.axhline(1, color=MUTED, linewidth=0.9, linestyle="--")
    _name(axes, title, "elements; time over floor")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.d for row in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: _size(count)))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes)


def _typical(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each size."""
    density = min((row.density or 0 for row in rows), key=lambda each: abs(each - TARGET_DENSITY))
    workers = max(row.workers or 0 for row in rows if (row.density or 0) == density)
    return [row for row in rows if (row.density or 0) == density and (row.workers or 0) == workers]


def _bits_panel(axes: Axes, rows: Sequence[Row]) -> None:
    most = max((row.d for row in rows if row.name in VALUE_BITS), default=0)
    for name, (colour, marker) in zip(VALUE_BITS, STYLES, strict=False):
        mine = [row for row in rows if row.name == name and row.d == most and row.density]
        densities = [row.density or math.nan for row in mine]
        bound = [math.log2(math.e / density) + VALUE_BITS[name] for density in densities]
        axes.plot(densities, [row.bits_per_kept or math.nan for row in mine], marker, color=colour, label=name)
        axes.plot(densities, bound, "--", color=colour, linewidth=1.2, label="log2(e·d/k) + value bits")
    _name(axes, "Bits per kept element", f"density, {most:,} elements")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _workers_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the time of a decode over the number of payloads, one line per size."""
    decodes = [row for row in rows if row.name == "decode" and row.density == _typical_density(rows)]
    sizes = sorted({row.d for row in decodes})
    for size, (colour, marker) in zip(sizes, STYLES, strict=False):
        mine = sorted((row for row in decodes if row.d == size), key=lambda row: row.workers or 0)
        counts = [row.workers or 0 for row in mine]
        times = [1000 * row.seconds["p50"] for row in mine if row.seconds]
        axes.plot(counts, times, marker + "-", color=colour, label=_size(size), markersize=5)
        axes.plot(counts, [1000 * (row.floor_seconds or 0) for row in mine], "--", color=colour)
    _name(axes, "Time of a decode", "payloads; milliseconds, dashed: zero_()")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.workers or 0 for row in decodes}) or [1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    _legend(axes)


def _typical_density(rows: Sequence[Row]) -> float | None:
    known = [row.density for row in rows if row.name == "decode" and row.density]
    return min(known, key=lambda density: abs(density - TARGET_DENSITY)) if known else None


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        below = (-0.1, -0.22)
        legend = axes.legend(loc="upper left", bbox_to_anchor=below, ncols=2, columnspacing=1.2, fontsize=8.5)
        legend.set_frame_on(False)


def _size(count: float) -> str:
    """Sizes for an axis: ``2²⁰`` as a power, others in millions."""
    power = math.log2(count)
    return f"$2^{{{power:.0f}}}$" if power.is_integer() else f"{count / 1e6:.4g} M"


def _name(axes: Axes, title: str, along: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel(along, fontsize=9.5, color=MUTED)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, which="both")
