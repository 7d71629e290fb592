"""The results as figures: loss over time, and loss over bytes."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire_lab.bench.results import Results, Row
from thinwire_lab.show.canvas import ALARM, COLOURS, DASHES, INK, MUTED, blank, head, legend, log_ticks, name, restrain
from thinwire_lab.show.table import human_bytes, loss_text


def _figure(panel: Callable[[Axes, Results], None], results: Results) -> Figure:
    figure = blank((7.5, 4.8))
    axes = figure.add_subplot()
    restrain(axes)
    panel(axes, results)
    colour = ALARM if results.incomplete or not results.throttled else MUTED
    head(figure, *filter(None, (results.title, results.incomplete)), colour=colour)
    legend(figure, axes, columns=4)
    return figure


def _seconds_panel(axes: Axes, results: Results) -> None:
    _curves(axes, results, 0)
    for row, colour, _ in _styled(results):
        if row.seconds_to_target is not None and results.target_loss is not None:
            axes.plot(row.seconds_to_target, results.target_loss, "o", color=colour, markersize=6, zorder=3)
    axes.set_xlim(left=0)
    name(axes, "Held-out loss over time", "training seconds; a dot where the target is reached")


def _bytes_panel(axes: Axes, results: Results) -> None:
    axes.set_xscale("log", nonpositive="mask")
    _curves(axes, results, 1)
    log_ticks(axes.xaxis, round_bytes)
    name(axes, "Held-out loss over bytes sent", f"bytes sent per {results.sender}, log scale")


def _curves(axes: Axes, results: Results, along: int) -> None:
    for row, colour, dash in _styled(results):
        places = [point[along] for point in row.loss_curve]
        losses = [point[2] for point in row.loss_curve]
        label = row.label if math.isfinite(row.final_loss) else f"{row.label} (diverged)"
        axes.plot(places, losses, dash, color=colour, linewidth=1.8, label=label)
        if row.spread is not None:
            low, high = (np.add(losses, np.multiply(sign, row.spread.curve_deviation)) for sign in (-1, 1))
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if results.target_loss is not None:
        label = f"target {loss_text(results.target_loss)}"
        axes.axhline(results.target_loss, color=MUTED, linewidth=0.8, zorder=1, label=label)
    _limit_losses(axes, results)


def _limit_losses(axes: Axes, results: Results) -> None:
    """Show where the curves differ. Leave out the steep first fifth, diverged runs, and losses above the first."""
    shown = [row for row in results.rows if math.isfinite(row.final_loss)]
    curves = [[loss for _, _, loss in row.loss_curve if math.isfinite(loss)] for row in shown]
    late = [loss for curve in curves for loss in curve[len(curve) // 5 :]]
    if late:
        high = min(max(late), max(curve[0] for curve in curves if curve))
        low = min(late if results.target_loss is None else [*late, results.target_loss])
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


loss_over_seconds = partial(_figure, _seconds_panel)
"""Held-out loss over training seconds."""
loss_over_bytes = partial(_figure, _bytes_panel)
"""Held-out loss over the bytes each worker sent, on a log scale."""


def round_bytes(count: float) -> str:
    """Bytes for an axis: ``5 MB``."""
    number, unit = human_bytes(count).split()
    return f"{float(number):g} {unit}"


def _styled(results: Results) -> Iterator[tuple[Row, str, str]]:
    """Give each row its recipe's colour. Dashes tell rows of one colour apart."""
    recipes = list(dict.fromkeys(row.recipe for row in results.rows if not row.is_dense))
    seen = Counter[str]()
    for row in results.rows:
        colour = INK if row.is_dense else COLOURS[recipes.index(row.recipe) % len(COLOURS)]
        yield row, colour, DASHES[seen[colour] % len(DASHES)]
        seen[colour] += 1
