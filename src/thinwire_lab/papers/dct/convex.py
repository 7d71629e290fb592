"""Corollary 1: SGD on a strongly convex loss over a thresholded layer converges like 1/k."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire_lab.papers.shared.claims import DCT, Finding
from thinwire_lab.papers.shared.material import Logistic, Material

_DENSITY, _RIDGE, _BATCH = 0.1, 0.05, 16


@DCT.claim("T21")
def converges(material: Material) -> Finding:
    problem, steps = _thresholded(Logistic.mnist(material)), material.many(400, 20_000)
    best = _descended(problem)
    gaps = torch.tensor([_gaps(problem, best, steps, seed) for seed in range(material.many(2, 8))]).mean(dim=0)
    marks = torch.tensor([math.log(_gamma(problem) + mark) for mark in _marks(steps)])
    x, y = marks - marks.mean(), gaps.log() - gaps.log().mean()
    slope = float((x @ y) / (x @ x))
    figure = (
        f"slope {slope:.2f} of the gap over gamma + k, both in logarithms; from "
        f"{float(gaps[0]):.1e} to {float(gaps[-1]):.1e}"
    )
    return Finding(holds=slope <= -0.9, figure=figure, said={"steps": steps})


def _thresholded(problem: Logistic) -> Logistic:
    """Return the problem on what passes of each image."""
    k = round(_DENSITY * problem.images.shape[1])
    least = problem.images.topk(k, dim=1).values[:, -1:]
    return Logistic(images=problem.images * (problem.images >= least), labels=problem.labels)


def _gradient(problem: Logistic, w: Tensor, part: slice | Tensor = slice(None)) -> Tensor:
    return problem.gradient(w, part) + _RIDGE * w


def _loss(problem: Logistic, w: Tensor) -> float:
    return float(F.cross_entropy(problem.images @ w, problem.labels) + _RIDGE / 2 * w.square().sum())


def _descended(problem: Logistic) -> float:
    """Return the least loss."""
    w, rate = problem.zeros().double(), 1 / (problem.smoothness + _RIDGE)
    exact = Logistic(images=problem.images.double(), labels=problem.labels)
    for _ in range(3000):
        w = w - rate * _gradient(exact, w)
    return _loss(exact, w)


def _gamma(problem: Logistic) -> float:
    return 4 * (problem.smoothness + _RIDGE) / _RIDGE


def _gaps(problem: Logistic, best: float, steps: int, seed: int) -> list[float]:
    """Return how far above the least loss SGD is at each mark."""
    generator, w, found = torch.Generator().manual_seed(seed), problem.zeros(), []
    gamma = _gamma(problem)
    for step in range(1, steps + 1):
        part = torch.randint(len(problem.labels), (_BATCH,), generator=generator)
        w = w - 2 / (_RIDGE * (gamma + step)) * _gradient(problem, w, part)
        if step in _marks(steps):
            found.append(
                max(1e-12, _loss(Logistic(images=problem.images.double(), labels=problem.labels), w.double()) - best)
            )
    return found


def _marks(steps: int) -> list[int]:
    """Return steps over the last decade and a half, evenly spaced in their logarithm."""
    return [round(steps * 10 ** (-1.5 + 0.25 * i)) for i in range(7)]
