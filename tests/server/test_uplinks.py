"""Every recipe of the catalogue works on a parameter server, or is refused in words."""

import inspect

import pytest
import torch
from cases import RECIPES, VARIANTS, RecipeCase
from served import joined, started
from torch import Tensor, nn

from thinwire.errors import MomentumError
from thinwire.reducer import Reducer
from thinwire.trainer.contents import drainable

REFUSED = {
    "powersgd": (TypeError, "computes during its exchange"),
    "fading": (MomentumError, "fades"),
    "orthogonal": (MomentumError, "fades"),
    "demo": (MomentumError, "fades"),
}


class Layers(nn.Module):
    """A matrix, a bias, and a vector in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(30, 40))
        self.bias = nn.Parameter(torch.zeros(40))
        self.narrow = nn.Parameter(torch.zeros(300, dtype=torch.float16))


def _sent(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in Layers().named_parameters()}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in VARIANTS])
def test_every_recipe_is_served_or_refused(name: str) -> None:
    case = RECIPES[name]
    if name in REFUSED:
        kind, words = REFUSED[name]
        with pytest.raises(kind, match=words):
            started(Layers(), _made(case))
        return
    central, model, recipe = Layers(), Layers(), _made(case)
    server = started(central, _made(case))
    trainer = joined(server, recipe, model)
    total = {key: torch.zeros(p.shape, dtype=torch.float64) for key, p in model.named_parameters()}
    for step in range(6):
        for key, gradient in _sent(step).items():
            model.get_parameter(key).grad = gradient
            total[key] += gradient
        trainer.step()
    if case.conserving and not case.momentum and drainable(recipe):
        trainer.drain()
        for key, p in central.named_parameters():
            torch.testing.assert_close(-p.detach().double(), total[key], rtol=1e-2, atol=5e-2)
    for key, p in central.named_parameters():
        assert torch.equal(p, model.get_parameter(key))
        assert p.detach().any()


def _made(case: RecipeCase) -> Reducer:
    """Return the recipe; one that corrects momentum with a momentum of its own."""
    takes = case.momentum and "momentum" in inspect.signature(case.method.recipe).parameters
    return case.method.recipe(momentum=0.9, minimum_size=64) if takes else case.make()
