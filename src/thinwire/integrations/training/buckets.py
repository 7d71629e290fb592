"""Buckets made after backward: the gradients of some parameters, side by side in one flat tensor."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.integrations.training.gradients import local, shaped_like

BYTES = 25 << 20
"""Of a bucket, as in DDP."""


@final
@dataclass(frozen=True)
class GradientBucket:
    """One flat tensor for the gradients of some parameters, one after another; of a DTensor, for this rank's shard."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]

    @classmethod
    def of(cls, parameters: list[nn.Parameter]) -> Self:
        """Return a bucket for parameters of one dtype and device."""
        parts = [local(p).detach() for p in parameters]
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        pieces = zip(flat.split([part.numel() for part in parts]), parts, strict=True)
        views = [shaped_like(part, piece) for piece, part in pieces]
        return cls(flat, parameters, views)

    def fill(self) -> None:
        """Copy the gradients in; a missing one is zeros."""
        for p, view in zip(self.parameters, self.views, strict=True):
            view.zero_() if p.grad is None else view.copy_(local(p.grad))

    def hand_back(self, used: Set[Tensor]) -> None:
        """Copy the means to where gradients are. Among the `used`, make those that are missing."""
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is None and p in used:
                p.grad = torch.empty_like(p).detach()
            if p.grad is not None:
                local(p.grad).copy_(view)


def own_length(p: nn.Parameter) -> int:
    """Return how many elements this rank holds: of a DTensor, those of its shard."""
    return local(p).numel()


def buckets(
    parameters: Sequence[nn.Parameter], nbytes: int = 0, length: Callable[[nn.Parameter], int] = own_length
) -> Iterator[GradientBucket]:
    """Group parameters of one dtype and device, last first, up to `nbytes` (25 MiB) of `length` elements each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in reversed(parameters):
        held = kinds.setdefault((p.dtype, p.device), [])
        held.append(p)
        if sum(length(p) * p.element_size() for p in held) >= (nbytes or BYTES):
            yield GradientBucket.of(kinds.pop((p.dtype, p.device)))
    yield from (GradientBucket.of(held) for held in kinds.values())


def used_anywhere(parameters: Sequence[nn.Parameter], group: Group) -> Set[Tensor]:
    """Return those for which any rank has a gradient. A collective. The mean cannot tell, because it may be zero."""
    if not parameters:
        return set()
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return {p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag}
