"""Helpers for models that can be split into pipeline stages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems.base import Batch, Feed, Parts, Problem


class Chain(nn.Sequential):
    """A Sequential that ignores the keyword arguments a pipeline hands to every stage. A slice is a Chain too."""

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        """Run the modules one after another."""
        return super().forward(input)


def chosen(name: str, known: Mapping[int, list[nn.Module]], stages: int) -> list[nn.Module]:
    """Return the split into that many stages; raises BadInput if there is none."""
    if stages not in known:
        numbers = " or ".join(map(str, known))
        raise BadInput(f"the model {name} falls into {numbers} stages, not {stages}; choose {numbers}")
    return known[stages]


def feed(batch: Batch) -> Feed:
    """`Parts.feed` of a model that reads one tensor: (inputs, targets) -> those, and no keyword arguments."""
    inputs, targets = batch
    return (inputs,), {}, targets


def parts_of(problem: Problem) -> Parts:
    """Return how to split the problem's model into stages; raises BadInput if it cannot be split."""
    if problem.parts is None:
        raise BadInput(f"the model {problem.name} does not fall into stages; leave --pipeline out")
    return problem.parts


def check_stages(problem: Problem, stages: int, micro_batches: int) -> None:
    """Raise BadInput unless the model can be split into `stages` and its batches into `micro_batches` equal parts."""
    parts = parts_of(problem)
    parts.split(problem.model, stages)
    (first, *_), _, _ = parts.feed(problem.batch(0, 0, 1))
    if len(first) % micro_batches:
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the batch of {len(first)} that {problem.name} has"
        )
