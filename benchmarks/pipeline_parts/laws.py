"""Which law activations follow: a histogram, and how well laws fit."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 160


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of all activations at a place: `edges` (161,) and `density` (160,) of a histogram, mean and variance.

    aic: Akaike's criterion over the number of elements, less is better: for each law at its best parameters. Laws with
    a mass at zero are only to be compared with each other, as a density at zero has no bound.
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
