"""A trainer may be a pipeline with sparsified boundaries: both compress, and neither loses what it should keep."""

from collections.abc import Callable

import pytest
import torch
from served import (
    closed,  # noqa: F401 - a fixture
    dense,
    joined,
    kept,
    started,
    summing,
)
from torch import Tensor, nn

from thinwire.pipeline import sparsify
from thinwire.reducer import Reducer


def _stages() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 40), nn.ReLU()), nn.Sequential(nn.Linear(40, 1))).double()


def _batch(step: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _gradients(model: nn.Module, step: int) -> list[Tensor]:
    x = _batch(step)
    model.zero_grad()
    first, second = model.children()
    crossed = first(x)
    found = second(*crossed) if isinstance(crossed, tuple) else second(crossed)
    (found - x.sum(1, keepdim=True)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [dense, kept])
@pytest.mark.parametrize("density", [1.0, 0.1])
def test_what_is_applied_and_what_waits_are_the_gradients_of_sparsified_stages(
    make: Callable[[], Reducer], density: float
) -> None:
    central, model, recipe = _stages(), _stages(), make()
    before = [p.detach().clone() for p in central.parameters()]
    sparsify(list(model.children()), density)
    total = [torch.zeros_like(p) for p in before]
    with started(central, make(), make_optimizer=summing_slowly) as server, joined(server, recipe, model) as trainer:
        for step in range(8):
            for into, gradient in zip(total, _gradients(model, step), strict=True):
                into.add_(gradient)
            trainer.step()
        trainer.drain()
        for was, now, sent in zip(before, central.parameters(), total, strict=True):
            torch.testing.assert_close(was - now, RATE * sent)


RATE = 1e-3


def summing_slowly(parameters: object) -> torch.optim.Optimizer:
    (group,) = (optimizer := summing(parameters)).param_groups
    group["lr"] = RATE
    return optimizer


def test_a_pipeline_whose_boundaries_let_all_pass_trains_as_a_whole_model() -> None:
    whole, split = _stages(), _stages()
    sparsify(list(split.children()), 1.0)
    for model in (whole, split):
        with (
            started(_stages(), dense(), make_optimizer=summing_slowly) as server,
            joined(server, dense(), model) as trainer,
        ):
            for step in range(5):
                _gradients(model, step)
                trainer.step()
    assert all(map(torch.equal, whole.parameters(), split.parameters()))
