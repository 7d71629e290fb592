"""How many of a model's bfloat16 weights change in some steps of fine-tuning, and what do the changes take on the wire?

    python -m thinwire_lab.studies.changed_bits --rates 1e-6,1e-5 --steps 30 --path text --seed 0

PULSE (arXiv 2602.03839) sends changed weights alone, without loss. Trains the bench's transformer, then goes on with a
fresh AdamW, whose own weights are float32. Prints the share of weights that change in a step and in all, as bfloat16
has them, and the bits a weight that all changes take: with 16 bits for each changed one and the entropy of which these
are, and with the entropy of by how many neighbouring numbers each has moved, the least that any code of single
weights takes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn

from thinwire_lab.problems import Problem, build

_BETAS = (0.8, 0.95)


class Changes(NamedTuple):
    """Of single steps and of all: the shares of weights that change; and the bits a weight that all changes take."""

    each: float
    all: float
    listed: float
    coded: float


def ordinals(model: nn.Module) -> Tensor:
    """Return each weight's place among the numbers of bfloat16."""
    patterns = torch.cat([p.detach().bfloat16().view(torch.int16).flatten() for p in model.parameters()]).int()
    return torch.where(patterns < 0, -(patterns & 0x7FFF), patterns)


def entropy(x: Tensor) -> float:
    """Return the bits that an element takes in the best code of single elements."""
    shares = x.unique(return_counts=True)[1].double() / x.numel()
    return float(-(shares * shares.log2()).sum())


def changes(model: nn.Module, step: Callable[[int], None], steps: int) -> Changes:
    """Take steps, and return what has changed."""
    first = before = ordinals(model)
    shares = list[float]()
    for number in range(steps):
        step(number)
        now = ordinals(model)
        shares.append(float((now != before).double().mean()))
        before = now
    moved = before - first
    share = float((moved != 0).double().mean())
    return Changes(sum(shares) / steps, share, entropy(moved != 0) + 16 * share, entropy(moved))


def trained(problem: Problem, rate: float) -> Callable[[int], None]:
    """Return what takes a step of AdamW, one worker's."""
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=rate, betas=_BETAS, weight_decay=0.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        problem.loss(problem.model, problem.batch(number, 0, 1)).backward()
        optimizer.step()

    return step


def main(
    rates: Annotated[str, typer.Option(help="AdamW's, of the fine-tuning.")] = "1e-6,1e-5",
    steps: Annotated[int, typer.Option(help="H.")] = 30,
    before: Annotated[int, typer.Option(help="Steps of training at 3e-3 before that.")] = 200,
    path: Annotated[Path | None, typer.Option(help="A text; Python's standard library if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of initial weights and batches.")] = 0,
) -> None:
    """Print a line for each rate."""
    torch.set_num_threads(1)
    problem = build("transformer", seed=seed, data=path)
    train = trained(problem, 3e-3)
    for number in range(before):
        train(number)
    start = {name: x.clone() for name, x in problem.model.state_dict().items()}
    print(f"   rate  a step  {steps} steps  bits, listed  bits, coded")
    for rate in map(float, rates.split(",")):
        problem.model.load_state_dict(start)
        found = changes(problem.model, trained(problem, rate), steps)
        print(f"{rate:7.0e} {found.each:6.1%} {found.all:9.1%} {found.listed:13.2f} {found.coded:12.2f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
