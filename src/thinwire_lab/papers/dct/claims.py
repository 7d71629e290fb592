"""Thresholds, activations, Theorem 1, and Corollary 1: SGD on a thresholded layer converges like 1/k."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.codecs import BlockTopK, LaplaceThreshold, SampledThreshold, TopK
from thinwire.codecs.thresholding import kth_largest
from thinwire_lab.papers.dct.looking import criteria
from thinwire_lab.papers.shared.claims import DCT, Finding
from thinwire_lab.papers.shared.material import Absent, Logistic, Material, ratio, seconds
from thinwire_lab.problems import build


def deviations(thresholds: list[float]) -> list[float]:
    """After the first 5 % of steps: return how far each threshold lies from the mean of all up to it."""
    x = torch.tensor(thresholds, dtype=torch.float64)
    running = x.cumsum(0) / torch.arange(1, len(x) + 1)
    return (x / running - 1)[max(1, len(x) // 20) :].tolist()


@DCT.claim("T1")
def stray(material: Material) -> Finding:
    largest = {
        f"{run.model} {layer}": max(map(abs, deviations(found)))
        for run in material.recorded()
        for layer, found in run.thresholds.items()
    }
    if not largest:
        raise Absent("needs thresholds over training")
    worst = max(largest, key=lambda layer: largest[layer])
    fine = sum(value <= 0.26 for value in largest.values())
    halves = [found[len(found) // 2 :] for run in material.recorded() for found in run.thresholds.values()]
    later = sum(max(map(abs, deviations(half))) <= 0.26 for half in halves)
    figure = (
        f"{fine} of {len(largest)} layers stay within 26 %, {later} when counted from halfway; "
        f"worst {largest[worst]:.0%} ({worst})"
    )
    steps = max(len(found) for run in material.recorded() for found in run.thresholds.values())
    return Finding(holds=fine == len(largest), figure=figure, said={"steps": steps})


@DCT.claim("T2")
def contraction(material: Material) -> Finding:
    found = [s for run in material.recorded() for s in run.stale]
    if not found:
        raise Absent("needs thresholds over training")
    nothing = sum(s.density == 0 for s in found)
    most = max(s.left for s in found)
    figure = f"nothing passes in {nothing} of {len(found)} layer-steps; |E|^2/|W|^2 up to {most:.3f}"
    return Finding(holds=nothing == 0, figure=figure)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The inputs (batch, width) of every ReLU at one step."""

    step: int
    before: list[Tensor]


def watch(material: Material) -> list[Seen]:
    """Train, and return the inputs seen at five steps. Raises Absent without MNIST."""
    return _train(material.folder("mnist"), material.many(40, 300), material.seed)


@lru_cache(maxsize=1)
def _train(folder: Path, steps: int, seed: int) -> list[Seen]:
    problem, found = build("mlp", seed=seed, data=folder), []
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=problem.learning_rate, momentum=problem.momentum)
    for step in range(steps + 1):
        batch = problem.batch(step, 0, 1)
        if step % (steps // 4) == 0:
            found.append(Seen(step=step, before=_before(problem.model, batch[0])))
        optimizer.zero_grad()
        problem.loss(problem.model, batch).backward()
        optimizer.step()
    return found


@torch.no_grad()
def _before(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for layer in model.children():
        if isinstance(layer, nn.ReLU):
            found.append(x)
        x = layer(x)
    return found


@DCT.claim("T17")
def laplace_or_normal(material: Material) -> Finding:
    last = watch(material)[-1]
    figures, better = [], []
    for place, before in enumerate(last.before):
        laplace, normal = (criteria(before.double().view(-1))[law] for law in ("Laplace", "normal"))
        better.append(laplace < normal)
        after = before.clamp(min=0)
        figures.append(f"layer {place + 1}: AIC {laplace:.3f} against {normal:.3f} per element before the ReLU")
        figures[-1] += f", {float((after == 0).double().mean()):.0%} zeros after"
    return Finding(holds=all(better), figure="; ".join(figures))


@DCT.claim("T18")
def drifting(material: Material) -> Finding:
    real = [[_density(layer.clamp(min=0), 0.25) for layer in seen.before] for seen in watch(material)]
    gradients = [LaplaceThreshold(density=0.25, bound=4.0).encode(x) for _, x in material.tensors(least=1024)]
    sent = [int((p.values != 0).sum()) / p.numel for p in gradients] or [math.nan]
    spans = [max(layer) - min(layer) for layer in zip(*real, strict=True)]
    figure = "; ".join(
        f"layer {i + 1}: {layer[0]:.1%} to {layer[-1]:.1%}" for i, layer in enumerate(zip(*real, strict=True))
    )
    one_sided = [_density(layer.clamp(min=0), 0.5) for layer in watch(material)[-1].before]
    figure += f"; a one-sided quantile gives {', '.join(f'{share:.0%}' for share in one_sided)} at the end"
    figure += f"; on gradients {min(sent):.0%} to {max(sent):.0%}"
    return Finding(holds=max(spans) >= 0.05, figure=figure)


def _density(x: Tensor, wanted: float) -> float:
    return float((x.abs() >= x.abs().mean() * math.log(1 / wanted)).double().mean())


@DCT.claim("T20")
def first_order(material: Material) -> Finding:
    generator, n, units = torch.Generator().manual_seed(material.seed), material.many(100_000, 400_000), 8
    hidden = torch.randn(n, units, generator=generator, dtype=torch.float64)
    v = torch.randn(units, generator=generator, dtype=torch.float64)
    target = torch.tanh(hidden @ v)
    common = _mean_gradient(hidden, v, target, 1.0)
    gaps = []
    for spread in (0.4, 0.2):
        both = [_mean_gradient(hidden, v, target, 1 + sign * spread) for sign in (-1, 1)]
        gaps.append(float((sum(both) / 2 - common).norm() / common.norm()))
    figure = f"relative gap {gaps[0]:.4f} at spread 0.4, {gaps[1]:.4f} at 0.2: {gaps[0] / gaps[1]:.1f} times less"
    return Finding(holds=3 <= gaps[0] / gaps[1] <= 5, figure=figure)


def _mean_gradient(hidden: Tensor, v: Tensor, target: Tensor, threshold: float) -> Tensor:
    kept = hidden * (hidden.abs() >= threshold)
    return kept.T @ (kept @ v - target) / len(hidden)


@DCT.claim("T24")
def zeros(material: Material) -> Finding:
    found: list[Seen] = watch(material)
    shares = [[float((layer <= 0).double().mean()) for layer in seen.before] for seen in found]
    every = [share for step in shares for share in step]
    figure = "; ".join(f"layer {i + 1}: {s[0]:.0%} to {s[-1]:.0%}" for i, s in enumerate(zip(*shares, strict=True)))
    kept = torch.cat([layer.clamp(min=0).view(-1) for layer in found[-1].before])
    printed = float((kept >= kept.sort().values[round(0.25 * kept.numel())]).double().mean())
    return Finding(
        holds=min(every) >= 0.35 and max(every) <= 0.65, figure=figure, said={"steps": found[-1].step, "kept": printed}
    )


@DCT.claim("T25")
def twenty_times(material: Material) -> Finding:
    masked, listed = ratio(BlockTopK(density=0.05, block=1)), ratio(TopK(density=0.05))
    both = 2 / (1 / masked + 0.05)
    figure = (
        f"{masked:.1f} times with a mask, {listed:.1f} with indices, both coded, {both:.1f} over both ways if "
        "one needs neither"
    )
    return Finding(holds=max(masked, both) >= 19.5, figure=figure)


@DCT.claim("T27")
def sorting(material: Material) -> Finding:
    x = torch.randn(1 << material.many(20, 22))
    k = x.numel() // 20
    ways = {
        "sort": seconds(lambda: x.abs().sort(), 2),
        "topk": seconds(lambda: TopK(density=0.05).encode(x), 2),
        "kthvalue": seconds(lambda: x.abs().kthvalue(x.numel() - k), 2),
        "exact threshold": seconds(lambda: kth_largest(x, k), 2),
        "sampled": seconds(lambda: SampledThreshold(density=0.05).encode(x), 2),
        "one pass": seconds(lambda: LaplaceThreshold(density=0.05, bound=2.0).encode(x), 2),
    }
    saved = x.nbytes * 0.9 / (12.5e9 / 8)
    figure = ", ".join(f"{name} {1000 * t:.1f} ms" for name, t in ways.items())
    figure += f"; {1000 * saved:.1f} ms of transfer saved at 12.5 Gbit/s, {12500 * saved:.0f} ms at 1 Gbit/s"
    return Finding(holds=ways["sort"] > saved, figure=figure, said={"mib": x.nbytes >> 20})


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
    gamma, exact = _gamma(problem), Logistic(images=problem.images.double(), labels=problem.labels)
    for step in range(1, steps + 1):
        part = torch.randint(len(problem.labels), (_BATCH,), generator=generator)
        w = w - 2 / (_RIDGE * (gamma + step)) * _gradient(problem, w, part)
        if step in _marks(steps):
            found.append(max(1e-12, _loss(exact, w.double()) - best))
    return found


def _marks(steps: int) -> list[int]:
    """Return steps over the last decade and a half, evenly spaced in their logarithm."""
    return [round(steps * 10 ** (-1.5 + 0.25 * i)) for i in range(7)]
