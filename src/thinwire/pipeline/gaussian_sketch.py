"""A random sketch of the activations (Gupta et al. 2021, Appendix C, Table 7), to compare with: it does not work."""

from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.codecs.base import check_density, kept


@final
class GaussianSketch(nn.Module):
    """x → x S Sᵀ of rows of width d, with S (d, m) of N(0, 1/m) and m = round(density · d).

    On average over S that is x, but its error is √((d + 1)/m) times as long as x. S is drawn for every forward from
    `seed` and the number of calls so far; torch's own random state stays as it is. The gradient is autograd's, g S Sᵀ,
    all of it. Unsplit use only: a negative result needs no wire.
    """

    def __init__(self, density: float, seed: int = 0) -> None:
        super().__init__()
        check_density(density)
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more")
        self.density, self.seed, self._calls = density, seed, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return what is left of floating-point x (..., d), of the same shape and dtype."""
        sketch = self._draw(x.shape[-1], x.device).to(x.dtype)
        return x @ sketch @ sketch.mT

    def _draw(self, width: int, device: torch.device) -> Tensor:
        m = kept(self.density, width)
        mixed = int(np.random.SeedSequence((self.seed, self._calls)).generate_state(1)[0])
        self._calls += 1
        generator = torch.Generator(device=device).manual_seed(mixed)
        return torch.randn(width, m, generator=generator, device=device) * max(1, m) ** -0.5
