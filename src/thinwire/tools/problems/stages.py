"""What the models that fall into pipeline stages have in common."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from thinwire.tools.inputs import BadInput
from thinwire.tools.problems.base import Batch, Feed, Parts, Problem


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


def parts_of(problem: Problem) -> Parts:
    """Return how the problem's model falls into stages; raises BadInput where it does not."""
    if problem.parts is None:
        raise BadInput(f"the model {problem.name} does not fall into stages; leave --pipeline out")
    return problem.parts


def check_stages(problem: Problem, stages: int, micro_batches: int) -> None:
    """Raise BadInput unless the problem's model falls into so many stages and its batches into so many equal parts."""
    parts = parts_of(problem)
    parts.split(problem.model, stages)
    (first, *_), _, _ = parts.feed(problem.batch(0, 0, 1))
    if len(first) % micro_batches:
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the batch of {len(first)} that {problem.name} has"
        )
