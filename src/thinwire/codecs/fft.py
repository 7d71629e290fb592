"""Sparsification of frequencies (Wang et al. 2020)."""

from dataclasses import dataclass
from typing import final

import torch

from thinwire import kernels
from thinwire.codecs.base import Codec, check_density, kept
from thinwire.payloads import Blocks, Narrow, Spectral, narrowed
from thinwire.payloads.spectral import forward
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class FFT(Codec):
    """Real Fourier transform of blocks of `block` elements, then the round(density · c) largest of c coefficients.

    The paper drops a share θ = 1 − density. `half` rounds to float16 before the transform, as the paper does for
    speed on a GPU. Spectra are summed, and the sum transformed back once.
    """

    density: float | Schedule
    block: int = 4096
    half: bool = False
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.block < 2:
            raise ValueError(f"block is {self.block}; expected 2 elements or more")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Spectral:
        """Return coefficients as pairs (real, imaginary); a block with a NaN or an infinity in it counts as largest."""
        x = signal.tensor()
        x = (x.half() if self.half else x).to(torch.promote_types(x.dtype, torch.float32))
        pairs = forward(x, self.block)
        keys = kernels.backend(pairs).largest_blocks(pairs.view(-1), 2, kept(self.density, pairs.shape[0]))
        values, coded = narrowed(pairs.index_select(0, keys).view(-1), self.values, signal.dtype, seed)
        kept_pairs = Blocks(keys=keys, values=values, numel=pairs.numel(), width=2, coded=coded)
        return Spectral(coefficients=kept_pairs, block=self.block, numel=signal.numel)

    def contraction(self, numel: int) -> float | None:
        """δ = k/2c: all but the first and the last coefficient of a block stand for two."""
        if self.values or self.half or not numel:
            return None
        width = min(self.block, numel)
        count = -(-numel // width) * (width // 2 + 1)
        return kept(self.density, count) / (2 * count)
