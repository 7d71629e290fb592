"""Deep Gradient Compression (Lin et al. 2018): sampled threshold, and momentum correction with factor masking."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import SampledThreshold
from thinwire.exchanges import AllGather
from thinwire.memories import MomentumCorrection
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def dgc(
    *,
    density: Density = 0.01,
    momentum: Fraction | None = None,
    clip_norm: Positive | None = None,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send the largest `density` share of each momentum-corrected tensor.

    The memory applies SGD's momentum instead of the optimizer, so attach with `optimizer=`. To warm up, pass a schedule
    as density (`schedules.exponential_warmup`). `clip_norm` clips each worker's gradients, per tensor. Tensors below
    `minimum_size` elements go uncompressed.
    """
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=SampledThreshold(density=density), exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(memory=memory), large=large)
