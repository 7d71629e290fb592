"""Running statistics of batch normalisation, which no optimizer trains: workers average them at outer steps."""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.futures import Future

from thinwire.collectives import Pool

_NAMES = ("running_mean", "running_var")


@final
class RunningStatistics:
    """The buffers of a model that hold running means and variances. `agreed`: what they were when workers last met."""

    def __init__(self, model: nn.Module) -> None:
        held = [(module, name) for module in model.modules() for name in _NAMES]
        self._held = [(module, name) for module, name in held if module._buffers.get(name) is not None]
        self.agreed = [x.clone() for x in self.tensors]
        self._arriving: list[Future[Tensor]] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers that are the model's now: `to()`, for one, replaces them."""
        return [module.get_buffer(name) for module, name in self._held]

    def share(self, pool: Pool) -> None:
        """Have them travel with an outer step."""
        self._arriving = [pool.gather(x.clone()) for x in self.tensors]

    @torch.no_grad()
    def average(self) -> None:
        """Replace each by its mean over workers where it is finite, or by what it was if it is nowhere."""
        arriving, self._arriving = self._arriving, []
        for x, agreed, future in zip(self.tensors if arriving else (), self.agreed, arriving, strict=False):
            rows = future.wait().double()
            if len(sound := [row for row in rows if bool(row.isfinite().all())]):
                agreed.copy_(torch.stack(sound).mean(0))
            x.copy_(agreed)

    @torch.no_grad()
    def take(self, theirs: Iterable[Tensor]) -> None:
        """Take over another worker's."""
        for x, agreed, other in zip(self.tensors, self.agreed, theirs, strict=True):
            x.copy_(other)
            agreed.copy_(x if bool(x.isfinite().all()) else agreed)
