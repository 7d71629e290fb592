"""The data on which claims are judged, and how far off, how long and how small things are."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.planner.probe.measure import timed
from thinwire_lab.problems import Problem, build

Gradients = dict[str, Tensor]
"""A gradient per parameter, in the parameter's shape."""


class Absent(Exception):  # noqa: N818 - it reads better where it is raised
    """The data for a check is missing; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The gradients of several workers at one step: same weights, different batches."""

    step: int
    workers: list[Gradients]

    @property
    def mean(self) -> Gradients:
        """The gradient that dense training would use."""
        return {name: torch.stack([w[name] for w in self.workers]).mean(dim=0) for name in self.workers[0]}


@dataclass(frozen=True, kw_only=True)
class Alpha:
    """‖v − v̄‖/‖v‖ at one step, when a share `theta` of the frequencies is dropped."""

    step: int
    theta: float
    quantised: bool
    value: float


@dataclass(frozen=True, kw_only=True)
class Stale:
    """A layer at a step under a threshold measured earlier: ‖E‖²/‖W‖² of the unsent rest, and the share sent."""

    left: float
    density: float


@dataclass(kw_only=True, eq=False)
class Run:
    """What was recorded while one model trained. `thresholds` are the 95 % ones per layer, one per step."""

    model: str
    problem: Problem | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    thresholds: dict[str, list[float]] = field(default_factory=dict)
    stale: list[Stale] = field(default_factory=list)
    alphas: list[Alpha] = field(default_factory=list)

    @property
    def late(self) -> Snapshot:
        """The last snapshot, which has the most workers."""
        return self.snapshots[-1]


@dataclass(kw_only=True)
class Material:
    """All data on which claims are judged; `quick` asks for fewer repetitions and smaller vectors."""

    runs: list[Run]
    data: Path | None = None
    seed: int = 0
    quick: bool = False

    def recorded(self) -> list[Run]:
        """Return the runs. Raises Absent if there are none."""
        if not self.runs:
            raise Absent("needs gradients; no model could be trained as no data was found")
        return self.runs

    def run(self, model: str) -> Run:
        """Return the run of one model. Raises Absent when it was not trained."""
        for run in self.runs:
            if run.model == model and run.problem is not None:
                return run
        raise Absent(f"needs {model}'s training data")

    def tensors(self, least: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) for each snapshot's mean gradients of `least` or more elements, flat."""
        for run in self.recorded():
            for shot in run.snapshots:
                for name, gradient in shot.mean.items():
                    if gradient.numel() >= least and bool(gradient.any()):
                        yield f"{run.model} {shot.step} {name}", gradient.reshape(-1)

    def many(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def folder(self, *names: str) -> Path:
        """Return the first of these data folders that exists. Raises Absent if none does."""
        for name in names:
            if self.data is not None and (self.data / name).exists():
                return self.data / name
        raise Absent(f"needs data: no folder {' or '.join(names)} was given")


def flat(gradients: Gradients) -> Tensor:
    """Return all gradients, one after another."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients.values()])


LONG = 1 << 20
"""Elements of a vector so long that a header does not matter."""


def error(x: Tensor, restored: Tensor) -> float:
    """Return err² = ‖x − x̂‖²/‖x‖²."""
    x = x.reshape(-1).double()
    return float((x - restored.reshape(-1).double()).square().sum() / x.square().sum())


def seconds(call: Callable[[], object], repeats: int = 5, of: Callable[[Iterable[float]], float] = min) -> float:
    """Return the shortest time of several calls, or another figure `of` them, after a warm-up call."""
    call()
    return of([timed(call, torch.device("cpu")) for _ in range(repeats)])


def ratio(codec: Codec) -> float:
    """How many times fewer bytes than float32 really travel for a long vector, header included?"""
    return 4 * LONG / codec.encode(torch.randn(LONG, generator=torch.Generator().manual_seed(0))).nbytes


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Mean cross entropy of softmax(x · w), for images (n, 784) and labels (n); w is (784, 10)."""

    images: Tensor
    labels: Tensor

    @classmethod
    def mnist(cls, material: Material) -> Self:
        """Return the problem on 2,048 digits. Raises Absent without MNIST."""
        images, labels = _digits(material.folder("mnist"), material.seed)
        return cls(images=images, labels=labels)

    def zeros(self) -> Tensor:
        """Return the starting point."""
        return torch.zeros(self.images.shape[1], 10)

    def loss(self, w: Tensor) -> float:
        return float(F.cross_entropy(self.images @ w, self.labels))

    def gradient(self, w: Tensor, part: slice | Tensor = slice(None)) -> Tensor:
        images, labels = self.images[part], self.labels[part]
        residual = torch.softmax(images @ w, dim=1) - F.one_hot(labels, 10)
        return images.T @ residual / len(images)

    @cached_property
    def smoothness(self) -> float:
        """L: half the largest eigenvalue of the images' second moment (Böhning 1992)."""
        return 0.5 * float(torch.linalg.matrix_norm(self.images, 2)) ** 2 / len(self.images)


@lru_cache(maxsize=1)
def _digits(folder: Path, seed: int) -> tuple[Tensor, Tensor]:
    batches = [build("mlp", seed=seed, data=folder).batch(step, 0, 1) for step in range(32)]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])
