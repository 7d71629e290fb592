"""The blocks of largest norm (Ge et al. 2021, §3.2)."""

from dataclasses import dataclass
from typing import final

import torch
from torch.nn.functional import pad

from thinwire.codecs.base import Codec, check_density, kept
from thinwire.payloads import Blocks, Narrow, narrowed
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class BlockTopK(Codec):
    """Send the round(density · b) of b blocks of `block` adjacent elements whose ℓ2 norm is largest.

    One number or bit names a whole block, and adjacent elements move together.
    """

    density: float | Schedule
    block: int = 32
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.block < 1:
            raise ValueError(f"block is {self.block}; expected 1 element or more")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Blocks:
        """Return whole blocks, the last one filled up with zeros; a norm of NaN counts as largest."""
        blocks = pad(signal.tensor(), (0, -signal.numel % self.block)).view(-1, self.block)
        norms = torch.linalg.vector_norm(blocks, dim=1)
        keys = norms.topk(kept(self.density, norms.numel()), sorted=False).indices.sort().values
        values, coded = narrowed(blocks.index_select(0, keys).view(-1), self.values, signal.dtype, seed)
        return Blocks(keys=keys.to(torch.int32), values=values, numel=signal.numel, width=self.block, coded=coded)

    def contraction(self, numel: int) -> float | None:
        """δ = K/b, attained by blocks of equal norm."""
        blocks = -(-numel // self.block)
        return None if self.values else kept(self.density, blocks) / max(1, blocks)
