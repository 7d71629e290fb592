"""Block Top-k: send the blocks of largest norm."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from thinwire import kernels
from thinwire.checked import Width, checked
from thinwire.codecs.base import Codec, kept
from thinwire.payloads import Blocks, Narrow, Scratch, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class BlockTopK(Codec):
    """Send the round(density · b) blocks of largest ℓ2 norm of a vector's b blocks (Ge et al. 2021, §3.2).

    Args:
        density: The share of blocks to send.
        block: Adjacent elements that travel together, so that one number or bit names them.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    block: Width = 32
    values: Narrow = None

    scratch: ClassVar[Scratch] = Scratch(element=0.6)  # energies of blocks, and the payload

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Blocks:
        """Return whole blocks; the vector's last one is filled up with zeros. A norm of NaN counts as largest."""
        x = signal.tensor()
        count = kept(self.density, -(-signal.numel // self.block))
        keys = kernels.largest_blocks(x, self.block, count)
        indices = (keys.long()[:, None] * self.block + torch.arange(self.block, device=x.device)).view(-1)
        blocks = x.index_select(0, indices.clamp(max=x.numel() - 1)).masked_fill_(indices >= x.numel(), 0)
        values, coded = narrowed(blocks, self.values, signal.dtype, seed, signal.share)
        return Blocks(keys=keys, values=values, numel=signal.numel, width=self.block, coded=coded)
