"""Deep Gradient Compression (Lin et al. 2018): sampled threshold, and momentum correction with factor masking."""

from thinwire.codecs import SampledThreshold
from thinwire.exchanges import AllGather
from thinwire.memories import MomentumCorrection
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Schedule


def dgc(
    *,
    density: float | Schedule = 0.01,
    momentum: float | None = None,
    clip_norm: float | None = None,
    minimum_size: int = 1024,
) -> Reducer:
    """Send the largest `density` share of each momentum-corrected tensor.

    The memory applies SGD's momentum instead of the optimizer, so attach with `optimizer=`. To warm up, pass a schedule
    as density (`schedules.exponential_warmup`). `clip_norm` clips each worker's gradients, per tensor. Tensors below
    `minimum_size` elements go uncompressed.
    """
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=SampledThreshold(density=density), exchange=AllGather())
    return MinimumSize(numel=minimum_size, small=dense(memory=memory), large=large)
