"""What do the activations at the first cut look like, and which law do they follow?"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.codecs.base import kept
from thinwire.codecs.laplace_threshold import laplace_quantile
from thinwire.pipeline import Boundary
from thinwire_lab.papers.dct.training import Material, Network, train

DENSITIES = (0.25, 0.10, 0.05)
LOOKS = 100
"""The number of looks during a training."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Activations at a step, before the boundary.

    rms: root of their mean square. zeros: share of elements. By density: the k-th largest magnitude, averaged over
    rows; and the shares of elements that reach two thresholds: one fitted to |R|, one fitted to R as the paper prints
    it, where R follows a Laplace law.
    """

    step: int
    rms: float
    zeros: float
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
        if self.training and self.step % self.every == 0:
            self.looks.append(look(x.detach().flatten(0, -2), self.step))
        self.step += self.training
        return x if self.boundary is None else self.boundary(x)


def look(x: Tensor, step: int) -> Look:
    magnitudes = x.abs()
    mean, scale = x.mean(), (x.var(correction=0) / 2).sqrt()
    return Look(
        step=step,
        rms=float(x.square().mean().sqrt()),
        zeros=float((x == 0).double().mean()),
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


def criteria(x: Tensor) -> dict[str, float]:
    """Return for each law at its best parameters Akaike's criterion over the number of elements; less is better.

    Compare laws with a mass at zero only with each other, because a density at zero has no bound.
    """
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
