"""The papers' figures, drawn anew."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.planner import papers, papers_dragonn
from thinwire.tools.show.canvas import COLOURS, INK, MUTED, blank, head, name
from thinwire.tools.simulate.plots import over_workers, share_axes

_INCHES = (12.0, 5.0)
_WORLDS = (1, 2, 4, 8, 16, 32)
_STYLES = (INK, COLOURS[0], COLOURS[2])
_CIRCLE: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markersize": 7, "linestyle": "", "clip_on": False}


def gtopk_figure() -> Figure:
    """Draw Fig. 9 (left) with Table I's values as circles, and Fig. 10 of two models."""
    figure = blank(_INCHES)
    left, middle, right = figure.subplots(1, 3)
    _times_panel(left)
    for axes, system in ((middle, papers.SYSTEMS[2]), (right, papers.SYSTEMS[1])):
        _model_panel(axes, system)
    middle.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 0.08))
    head(figure, "gTop-k (Shi et al. 2019) from its own alpha 0.436 ms and beta 36 ns per element; density 0.001")
    return figure


def _times_panel(axes: Axes) -> None:
    rows = papers.times()
    workers = [row.workers for row in rows]
    for values, colour, dash, label in (
        ([row.gather_formula for row in rows], COLOURS[0], "-", "all-gather, their formula"),
        ([row.gather_ours for row in rows], COLOURS[0], "--", "all-gather, a ring"),
        ([row.tree_ours for row in rows], COLOURS[2], "-", "tree"),
    ):
        axes.plot(workers, values, dash, color=colour, linewidth=1.8, label=label)
    for published in ([row.gather_theirs for row in rows], [row.tree_theirs for row in rows]):
        axes.plot(workers, published, **_CIRCLE, color=INK)
    over_workers(axes, workers)
    name(axes, "Exchange, ms", "workers; circles: as published")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def _model_panel(axes: Axes, system: papers.System) -> None:
    scales = system.predicted(_WORLDS)
    for label, colour, seconds in zip(papers.NAMES, _STYLES, system.seconds, strict=True):
        axes.plot(_WORLDS, [s.efficiency(label) for s in scales], color=colour, linewidth=1.8, label=label)
        axes.plot(papers.WORKERS, system.rest / seconds, **_CIRCLE, color=colour)
    over_workers(axes, _WORLDS)
    share_axes(axes)
    name(axes, f"Efficiency, {system.name}", "workers; circles: from published throughput")


def dragonn_figure() -> Figure:
    """Draw the XML model's speed-ups over full synchronisation, and what free compression would bring."""
    figure = blank((7.5, 5.0))
    axes = figure.subplots()
    worlds = tuple(1 << bit for bit in range(1, 13))
    rows = papers_dragonn.speeds(worlds)
    for values, colour, dash, label in (
        ([row.bound for row in rows], MUTED, "--", "free compression"),
        ([row.full / row.dragonn for row in rows], COLOURS[2], "-", "dragonn"),
        ([row.full / row.dgc for row in rows], COLOURS[0], "-", "dgc"),
    ):
        axes.plot(worlds, values, dash, color=colour, linewidth=1.8, label=label)
    for label, colour in (("dragonn", COLOURS[2]), ("dgc", COLOURS[0])):
        theirs = papers_dragonn.SPEEDUPS[label]
        axes.plot(papers_dragonn.WORKERS, theirs, **_CIRCLE, color=colour)
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=":", label="no compression")
    over_workers(axes, worlds)
    axes.set_ylim(0, 24)
    name(axes, "Times as fast as full synchronisation", "GPUs, one all-gather among all; circles: as published, on 16")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    head(figure, "DRAGONN (Wang et al. 2022): XML, density 0.001, 25 Gbit/s; decoding, not published, counts as free")
    return figure
