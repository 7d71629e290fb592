"""Optimizers and learning rates, as a command line names them: `adamw(betas=(0.9, 0.99))`."""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "cosine", "drop"]
Make = Callable[[nn.Module, float], list[torch.optim.Optimizer]]
"""(model, learning rate) → the optimizers that update it. There is no weight decay unless it is asked for."""

Betas = tuple[float, float]
SMALL = 1024  # elements, below which recipes send tensors uncompressed
_FLOOR = 0.1  # of the learning rate, where schedules end that fall
_DROP = 0.7  # of the steps, after which the rate drops


def sgd(*, momentum: float = 0.9, **options: Any) -> Make:
    return lambda model, rate: [torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, **options)]


def adamw(*, betas: Betas = (0.9, 0.99), small: Betas | None = None, weight_decay: float = 0.0, **options: Any) -> Make:
    """AdamW; with `small`, other betas for tensors below SMALL elements."""

    def make(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
        large, rest = _split(model, lambda p: p.numel() >= SMALL)
        groups: list[dict[str, Any]] = [{"params": large, "betas": betas}, {"params": rest, "betas": small or betas}]
        groups = [group for group in groups if group["params"]]
        return [torch.optim.AdamW(groups, lr=rate, weight_decay=weight_decay, **options)]

    return make


def muon(*, momentum: float = 0.95, nesterov: bool = True, betas: Betas = (0.9, 0.99), **options: Any) -> Make:
    """Muon for matrices between layers, with AdamW's size of update; AdamW for the rest."""

    def make(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
        embedded = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        hidden, rest = _split(model, lambda p: p.ndim == 2 and p not in embedded)
        settings: dict[str, Any] = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"} | options
        return [
            torch.optim.Muon(hidden, lr=rate, momentum=momentum, nesterov=nesterov, **settings),
            torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=0.0),
        ]

    return make


class DelayedNesterov(torch.optim.Optimizer):
    """SGD whose momentum moves every n-th step only, by the mean of the last n gradients (Liu et al. 2024).

    p ← p − lr·g; and in every n-th step m ← β·m + that mean, p ← p − lr·β·m. With n = 1 that is Nesterov's momentum.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], *, lr: float, momentum: float, every: int) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state, n, beta = self.state[p], group["every"], group["momentum"]
                state["steps"] = state.get("steps", 0) + 1
                mean: Tensor = state.setdefault("mean", torch.zeros_like(p)).add_(p.grad, alpha=1 / n)
                p.sub_(p.grad, alpha=group["lr"])
                if state["steps"] % n == 0:
                    moving: Tensor = state.setdefault("moving", torch.zeros_like(p)).mul_(beta).add_(mean)
                    p.sub_(moving, alpha=group["lr"] * beta)
                    mean.zero_()


OPTIMIZERS: Mapping[str, Callable[..., Make]] = MappingProxyType({"sgd": sgd, "adamw": adamw, "muon": muon})


def scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int, warm_up: int) -> LambdaLR:
    """Return a scheduler that warms up, and then stays, or falls to a tenth: along a cosine, or after 70 % at once."""
    after = _AFTER_WARM_UP[schedule]
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, warm_up)) * after(step, steps))


_AFTER_WARM_UP: Mapping[Schedule, Callable[[int, int], float]] = MappingProxyType(
    {
        "constant": lambda _step, _steps: 1.0,
        "cosine": lambda step, steps: _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * step / steps)) / 2,
        "drop": lambda step, steps: _FLOOR if step >= round(_DROP * steps) else 1.0,
    }
)


def _split(model: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if wanted(p)], [p for p in parameters if not wanted(p)]
