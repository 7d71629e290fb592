"""The largest of the hidden gradients (Gupta et al. 2021, Appendix C, Table 8), to compare with: it does not work."""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.codecs.base import check_density
from thinwire.codecs.row_topk import largest_in_rows


@final
class TopKGradient(nn.Module):
    """Activations pass; of the gradient only the round(density · d) largest magnitudes of each row of width d.

    Which, the gradient alone says: unlike behind a `Boundary`, no neuron is left out on the way there. With error
    feedback the rest waits at its place in the batch for the next gradient, whatever sample stands there then;
    without, it is lost. What waits, `waiting`, is float32 or wider and not in the state_dict. Of equal magnitudes the
    first pass, NaN counts as largest, and what is not finite passes without leaving a rest. Unsplit use only.
    """

    waiting: Tensor | None

    def __init__(self, density: float, error_feedback: bool = True) -> None:
        super().__init__()
        check_density(density)
        self.density, self.error_feedback = density, error_feedback
        self.register_buffer("waiting", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., d). Its backward raises ValueError for a gradient of another shape than what waits."""
        out: Tensor = _Filter.apply(x, self)
        return out

    def filtered(self, gradient: Tensor) -> Tensor:
        """Return what passes of a gradient (..., d), zero elsewhere; the rest waits, or is lost."""
        whole = self._compensated(gradient)
        flat = whole.view(-1)
        picks = largest_in_rows(flat, max(1, whole.shape[-1]), self.density).long()
        taken = flat.index_select(0, picks)
        passed = taken.to(gradient.dtype)
        if self.error_feedback:
            rest = torch.where(passed.isfinite(), taken - passed, 0)
            self.waiting = flat.index_copy(0, picks, rest).view_as(whole)
        return passed.new_zeros(flat.numel()).index_copy_(0, picks, passed).view_as(gradient)

    def _compensated(self, gradient: Tensor) -> Tensor:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        if self.waiting is None:
            return wide
        if self.waiting.shape != wide.shape:
            raise ValueError(
                f"the gradient is {tuple(wide.shape)} but what waits is {tuple(self.waiting.shape)}; expected batches "
                "of one shape: drop the last, smaller one, or set waiting = None to forget what waits"
            )
        return wide + self.waiting


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: TopKGradient) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.owner.filtered(gradient), None
