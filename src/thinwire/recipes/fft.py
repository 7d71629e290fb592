"""FFT sparsification with the offset float (Wang et al. 2020).

Its equations, where each part of it is, and its claims: papers/fft/README.md.
"""

from thinwire.checked import Size, checked
from thinwire.codecs import FFT
from thinwire.codecs.fft import Block
from thinwire.exchanges import AllGather
from thinwire.formats import OffsetFloat
from thinwire.memories import Memory, NoMemory
from thinwire.payloads import Narrow
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density

_TEN_BITS = OffsetFloat.balanced(bits=10, mantissa=5, max=1.0, rounding="nearest")


@checked
def fft(
    *,
    density: Density = 0.15,
    block: Block = 4096,
    half: bool = False,
    values: Narrow = _TEN_BITS,
    memory: Memory | None = None,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send the largest `density` share of each tensor's frequencies (1 − θ in the paper), in 10 bits each.

    Without a `memory`, what is dropped is lost, as in the paper; `ErrorFeedback()` keeps it. For the paper's schedules
    see `schedules.FollowLearningRate` and `schedules.recovery`. Tensors below `minimum_size` elements go uncompressed.
    """
    codec = FFT(density=density, block=block, half=half, values=values)
    large = Compressed(memory=memory or NoMemory(), codec=codec, exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(), large=large)
