"""Deep Gradient Compression: sampled threshold, and momentum correction with factor masking."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import SampledThreshold
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
    memory = MomentumCorrection(momentum=momentum, clip_norm=clip_norm)
    large = Compressed(memory=memory, codec=SampledThreshold(density=density))
    return MinimumSize(minimum_size=minimum_size, small=dense(memory=memory), large=large)
