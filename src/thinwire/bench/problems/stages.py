"""What the models that fall into pipeline stages have in common."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from thinwire.bench.problems.base import BadInput, Batch, Feed


class Chain(nn.Sequential):
    """A Sequential that ignores keyword arguments, which a pipeline hands to every stage; a slice is a Chain too."""

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        """What the modules make of the input one after the other."""
        return super().forward(input)


def chosen(name: str, known: Mapping[int, list[nn.Module]], stages: int) -> list[nn.Module]:
    """The split into that many stages; raises BadInput where none is known."""
    if stages not in known:
        numbers = " or ".join(map(str, known))
        raise BadInput(f"the model {name} falls into {numbers} stages, not {stages}; choose {numbers}")
    return known[stages]


def feed(batch: Batch) -> Feed:
    """`Parts.feed` of a model that reads one tensor: (inputs, targets) -> those, and no keyword arguments."""
    inputs, targets = batch
    return (inputs,), {}, targets
