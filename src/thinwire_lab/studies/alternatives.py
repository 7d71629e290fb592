"""What else could stand between the gradients and the optimizer, and does it beat what the library sends?

    python -m thinwire_lab.studies.alternatives fading orthogonal late_mask orthogonal_late_mask low_rank --seeds 0

Rules that were tried and did not become recipes, beside the two that did, all written down as plainly as can be: one
model, the gradients of each worker in turn, and a rule for each matrix that says what arrives. Nothing is packed.
`bits` is a parameter's share of the index entropy, the values and the factors. Tensors that are no matrices of whole
chunks travel uncompressed, as the recipes have it for small ones.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console
from torch import Tensor

from thinwire.memories.orthogonal_momentum import orthogonal
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import held_out_loss
from thinwire_lab.show.terminal import print_raw
from thinwire_lab.studies.convergence.training import problem_of

CHUNK = 16
WARM_UP = 20
_FREQUENCY = torch.arange(CHUNK).unsqueeze(1)
_COSINES = torch.cos(math.pi * _FREQUENCY * (2 * torch.arange(CHUNK) + 1) / (2 * CHUNK)) * math.sqrt(2 / CHUNK)
DCT = torch.where(_FREQUENCY == 0, _COSINES / math.sqrt(2), _COSINES)


class Rule(Protocol):
    """What becomes of one matrix. `bits`: per parameter, worker and step."""

    bits: float

    def __call__(self, gradients: Tensor) -> Tensor:
        """Take the gradients of all workers (K × m × n), and return what arrives (m × n)."""


@dataclass
class Fading:
    """W ← β·W + U/K; what is chosen of W travels and leaves it. U: the gradients, or the orthogonalised momenta.

    late: every worker sends the same coefficients, those of which most arrived in the step before.
    rank: of what a low rank with a shared basis takes first (PowerSGD's iteration); chunks choose among the rest.
    """

    density: float = 0.0234
    decay: float = 0.95
    momentum: float | None = None
    late: bool = False
    rank: int = 0
    bits: float = 0.0
    _waits: Tensor | float = 0.0
    _momenta: Tensor | float = 0.0
    _mask: Tensor | None = None
    _basis: Tensor | None = None

    def __call__(self, gradients: Tensor) -> Tensor:
        waits = self.decay * self._waits + self._update(gradients) / len(gradients)
        smooth = self._low_rank(waits) if self.rank else torch.zeros_like(waits)
        chosen = _chunked(waits - smooth, DCT)
        spectrum = self._signs(chosen)
        parts = smooth + _whole(spectrum, DCT, waits.shape)
        self._waits = waits - parts
        self.bits = _bits(round(self.density * CHUNK**2)) + self.rank * 16 * sum(waits.shape[1:]) / waits[0].numel()
        return parts.sum(0)

    def _update(self, gradients: Tensor) -> Tensor:
        if self.momentum is None:
            return gradients
        self._momenta = self.momentum * self._momenta + gradients
        return torch.stack([orthogonal(m) for m in gradients + self.momentum * self._momenta])

    def _signs(self, spectrum: Tensor) -> Tensor:
        """Return one sign and one size a matrix, where the mask says or each worker's largest are."""
        own = _largest(spectrum.abs(), round(self.density * CHUNK**2))
        mask = own if self._mask is None else self._mask.expand_as(own)
        if self.late:
            votes = (spectrum.abs() * own).sum(0, keepdim=True)
            self._mask = _largest(votes, round(self.density * CHUNK**2))
        size = (spectrum.abs() * mask).sum((1, 2), keepdim=True) / mask.sum((1, 2), keepdim=True)
        return spectrum.sign() * mask * size

    def _low_rank(self, waits: Tensor) -> Tensor:
        """Return each worker's share of the projection on the basis that all agree on."""
        basis = self._basis if self._basis is not None else torch.randn(waits.shape[2], self.rank)
        left = torch.linalg.qr(waits.sum(0) @ basis).Q
        self._basis = waits.sum(0).T @ left
        return left @ (left.T @ waits)


@dataclass
class LocalAdamW:
    """Error feedback behind the geometry: each worker's AdamW update waits whole, and its largest entries travel.

    The second moment is shared, and factored as Adafactor's: a mean over rows and one over columns of all squares.
    Momentum is dropped where an entry was sent.
    """

    density: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    bits: float = 0.0
    _steps: int = 0
    _momenta: Tensor | float = 0.0
    _waits: Tensor | float = 0.0
    _rows: Tensor | float = 0.0
    _columns: Tensor | float = 0.0

    def __call__(self, gradients: Tensor) -> Tensor:
        (first, second), squares = self.betas, gradients.square().mean(0)
        self._steps += 1
        self._rows = second * self._rows + (1 - second) * squares.mean(1, keepdim=True)
        self._columns = second * self._columns + (1 - second) * squares.mean(0, keepdim=True)
        moment = self._rows * self._columns / (self._rows.mean() + 1e-30) / (1 - second**self._steps)
        momenta = first * self._momenta + (1 - first) * gradients
        update = momenta / (1 - first**self._steps) / (moment.sqrt() + 1e-8)
        waits = (self._waits + update / len(gradients)).flatten(1)
        mask = _largest(waits.abs(), max(1, round(self.density * waits.shape[1])))
        parts = waits * mask
        self._waits, self._momenta = (waits - parts).view_as(gradients), momenta * ~mask.view_as(gradients)
        self.bits = _entropy(self.density) + 16 * self.density + 32 * sum(squares.shape) / squares.numel()
        return parts.sum(0).view_as(squares)


@dataclass(frozen=True)
class Trial:
    """A rule, the learning rate it does best with, and whether AdamW (0, β₂) follows it or the bare rate."""

    rule: Callable[[], Rule]
    rate: float
    second: float | None = 0.9


TRIALS: Mapping[str, Trial] = MappingProxyType(
    {
        "fading": Trial(Fading, 3.4e-3),
        "late_mask": Trial(lambda: Fading(late=True), 3.4e-3),
        "low_rank": Trial(lambda: Fading(rank=1, density=0.0118), 3.4e-3),
        "orthogonal": Trial(lambda: Fading(momentum=0.9), 3e-3),
        "orthogonal_late_mask": Trial(lambda: Fading(momentum=0.9, late=True), 3e-3),
        "orthogonal_low_rank": Trial(lambda: Fading(momentum=0.9, rank=1, density=0.0118), 3e-3),
        "local_adamw": Trial(LocalAdamW, 2e-3, second=None),
    }
)


@dataclass
class Model:
    """A model, a rule for each matrix of whole chunks, and AdamW for the rest and for what needs one."""

    problem: Problem
    trial: Trial
    rate: float
    rules: dict[str, Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.problem.model)
        named = dict(self.module.named_parameters())
        self.rules = {name: self.trial.rule() for name, p in named.items() if _whole_chunks(p)}
        large, small = ([p for name, p in named.items() if (name in self.rules) is here] for here in (True, False))
        groups = [{"params": small, "betas": (0.9, 0.95)}]
        if self.trial.second is not None:
            groups.append({"params": large, "betas": (0.0, self.trial.second)})
        self.bare = [] if self.trial.second is not None else large
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, weight_decay=0.0)

    def step(self, index: int, workers: int) -> None:
        """Take one step with a batch of each worker."""
        rate = self.rate * min(1.0, (index + 1) / WARM_UP)
        gradients = [self._gradients(index, rank, workers) for rank in range(workers)]
        for name, p in self.module.named_parameters():
            stacked = torch.stack([each[name] for each in gradients])
            p.grad = self.rules[name](stacked) if name in self.rules else stacked.mean(0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for p in self.bare:
            p.data.sub_(p.grad if p.grad is not None else 0.0, alpha=rate)

    def _gradients(self, index: int, rank: int, workers: int) -> dict[str, Tensor]:
        self.module.zero_grad(set_to_none=True)
        self.problem.loss(self.module, self.problem.batch(index, rank, workers)).backward()
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def bits(self) -> float:
        """Return the bits per parameter of the matrices that have rules."""
        sizes = {name: p.numel() for name, p in self.module.named_parameters() if name in self.rules}
        return sum(self.rules[name].bits * numel for name, numel in sizes.items()) / sum(sizes.values())


def _whole_chunks(p: Tensor) -> bool:
    return p.dim() == 2 and p.numel() >= 1024 and all(length % CHUNK == 0 for length in p.shape)


def _chunked(x: Tensor, basis: Tensor) -> Tensor:
    """Return the transformed chunks of each worker's matrix: K × chunks × 256."""
    workers, m, n = x.shape
    chunks = x.view(workers, m // CHUNK, CHUNK, n // CHUNK, CHUNK).transpose(2, 3)
    return (basis @ chunks @ basis.T).reshape(workers, -1, CHUNK**2)


def _whole(spectrum: Tensor, basis: Tensor, shape: torch.Size) -> Tensor:
    workers, m, n = shape
    chunks = spectrum.view(workers, m // CHUNK, n // CHUNK, CHUNK, CHUNK)
    return (basis.T @ chunks @ basis).transpose(2, 3).reshape(shape)


def _largest(x: Tensor, k: int) -> Tensor:
    """Return where the k largest of the last dimension are."""
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(k, dim=-1).indices, True)


def _bits(k: int) -> float:
    """Return the bits per element of k signs among a chunk's coefficients."""
    return (math.log2(math.comb(CHUNK**2, k)) + k) / CHUNK**2


def _entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def main(
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(TRIALS)}.")],
    seeds: Annotated[str, typer.Option(help="Seeds, of initial weights and of batches.")] = "0",
    steps: Annotated[int, typer.Option(help="Steps.")] = 300,
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    rate: Annotated[float, typer.Option(help="Learning rate, if not the rule's own.")] = 0.0,
) -> None:
    """Train the bench's byte GPT with each rule, and print its held-out loss."""
    torch.set_num_threads(1)
    for name, seed in product(names, map(int, seeds.split(","))):
        model = Model(problem_of("transformer", seed, None), TRIALS[name], rate or TRIALS[name].rate)
        for index in range(steps):
            model.step(index, workers)
        loss = float(held_out_loss(model.problem, model.module))
        line = f"{name}, lr {model.rate:g}, seed {seed}: loss {loss:.4f} at {model.bits():.3f} bit"
        print_raw(Console(), line)


if __name__ == "__main__":
    typer.run(main)
