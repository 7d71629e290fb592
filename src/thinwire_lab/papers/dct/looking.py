"""What do the activations at the first cut look like, and which law do they follow? And their figures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from torch import Tensor, nn

from thinwire.codecs.base import kept
from thinwire.codecs.laplace_threshold import laplace_quantile
from thinwire.pipeline import Boundary
from thinwire_lab.papers.dct.training import Material, Network, train
from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED, blank, name, restrain

BINS = 160
DENSITIES = (0.25, 0.10, 0.05)
LOOKS = 100
"""The number of looks during a training."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Activations at a step, before the boundary.

    rms: root of their mean square. zeros: share of elements. kept: share that the boundary let through, 1 without one.
    By density: the k-th largest magnitude, averaged over rows; and the shares of elements that reach two thresholds:
    one fitted to |R|, one fitted to R as the paper prints it, where R follows a Laplace law.
    """

    step: int
    rms: float
    zeros: float
    kept: float
    thresholds: list[float]
    fitted: list[float]
    one_sided: list[float]


class Watch(nn.Module):
    """Looks at its input `LOOKS` times in `steps` training steps, and passes it on to the boundary."""

    def __init__(self, boundary: Boundary | None, steps: int) -> None:
        super().__init__()
        self.boundary, self.every, self.step, self.looks = boundary, max(1, steps // LOOKS), 0, list[Look]()

    def forward(self, x: Tensor) -> Tensor:
        """Return the boundary's output for x (..., width)."""
        out = x if self.boundary is None else self.boundary(x)
        through = 1.0 if self.boundary is None else self.boundary.report().kept
        if self.training and self.step % self.every == 0:
            self.looks.append(look(x.detach().flatten(0, -2), self.step, through))
        self.step += self.training
        return out


def look(x: Tensor, step: int, through: float) -> Look:
    """Look at a matrix."""
    magnitudes = x.abs()
    mean, scale = x.mean(), (x.var(correction=0) / 2).sqrt()
    return Look(
        step=step,
        rms=float(x.square().mean().sqrt()),
        zeros=float((x == 0).double().mean()),
        kept=through,
        thresholds=[_threshold(magnitudes, density) for density in DENSITIES],
        fitted=[_share(magnitudes, laplace_quantile(mean, scale, density)) for density in DENSITIES],
        one_sided=[_share(x, mean - scale * torch.tensor(2 * density).log()) for density in DENSITIES],
    )


def follow(material: Material, boundary: Boundary | None) -> tuple[Network, list[Look]]:
    """Train with a boundary at the first cut, or with none, and return the network and the looks."""
    watch = Watch(boundary, len(material.batches))
    network = Network(material.problem, 1, 0, lambda: watch)
    train(network, material)
    return network, watch.looks


@torch.no_grad()
def activations(network: Network, material: Material) -> dict[str, Tensor]:
    """Return all held-out activations at the first cut, and the input of the last ReLU before it, if any."""
    network.eval()
    with _heard(network) as heard:
        for batch in material.problem.held_out(0, 1):
            network(batch)
    return {name: torch.cat(parts) for name, parts in heard.items() if parts}


@contextmanager
def _heard(network: Network) -> Iterator[dict[str, list[Tensor]]]:
    heard: dict[str, list[Tensor]] = {"before the ReLU": [], "at the cut": []}
    before, after = heard.values()
    hooks = [network.between[0].register_forward_pre_hook(lambda _, x: after.append(x[0].flatten().clone()))]
    for relu in [part for part in network.stages[0].modules() if isinstance(part, nn.ReLU)][-1:]:
        hooks.append(relu.register_forward_pre_hook(lambda _, x: before.append(x[0].flatten().clone())))
    yield heard
    for hook in hooks:
        hook.remove()


def _threshold(magnitudes: Tensor, density: float) -> float:
    k = kept(density, magnitudes.shape[1])
    return float(magnitudes.topk(k, sorted=False).values.amin(1).mean())


def _share(x: Tensor, threshold: Tensor) -> float:
    return float((x >= threshold).double().mean())


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All activations at a place: `edges` (161,) and `density` (160,) of a histogram, mean and variance.

    aic: for each law at its best parameters, Akaike's criterion over the number of elements; less is better. Compare
    laws with a mass at zero only with each other, because a density at zero has no bound.
    """

    edges: list[float]
    density: list[float]
    mean: float
    variance: float
    zeros: float
    aic: dict[str, float]


def shape(x: Tensor) -> Shape:
    """Describe a flat tensor."""
    reach = float(x.abs().float().sort().values[round(0.9995 * (x.numel() - 1))])
    low = 0.0 if bool((x >= 0).all()) else -reach
    inside = x[(x >= low) & (x <= reach)].float()
    counts, edges = torch.histogram(inside, BINS, range=(low, reach))
    width = (reach - low) / BINS
    return Shape(
        edges=edges.tolist(),
        density=(counts / (x.numel() * width)).tolist(),
        mean=float(x.double().mean()),
        variance=float(x.double().var(correction=0)),
        zeros=float((x == 0).double().mean()),
        aic=criteria(x.double()),
    )


def criteria(x: Tensor) -> dict[str, float]:
    """Return Akaike's criterion by law, over the number of elements."""
    spread, variance = float((x - x.median()).abs().mean()), float(x.var(correction=0))
    found = {"Laplace": 2 + 2 * math.log(2 * spread), "normal": 1 + math.log(2 * math.pi * variance)}
    found = {name: value + 4 / x.numel() for name, value in found.items()}
    rest = x[x != 0].abs()
    share = rest.numel() / x.numel()
    if 0 < share < 1:
        mass = -2 * (share * math.log(share) + (1 - share) * math.log(1 - share)) + 4 / x.numel()
        found["zeros and exponential"] = mass + share * (2 + 2 * math.log(float(rest.mean())))
        half = 1 + math.log(math.pi / 2 * float(rest.square().mean()))
        found["zeros and half-normal"] = mass + share * half
    return found


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
            measured = _threshold_line(document, "dense", place, by_rms)
            applied = _threshold_line(document, f"exact {density:g}", place, by_rms)
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


def _threshold_line(document: Document, run: str, place: int, by_rms: bool) -> Line:
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
