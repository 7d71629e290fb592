"""Training in one process, and what is recorded on the way."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codecs import FFT
from thinwire.formats import OffsetFloat
from thinwire_lab.inputs import BadInput
from thinwire_lab.papers.shared.material import Alpha, Gradients, Run, Snapshot, Stale, flat
from thinwire_lab.problems import Problem, build

FOLDERS = {"lstm": ("wikitext2", "wikitext-2"), "resnet20": ("cifar10", "cifar-10")}
DENSITY = 0.05
LIFE = 50
THETAS = (0.5, 0.85, 0.95, 0.99)
LATE_WORKERS, WORKERS = 16, 4
SMALLEST_LAYER = 1024


def available(data: Path | None, seed: int) -> Iterator[tuple[str, Problem | str]]:
    """Yield each model's problem, or why there is none."""
    for model, folders in FOLDERS.items():
        found = [data / name for name in folders if data is not None and (data / name).exists()]
        wanted = f"{data} has no folder {' or '.join(folders)}" if data else "it needs --data"
        try:
            yield model, build(model, seed=seed, data=found[0]) if found else wanted
        except BadInput as bad:
            yield model, str(bad)


def record(problem: Problem, model: str, steps: int, quick: bool, tick: Callable[[], None]) -> Run:
    """Train for `steps`. Return what was recorded; `tick` is for each step."""
    layers: dict[str, _Layer] = {}
    run = Run(model=model, problem=problem)
    several = dict.fromkeys((*_probes(steps, quick), *_snapshots(steps)), WORKERS)
    workers = several | {steps - 1: WORKERS if quick else LATE_WORKERS}  # more than one, at these steps
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=problem.learning_rate, momentum=problem.momentum)
    for step in range(steps):
        seen = [gradients(problem, step, rank, LATE_WORKERS) for rank in range(workers.get(step, 1))]
        for name, parameter in problem.model.named_parameters():
            parameter.grad = seen[0][name]
        optimizer.step()
        _follow_thresholds(run, layers, step, seen[0])
        if step in _probes(steps, quick):
            run.alphas += alphas(step, seen)
        if step in _snapshots(steps):
            run.snapshots.append(Snapshot(step=step, workers=seen))
        tick()
    return run


def gradients(problem: Problem, step: int, rank: int, world: int) -> Gradients:
    named = dict(problem.model.named_parameters())
    loss = problem.loss(problem.model, problem.batch(step, rank, world))
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def alphas(step: int, workers: list[Gradients]) -> list[Alpha]:
    """Measure α for every θ, with and without 10-bit numbers; each tensor is transformed on its own."""
    dense = torch.stack([flat(w) for w in workers[:WORKERS]]).mean(dim=0)
    found = []
    for theta in THETAS:
        for quantised in (False, True):
            codec = FFT(density=1 - theta, values=OffsetFloat.balanced(bits=10, mantissa=5) if quantised else None)
            sent = [torch.cat([codec.encode(g).dense() for g in w.values()]) for w in workers[:WORKERS]]
            ratio = (torch.stack(sent).mean(dim=0) - dense).norm() / dense.norm()
            found.append(Alpha(step=step, theta=theta, quantised=quantised, value=float(ratio)))
    return found


@dataclass(kw_only=True)
class _Layer:
    """Error feedback with exact Top-k, simulated alongside training, with a threshold younger than LIFE."""

    waiting: Tensor
    stale: float = 0.0
    waiting_stale: Tensor = field(default_factory=lambda: torch.empty(0))


def _follow_thresholds(run: Run, layers: dict[str, _Layer], step: int, seen: Gradients) -> None:
    """Note each layer's exact threshold, and what a threshold measured less than LIFE steps ago would have sent."""
    large = {name: x.reshape(-1) for name, x in seen.items() if x.numel() >= SMALLEST_LAYER and x.dim() >= 2}
    for name, x in large.items():
        layer = layers.setdefault(name, _Layer(waiting=torch.zeros_like(x), waiting_stale=torch.zeros_like(x)))
        exact = _cut(layer.waiting.add_(x))
        layer.waiting.masked_fill_(layer.waiting.abs() >= exact, 0)
        run.thresholds.setdefault(name, []).append(exact)
        run.stale.append(_send_stale(layer, step, x))


def _send_stale(layer: _Layer, step: int, x: Tensor) -> Stale:
    corrected = layer.waiting_stale.add_(x)
    if step % LIFE == 0:
        layer.stale = _cut(corrected)
    before = float(corrected.square().sum())
    sent = corrected.abs() >= layer.stale
    corrected.masked_fill_(sent, 0)
    left = float(corrected.square().sum()) / before if before else 0.0
    return Stale(left=left, density=float(sent.float().mean()))


def _cut(x: Tensor) -> float:
    return float(x.abs().topk(max(1, round(DENSITY * x.numel())), sorted=False).values.min())


def _snapshots(steps: int) -> tuple[int, ...]:
    return (min(2, steps - 1), steps // 2, steps - 1)


def _probes(steps: int, quick: bool) -> set[int]:
    """Return at which steps α is measured."""
    count = 1 if quick else 6
    return {place * (steps - 1) // count for place in range(count + 1)}
