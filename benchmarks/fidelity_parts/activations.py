"""What the hidden layers of a small network on MNIST look like while it trains."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fidelity_parts.material import Material
from thinwire.tools.problems import build


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The inputs (batch, width) of every ReLU at one step."""

    step: int
    before: list[Tensor]


def watch(material: Material) -> list[Seen]:
    """Train, and return what was seen at five steps. Raises Absent without MNIST."""
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
