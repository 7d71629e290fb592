"""A problem's model with something at the places where it is cut."""

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn

from thinwire.pipeline import Boundary
from thinwire.tools.problems import Batch, Problem

INSIDE = {
    "dlrm": ("bottom.2", "bottom.4", "top.2", "top.4", "top.6"),
    "transformer": ("blocks.0.down", "blocks.1.down"),
}
"""Layers within stages whose input is what an activation function returned, in an order to cut them in."""

Make = Callable[[], nn.Module]


class Network(nn.Module):
    """A copy of the model in `cuts` + 1 stages, with what `make()` returns between them, and before `inside` layers."""

    def __init__(self, problem: Problem, cuts: int, inside: int, make: Make) -> None:
        super().__init__()
        assert problem.parts is not None  # for the type checker
        model = deepcopy(problem.model)
        self.model, self.parts = model, problem.parts
        self.stages = nn.ModuleList(self.parts.split(model, cuts + 1) if cuts else [model])
        self.between = nn.ModuleList(make() for _ in range(cuts))
        self.before = nn.ModuleList(self._cut(name, make()) for name in INSIDE.get(problem.name, ())[:inside])

    def _cut(self, layer: str, crossing: nn.Module) -> nn.Module:
        self.model.get_submodule(layer).register_forward_pre_hook(lambda _, arguments: (crossing(*arguments),))
        return crossing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the output and its target."""
        arguments, named, target = self.parts.feed(batch)
        x = self.stages[0](*arguments, **named)
        for crossing, stage in zip(self.between, self.stages[1:], strict=True):
            x = stage(crossing(x), **named)
        return x, target

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss in nats, a scalar."""
        return self.parts.criterion(*self(batch))

    @property
    def boundaries(self) -> list[Boundary]:
        """Those that tell what they let through."""
        return [part for part in (*self.between, *self.before) if isinstance(part, Boundary)]
