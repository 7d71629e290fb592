"""FFT sparsification with the offset float."""

from thinwire.checked import Size, checked
from thinwire.codecs import FFT
from thinwire.codecs.fft import Block
from thinwire.formats import OffsetFloat
from thinwire.memories import Memory, NoMemory
from thinwire.payloads import Narrow
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
    """Send the largest frequencies of each tensor, in 10 bits each (Wang et al. 2020).

    See papers/fft/README.md for the equations, the code and the paper's claims.

    Args:
        density: The share of frequencies to send, 1 − θ in the paper. For its schedules see
            `schedules.FollowLearningRate` and `schedules.recovery`.
        block: Elements that are transformed together.
        half: Whether to round to float16 before the transform, as the paper does for speed on a GPU.
        values: How coefficients travel.
        memory: Keeps the dropped frequencies, such as `ErrorFeedback()`. With None they are lost, as in the paper.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    codec = FFT(density=density, block=block, half=half, values=values)
    large = Compressed(memory=memory or NoMemory(), codec=codec)
    return MinimumSize(minimum_size=minimum_size, large=large)
