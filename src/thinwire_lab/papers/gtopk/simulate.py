"""gTop-k's predictions and measurements beside ours.

python -m thinwire_lab.papers.gtopk.simulate [--json out.json] [--plot out.png] [--html out.html]
"""

from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire_lab.papers.gtopk import model
from thinwire_lab.papers.shared.simulating import CIRCLE, app_of
from thinwire_lab.show.canvas import COLOURS, INK, blank, head, name
from thinwire_lab.show.table import Table
from thinwire_lab.simulate.outputs import Outcome, starred
from thinwire_lab.simulate.plots import over_workers, share_axes

_WORLDS = (4, 8, 16, 32)
_DRAWN = (1, 2, *_WORLDS)
_STYLES = (INK, COLOURS[0], COLOURS[2])


def gtopk() -> Outcome:
    """Return Table I, Table IV and Fig. 10."""
    return Outcome(
        title=f"gTop-k (Shi et al. 2019) from its own figures: {1e3 * model.ALPHA:g} ms, "
        f"{1e9 * model.BETA:g} ns an element",
        tables=[_table_1(), _table_4(), _figure_10()],
        notes=[],
        document={"schema": "thinwire.paper/1", "paper": "gtopk", **_document()},
        figure=gtopk_figure,
    )


def _table_1() -> Table:
    theirs, ours = model.crossings()
    rows = [
        [f"{t.workers}"]
        + [f"{x:.2f}" for x in (t.gather_theirs, t.gather_formula, t.gather_ours, t.tree_theirs, t.tree_ours)]
        for t in model.times()
    ]
    return starred(
        title="Table I and Fig. 9 (left): ms to exchange 0.1 % of 25 M elements",
        headings=["P ", "all-gather\ntheirs ", "their\nformula ", "ours,\na ring ", "tree\ntheirs ", "ours "],
        rows=rows,
        notes=(
            "Their all-gather counts the latency of log2 P messages, a ring has P - 1.",
            f"The tree is faster from P = {theirs:.1f} on by their formula, from {ours:.1f} on against a ring.",
        ),
    )


def _table_4() -> Table:
    rows = []
    for system in model.SYSTEMS:
        (scale,) = system.predicted()
        ours = [model.WORKERS * system.batch / scale.seconds[name] for name in model.NAMES]
        pairs = (f"{a:.0f} / {b:.0f}" for a, b in zip(system.throughput[:2], ours[:2], strict=True))
        dense, gather = (f"{8e-6 * bandwidth:.0f}" for bandwidth in system.implied)
        rows.append([system.name, f"{system.rest:.3f}", *pairs, f"{system.throughput[2]}", dense, gather])
    return starred(
        title="Table IV: samples/s on 32 GPUs, theirs / ours, and the Mbit/s that theirs imply",
        headings=["model", " rest, s*", " dense", " Top-k", " gTop-k", " dense\n Mbit/s", " Top-k\n Mbit/s"],
        rows=rows,
        notes=(
            "* a gTop-k step of theirs without the messages of its tree: computing and selecting, in one. Times of "
            "computing are not given, nor sizes of models but ResNet-50's; they are what these models usually have.",
            "The order of the three is theirs for every model, the distances are not: their dense and Top-k steps took "
            f"as long as over a link of so many Mbit/s, where alpha and beta say {8e-6 * model.LINK.bandwidth:.0f}.",
        ),
    )


def _figure_10() -> Table:
    rows = []
    for system in model.SYSTEMS:
        scales = system.predicted(_WORLDS)
        for recipe in model.NAMES:
            shares = (f"{100 * scale.efficiency(recipe):.1f}" for scale in scales)
            rows.append([f"{system.name} ", recipe, *shares])
    return starred(
        title="Fig. 10: scaling efficiency in %, from alpha and beta",
        headings=["model ", "recipe", *(f"  {world}" for world in _WORLDS)],
        rows=rows,
        notes=('Over the rest above. Their figure\'s values are not in the text, but "up to 80 %" for ResNets on 32.',),
    )


def _document() -> dict[str, Any]:
    models = [
        asdict(s)
        | {"rest": s.rest, "implied_bandwidth": s.implied, "predicted": [asdict(x) for x in s.predicted(_WORLDS)]}
        for s in model.SYSTEMS
    ]
    return {"times": [asdict(row) for row in model.times()], "crossings": model.crossings(), "models": models}


def gtopk_figure() -> Figure:
    """Draw Fig. 9 (left) with Table I's values as circles, and Fig. 10 of two models."""
    figure = blank((12.0, 5.0))
    left, middle, right = figure.subplots(1, 3)
    _times_panel(left)
    for axes, system in ((middle, model.SYSTEMS[2]), (right, model.SYSTEMS[1])):
        _model_panel(axes, system)
    middle.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 0.08))
    head(figure, "gTop-k (Shi et al. 2019) from its own alpha 0.436 ms and beta 36 ns per element; density 0.001")
    return figure


def _times_panel(axes: Axes) -> None:
    rows = model.times()
    workers = [row.workers for row in rows]
    for values, colour, dash, label in (
        ([row.gather_formula for row in rows], COLOURS[0], "-", "all-gather, their formula"),
        ([row.gather_ours for row in rows], COLOURS[0], "--", "all-gather, a ring"),
        ([row.tree_ours for row in rows], COLOURS[2], "-", "tree"),
    ):
        axes.plot(workers, values, dash, color=colour, linewidth=1.8, label=label)
    for published in ([row.gather_theirs for row in rows], [row.tree_theirs for row in rows]):
        axes.plot(workers, published, **CIRCLE, color=INK)
    over_workers(axes, workers)
    name(axes, "Exchange, ms", "workers; circles: as published")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def _model_panel(axes: Axes, system: model.System) -> None:
    scales = system.predicted(_DRAWN)
    for label, colour, seconds in zip(model.NAMES, _STYLES, system.seconds, strict=True):
        axes.plot(_DRAWN, [s.efficiency(label) for s in scales], color=colour, linewidth=1.8, label=label)
        axes.plot(model.WORKERS, system.rest / seconds, **CIRCLE, color=colour)
    over_workers(axes, _DRAWN)
    share_axes(axes)
    name(axes, f"Efficiency, {system.name}", "workers; circles: from published throughput")


app = app_of(gtopk)

if __name__ == "__main__":
    app()
