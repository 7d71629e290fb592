"""DRAGONN (Wang et al. 2022): hashed slots, with the memory of Deep Gradient Compression.

Its equations, where each part of it is, and its claims: papers/dragonn/README.md.
"""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import HashedSlots
from thinwire.exchanges import AllGather
from thinwire.memories import MomentumCorrection
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def dragonn(
    *,
    density: Density = 0.01,
    momentum: Fraction | None = None,
    clip_norm: Positive | None = None,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send `density` · d slots of each momentum-corrected tensor. Twice as many large elements are hashed into them.

    The memory applies SGD's momentum instead of the optimizer, so attach with `optimizer=`. `clip_norm` clips each
    worker's gradients, per tensor. Tensors below `minimum_size` elements go uncompressed.
    """
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=HashedSlots(density=density), exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(memory=memory), large=large)
