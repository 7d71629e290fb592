"""Held-out loss over bits and over steps."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from thinwire_lab.show.canvas import COLOURS, DASHES, FAINT, blank, head, legend, name, restrain
from thinwire_lab.studies.convergence.results import Several


def draw(groups: Sequence[Several], path: Path) -> None:
    """Draw a line for each, in two panels: over all bits so far, and over steps."""
    figure = blank((13, 6.2 + 0.27 * len(groups)))
    bits, steps = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    styles = [(colour, dash) for dash in DASHES for colour in COLOURS]
    for each, (colour, dash) in zip(groups, cycle(styles), strict=False):
        curve, how = each.curve(), each.settings
        label = f"{each.loss:.3f} at {each.bits:.2g} bit: {how.recipe}, {how.optimizer}, lr {how.rate:g}"
        losses = [look.loss for look in curve]
        for axes, places in ((bits, [look.bits for look in curve]), (steps, [float(look.step) for look in curve])):
            axes.plot(places, losses, dash, color=colour, linewidth=1.6, label=label)
    for axes, title, along in (
        (bits, "Loss over what was sent", "bits per parameter and worker, all steps so far"),
        (steps, "Loss over steps", "step"),
    ):
        restrain(axes)
        name(axes, title, along)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    bits.set_xscale("log")
    one = groups[0].settings
    head(figure, f"Held-out loss, {one.model}, {one.workers} workers, {one.steps} steps, {one.schedule} schedule")
    handles, labels = steps.get_legend_handles_labels()
    legend(figure, handles, labels, columns=1)
    figure.savefig(path)
