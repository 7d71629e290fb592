"""The optimizers that a problem can be trained with, by the name of `--optimizer`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.outer_steps import MakeOptimizer
from thinwire_lab.inputs import BadInput
from thinwire_lab.problems.base import RATES, Problem, sgd

BETAS = (0.9, 0.95)
"""AdamW's: a second moment that forgets within 20 steps suits runs of some hundred."""


def check_optimizer(name: str) -> None:
    """Raise BadInput unless there is such an optimizer, and this torch has it."""
    if name not in OPTIMIZERS:
        raise BadInput(f"no optimizer is called {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise BadInput(
            f"torch {torch.__version__} has no torch.optim.Muon: take torch 2.9 or newer, or another optimizer"
        )


def optimizers(name: str, model: nn.Module, problem: Problem) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together train `model`, the problem's own or a part of it."""
    return OPTIMIZERS[name](model, problem)


def step_all(several: Sequence[torch.optim.Optimizer]) -> None:
    """Let each take its step."""
    for each in several:
        each.step()


def zero_all(several: Sequence[torch.optim.Optimizer]) -> None:
    """Drop the gradients that they hold."""
    for each in several:
        each.zero_grad(set_to_none=True)


def _muon(model: nn.Module, problem: Problem) -> list[torch.optim.Optimizer]:
    """Muon for matrices; embeddings and all that is no matrix go to AdamW."""
    tables = {p for module in model.modules() if isinstance(module, _TABLES) for p in module.parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2 and p not in tables]
    rest = [p for p in model.parameters() if p.dim() != 2 or p in tables]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        rate = RATES[problem.name].muon
        found.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found + _adam(rest, model, problem)


def _adam(parameters: list[nn.Parameter], model: nn.Module, problem: Problem) -> list[torch.optim.Optimizer]:
    """AdamW, and SparseAdam for embeddings with sparse gradients, which AdamW cannot take."""
    rate, sparse = RATES[problem.name].adamw, sparse_weights(model)
    dense, rows = ([p for p in parameters if (p in sparse) == apart] for apart in (False, True))
    kinds = ((torch.optim.AdamW, dense), (torch.optim.SparseAdam, rows))
    return [make(some, lr=rate, betas=BETAS) for make, some in kinds if some]


def served_optimizers(name: str, problem: Problem, trainers: int) -> tuple[MakeOptimizer, MakeOptimizer]:
    """Return what makes a parameter server's optimizers of its flat parameters and of rows, "sgd" or "adamw".

    It steps at the update of each trainer rather than at their mean, so the rate is divided by their number.
    """
    if name == "sgd":
        slow = partial(torch.optim.SGD, lr=problem.learning_rate / trainers)
        return partial(slow, momentum=problem.momentum), slow
    adam = RATES[problem.name].adamw / trainers
    rows = partial(torch.optim.SparseAdam, lr=adam, betas=BETAS)
    return partial(torch.optim.AdamW, lr=adam, betas=BETAS), lambda p: rows(list(p))


_TABLES = (nn.Embedding, nn.EmbeddingBag)

OPTIMIZERS: Mapping[str, Callable[[nn.Module, Problem], list[torch.optim.Optimizer]]] = MappingProxyType(
    {
        "sgd": lambda model, problem: [sgd(model, problem)],
        "adamw": lambda model, problem: _adam(list(model.parameters()), model, problem),
        "muon": _muon,
    }
)
