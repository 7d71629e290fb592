"""Momentum correction with factor masking, the memory of Deep Gradient Compression; DRAGONN hashes what it sends."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import Codec, HashedSlots, SampledThreshold
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
    """Send the largest elements of each momentum-corrected tensor (Deep Gradient Compression, Lin et al. 2018).

    The memory applies momentum in place of SGD, so attach with `optimizer=`.

    Args:
        density: The share of elements to send. To warm up, pass `schedules.exponential_warmup`.
        momentum: SGD's; None takes the optimizer's.
        clip_norm: Clips each worker's gradients, per tensor (see `memories.MomentumCorrection`).
        minimum_size: Tensors with fewer elements are sent uncompressed.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> handle = tw.attach(model, tw.recipes.dgc(density=0.01), optimizer=sgd)
    """
    return _corrected(SampledThreshold(density=density), momentum, clip_norm, minimum_size)


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
    return _corrected(HashedSlots(density=density), momentum, clip_norm, minimum_size)


def _corrected(codec: Codec, momentum: float | None, clip_norm: float | None, minimum_size: int) -> Reducer:
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=codec)
    return MinimumSize(minimum_size=minimum_size, small=dense(memory=memory), large=large)
