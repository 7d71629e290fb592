"""What does a recipe do to the singular values of a matrix's momentum, before Muon or AdamW gets it?

    python -m thinwire_lab.studies.spectrum --recipe "fading()" --optimizer "adamw(betas=(0.95, 0.9))" --rate 3.4e-3
    python -m thinwire_lab.studies.spectrum --recipe "orthogonal()" --optimizer "adamw(betas=(0.9, 0.9))" --rate 3e-3

It trains as the study of convergence does, and then looks at matrices: at the momentum of the mean gradient, at what
waits, summed over the workers, and at what arrived in the last step. The effective rank is the exponential of the
entropy of the squared singular values. Cosines are with the mean gradient of other batches, after the last step.
`length` is that of what arrived, over that of the mean gradient of the same step.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from thinwire.integrations.training.gradients import shaped_like
from thinwire.memories import Memory
from thinwire_lab.problems import Problem
from thinwire_lab.show.table import Column, tabulated
from thinwire_lab.show.terminal import print_table
from thinwire_lab.studies.convergence.training import DATA, Settings, problem_of, train

_DECAY, _OTHERS = 0.95, 24
_WAITING = ("update", "residual", "momentum")  # of the fields that a memory keeps, the first that is here

Tensors = Mapping[str, Tensor]


class Row(NamedTuple):
    """What was seen of a matrix: this step's mean gradient, its momentum, what waits, what arrived, and `others`."""

    name: str
    gradient: Tensor
    momentum: Tensor
    waits: Tensor
    arrived: Tensor
    others: Tensor


class Spectra:
    """Notes of every worker what the rows need."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._problem, self._settings = problem, settings
        self._models: dict[int, nn.Module] = {}
        self._gradients: dict[int, Tensors] = {}
        self._momenta: dict[int, Tensors] = {}
        self._waits: dict[int, Tensors] = {}

    def before(self, rank: int, model: nn.Module) -> None:
        """Add this worker's gradients to its momentum."""
        own = {name: p.grad / self._settings.workers for name, p in model.named_parameters() if p.grad is not None}
        momenta = self._momenta.get(rank, {})
        self._gradients[rank] = own
        self._momenta[rank] = {name: g + _DECAY * momenta.get(name, 0) for name, g in own.items()}

    def after(self, rank: int, model: nn.Module, memories: Sequence[Memory]) -> None:
        """Keep what waits, and the model, whose gradients are what arrived."""
        self._models[rank], self._waits[rank] = model, dict(_waiting(model, memories))

    def rows(self, only: str) -> list[Row]:
        """Return a row for each matrix for which something waits, with `only` in its name."""
        parameters, others = dict(self._models[0].named_parameters()), self._others()
        arrived = {
            name: p.grad for name, p in parameters.items() if p.grad is not None and p.dim() > 1 and only in name
        }
        gradients, momenta, waits = (_summed(each.values()) for each in (self._gradients, self._momenta, self._waits))
        return [
            Row(name, gradients[name], momenta[name], waits[name], x, others[name])
            for name, x in arrived.items()
            if name in waits
        ]

    def _others(self) -> Tensors:
        """Return the mean gradient of batches that nobody has trained with."""
        model, steps = self._models[0], range(self._settings.steps, self._settings.steps + _OTHERS)
        losses = [self._problem.loss(model, self._problem.batch(step, 0, self._settings.workers)) for step in steps]
        named = dict(model.named_parameters())
        found = torch.autograd.grad(torch.stack(losses).mean(), list(named.values()), allow_unused=True)
        return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def effective_rank(x: Tensor) -> float:
    """Return the exponential of the entropy of the squared singular values, each a share of their sum."""
    shares = torch.linalg.svdvals(x.flatten(1).double()).square()
    shares = shares / shares.sum()
    return float(torch.special.entr(shares).sum().exp())


def cosine(x: Tensor, y: Tensor) -> float:
    """Return the cosine of the angle between two tensors, taken as vectors."""
    return float(torch.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0))


def _waiting(model: nn.Module, memories: Iterable[Memory]) -> Iterable[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for name, fields in ((name, fields) for memory in memories for name, fields in memory.state().items()):
        yield name, shaped_like(parameters[name], next(fields[key] for key in _WAITING if key in fields).clone())


def _summed(each: Iterable[Tensors]) -> Tensors:
    first, *rest = each
    return {name: sum((other[name] for other in rest), x) for name, x in first.items()}


_COLUMNS: list[Column[Row]] = [
    Column(heading="matrix", text=lambda row: row.name, left=True),
    Column(heading="shape", text=lambda row: " x ".join(map(str, row.arrived.flatten(1).shape))),
    Column(heading="rank of\nmomentum", text=lambda row: f"{effective_rank(row.momentum):.0f}"),
    Column(heading="rank of\nwhat waits", text=lambda row: f"{effective_rank(row.waits):.0f}"),
    Column(heading="rank of what\narrived", text=lambda row: f"{effective_rank(row.arrived):.0f}"),
    Column(heading="cosine of\nmomentum", text=lambda row: f"{cosine(row.momentum, row.others):.2f}"),
    Column(heading="cosine of\nwhat waits", text=lambda row: f"{cosine(row.waits, row.others):.2f}"),
    Column(heading="cosine of what\narrived", text=lambda row: f"{cosine(row.arrived, row.others):.2f}"),
    Column(heading="length", text=lambda row: f"{float(row.arrived.norm() / row.gradient.norm()):.3g}"),
]


def main(
    recipe: Annotated[str, typer.Option(help="A recipe, as in the study of convergence.")] = "fading()",
    optimizer: Annotated[str, typer.Option(help="An optimizer, likewise.")] = "adamw(betas=(0.95, 0.9))",
    rate: Annotated[float, typer.Option(help="Learning rate, after a warm-up of 20 steps.")] = 3.4e-3,
    model: Annotated[str, typer.Option(help=f"transformer, {', '.join(DATA)}, or another of `thinwire bench`.")] = (
        "transformer"
    ),
    steps: Annotated[int, typer.Option(help="Steps to train before looking.")] = 120,
    workers: Annotated[int, typer.Option(help="Virtual workers.")] = 4,
    seed: Annotated[int, typer.Option(help="Of initial weights and of batches.")] = 0,
    only: Annotated[str, typer.Option(help="Matrices whose names contain this.")] = "",
    data: Annotated[Path | None, typer.Option(help="Folder that holds cifar10/ and wikitext2/.")] = None,
) -> None:
    """Train, and print a row for each matrix for which something waits."""
    torch.set_num_threads(1)
    settings = Settings(
        model=model,
        recipe=recipe,
        optimizer=optimizer,
        rate=rate,
        schedule="constant",
        steps=steps,
        workers=workers,
        seed=seed,
    )
    problem = problem_of(model, seed, data)
    spectra = Spectra(problem, settings)
    train(settings, problem, steps, spectra)
    print_table(Console(), tabulated(_COLUMNS, spectra.rows(only)))


if __name__ == "__main__":
    typer.run(main)
