"""How much of what asynchrony costs is staleness itself? Plain torch, no server: gradients that come some steps late.

    python -m thinwire_lab.studies.server_staleness --optimizer sgd --rate 0.3 --delays 0,3

DLRM on generated clicks, batches of 128. Prints the held-out loss every 200 steps. A parameter server with K Hogwild
threads should lose as much as a delay of K - 1 does here, and no more.
"""

from collections import deque
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from thinwire_lab.problems import dlrm
from thinwire_lab.problems.base import Options, held_out_loss

OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def train(name: str, rate: float, delay: int, steps: int, seed: int) -> None:
    problem = dlrm.make(Options(seed=seed))
    parameters = list(problem.model.parameters())
    optimizer = OPTIMIZERS[name](parameters, lr=rate)
    past: deque[list[Tensor]] = deque(maxlen=delay + 1)
    for step in range(steps):
        past.append([p.detach().clone() for p in parameters])
        _set(parameters, past[0])
        problem.model.zero_grad()
        problem.loss(problem.model, problem.batch(step, 0, 1)).backward()
        _set(parameters, past[-1])
        optimizer.step()
        if (step + 1) % 200 == 0:
            loss = float(held_out_loss(problem, problem.model))
            print(f"{name} {rate:g}, delay {delay}, step {step + 1}: {loss:.4f}", flush=True)


@torch.no_grad()
def _set(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def main(
    optimizer: Annotated[str, typer.Option(help="adagrad or sgd")] = "adagrad",
    rate: Annotated[float, typer.Option(help="Its learning rate")] = 0.01,
    delays: Annotated[str, typer.Option(help="Steps that a gradient is late, each a run")] = "0,3",
    steps: Annotated[int, typer.Option(help="Steps of a run")] = 800,
    seed: Annotated[int, typer.Option(help="Of weights and batches")] = 0,
) -> None:
    """Train with each delay in turn."""
    torch.set_num_threads(1)
    for delay in delays.split(","):
        train(optimizer, rate, int(delay), steps, seed)


if __name__ == "__main__":
    typer.run(main)
