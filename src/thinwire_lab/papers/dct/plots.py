"""The figures of activations and thresholds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from thinwire_lab.papers.dct.looking import DENSITIES
from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED, blank, name, restrain

Document = Mapping[str, Any]
Line = tuple[Sequence[float], Sequence[float]]
Style = Literal["-", ":"]
SOLID: Style = "-"
DOTTED: Style = ":"


def draw(document: Document, folder: Path) -> None:
    """Draw all of them."""
    for title, figure in (("thresholds", thresholds), ("activations", histograms), ("fitted_thresholds", drift)):
        drawn = blank((11, 4.4))
        figure(document, list(drawn.subplots(1, 2)))
        drawn.savefig(folder / f"{title}.png")


def thresholds(document: Document, axes: Sequence[Axes]) -> None:
    """Draw the mean top-k threshold over training, plain and relative to the activations' RMS."""
    for panel, by_rms in zip(axes, (False, True), strict=True):
        ends = []
        for place, density in enumerate(DENSITIES):
            measured = _threshold(document, "dense", place, by_rms)
            applied = _threshold(document, f"exact {density:g}", place, by_rms)
            panel.plot(*measured, SOLID, color=COLOURS[place], linewidth=1.6)
            panel.plot(*applied, DOTTED, color=COLOURS[place], linewidth=2)
            ends += [(line[1][-1], f"{100 - 100 * density:.0f} %", COLOURS[place]) for line in (measured, applied)]
        panel.set_ylim(bottom=0)
        _label(panel, ends)
        _finish(
            panel, "Threshold over the activations' RMS" if by_rms else "Top-k threshold, mean over samples", "step"
        )
    axes[0].set_ylabel("threshold, in units of the activation", fontsize=9.5, color=MUTED)
    axes[1].set_ylabel("threshold / RMS", fontsize=9.5, color=MUTED)
    _legend(axes[0], {"measured in a dense training": SOLID, "boundary applied": DOTTED})


def _threshold(document: Document, run: str, place: int, by_rms: bool) -> Line:
    looks = document["runs"][run]
    values = [look["thresholds"][place] / (look["rms"] if by_rms else 1.0) for look in looks]
    return [look["step"] for look in looks], _smooth(values)


def histograms(document: Document, axes: Sequence[Axes]) -> None:
    """Draw activations after training, and the laws with the same mean and variance."""
    for panel, (place, found) in zip(axes, document["shapes"].items(), strict=False):
        edges, scale = np.array(found["edges"]), math.sqrt(found["variance"])
        panel.stairs(found["density"], edges, fill=True, color="#C3C9D1", label="activations")
        x = np.linspace(edges[0], edges[-1], 400)
        away = (x - found["mean"]) / scale
        panel.plot(x, np.exp(-math.sqrt(2) * abs(away)) / (math.sqrt(2) * scale), color=COLOURS[1], label="Laplace")
        bell = np.exp(-(away**2) / 2) / (math.sqrt(2 * math.pi) * scale)
        panel.plot(x, bell, "--", color=COLOURS[0], label="normal")
        panel.set_yscale("log")
        panel.set_ylim(bottom=min(each for each in found["density"] if each > 0) / 2)
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)
        _finish(panel, f"{place[0].upper()}{place[1:]}: {100 * found['zeros']:.0f} % are zero", "activation")
    axes[0].set_ylabel("probability density, logarithmic", fontsize=9.5, color=MUTED)


def drift(document: Document, axes: Sequence[Axes]) -> None:
    """Draw the real density behind the fitted threshold, without a bound and with the default one."""
    for panel, bound in zip(axes, (", unbounded", ""), strict=True):
        ends = []
        for place, density in enumerate(DENSITIES):
            looks = document["runs"][f"Laplace {density:g}{bound}"]
            steps, real = [look["step"] for look in looks], _smooth([100 * look["kept"] for look in looks])
            panel.plot(steps, real, color=COLOURS[place], linewidth=1.6)
            panel.axhline(100 * density, color=COLOURS[place], linewidth=1, linestyle=DOTTED)
            ends.append((real[-1], f"{real[-1]:.0f} %, wanted {100 * density:.0f}", COLOURS[place]))
        panel.set_ylim(bottom=0)
        _label(panel, ends)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} %"))
        _finish(panel, "At most twice as many, the default" if not bound else "No bound", "step")
    axes[0].set_ylabel("activations that pass", fontsize=9.5, color=MUTED)
    _legend(axes[0], {"really": SOLID, "wanted": DOTTED})


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Average a few looks around each, because single batches vary."""
    half = window // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _label(panel: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name lines where they end, each at least a line of text away from the next."""
    gap, last = 0.055 * panel.get_ylim()[1], -math.inf
    for height, text, colour in sorted(ends):
        last = max(height, last + gap)
        at = (1.01, last)
        panel.annotate(text, at, xycoords=("axes fraction", "data"), va="center", color=colour, fontsize=9)


def _legend(panel: Axes, styles: Mapping[str, Style]) -> None:
    handles = [Line2D([], [], linestyle=style, color=MUTED, label=label) for label, style in styles.items()]
    panel.legend(handles=handles, frameon=False, fontsize=9, labelcolor=INK)


def _finish(panel: Axes, title: str, along: str) -> None:
    name(panel, title, along)
    panel.grid(axis="y", color=FAINT, linewidth=0.7)
    restrain(panel)
