"""One threshold for a whole batch, from its mean and variance."""

import math
from typing import final

import torch
from torch import Tensor

from thinwire.checked import Multiple, Share, Whole, checked
from thinwire.codecs.laplace_threshold import laplace_quantile
from thinwire.codecs.thresholding import near, room
from thinwire.formats import Coded, Format
from thinwire.payloads import Narrow
from thinwire.pipeline.boundary import Boundary, Choice
from thinwire.signals import Plain, limited

_RECENT = 15


@final
@checked
class LaplaceBoundary(Boundary):
    """Keeps nonzero `|x| ≥ τ`, with τ from a Laplace law fitted to the batch (Gupta et al. 2021, §2.2 and Appendix B).

    It needs no sort. The law, of the batch's mean and variance, fits only roughly, so the real density differs: see
    `report()`. `recent` (15,) keeps the thresholds of the last training batches, NaN where there were fewer, and is in
    the state_dict. Evaluation uses their median and fits nothing. A median is robust to the batches of uninitialised
    memory with which pipelines infer shapes.

    Args:
        density: The share of elements beyond τ under that distribution.
        bound: ⌈bound · density · d⌉ of a batch's d elements always travel: the largest, then padding. At density 1 all
            d do.
        values: As in `Boundary`, a format with a zero.
        start_dim: As in `Boundary`.
    """

    recent: Tensor

    def __init__(self, density: Share, *, bound: Multiple = 2.0, values: Narrow = None, start_dim: Whole = -1) -> None:
        super().__init__(density, values, start_dim)
        zero = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")
        if isinstance(values, Format) and bool(Coded.of(zero, values).values(torch.float32)[0]):
            raise ValueError(
                f"{values} cannot represent zero, which pads each message up to the bound; use another format"
            )
        self.bound = bound
        unknown = torch.full((_RECENT,), math.nan, dtype=torch.float32, device=torch.get_default_device())
        self.register_buffer("recent", unknown)

    @property
    def threshold(self) -> Tensor:
        """The threshold in evaluation, 0-dim: NaN before training."""
        return self.recent.nanmedian()

    def count(self, rows: int, width: int) -> int | None:
        """Return the bound, or None at density 1, where no threshold is needed."""
        return room(self.bound * self.density, rows * width, rows * width) if self.density < 1 else None

    def choose(self, matrix: Tensor) -> Choice:
        """Choose what reaches this batch's threshold, or training's.

        Raises:
            RuntimeError: Before any training.
        """
        flat, capacity = matrix.view(-1), self.count(*matrix.shape)
        if capacity is None:
            return Choice(None, matrix.new_zeros(1))
        threshold = self._fitted(flat) if self.training else self.threshold
        if not self.training and bool(threshold.isnan()):
            raise RuntimeError("no threshold yet to evaluate with; train first, or load the state_dict of training")
        picks = near(Plain(flat), threshold.to(flat), capacity)
        kept, _ = limited(picks, capacity)
        return Choice(kept, threshold)

    def _fitted(self, flat: Tensor) -> Tensor:
        # Use a norm: torch.var_mean takes several times as long.
        numbers = flat.to(torch.promote_types(flat.dtype, torch.float32))  # in float64 too, or it may pass the largest
        mean, (low, high) = numbers.mean(), torch.aminmax(numbers)
        deviation = torch.linalg.vector_norm(numbers - mean) / flat.numel() ** 0.5
        threshold = laplace_quantile(mean, deviation / 2**0.5, self.density)
        threshold = threshold.minimum(torch.maximum(-low, high))  # so that something always passes
        self.recent.copy_(torch.cat((self.recent[1:], threshold[None])))
        return threshold
