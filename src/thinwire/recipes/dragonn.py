"""DRAGONN: hashed slots, with the memory of Deep Gradient Compression."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import HashedSlots
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
    """Hash large elements of each momentum-corrected tensor into slots, and send these (DRAGONN, Wang et al. 2022).

    The memory applies momentum in place of SGD, so attach with `optimizer=`. See papers/dragonn/README.md for the
    equations, the code and the paper's claims.

    Args:
        density: Slots divided by the number of elements. Twice as many elements are hashed.
        momentum: SGD's; None takes the optimizer's.
        clip_norm: Clips each worker's gradients, per tensor (see `memories.MomentumCorrection`).
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=HashedSlots(density=density))
    return MinimumSize(minimum_size=minimum_size, small=dense(memory=memory), large=large)
