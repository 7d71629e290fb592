"""TernGrad: every value as −1, 0 or 1 times the largest magnitude."""

from thinwire.checked import Positive, Size, checked
from thinwire.codecs import Cast
from thinwire.formats import Ternary
from thinwire.memories import NoMemory
from thinwire.reducer import Compressed, MinimumSize, Reducer


@checked
def terngrad(*, clip: Positive | None = 2.5, minimum_size: Size = 1024) -> Reducer:
    """Send every value in 2 bits, without a residual (TernGrad, Wen et al. 2017).

    Args:
        clip: Standard deviations at which each tensor is clipped first.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=NoMemory(), codec=Cast(values=Ternary(clip=clip)))
    return MinimumSize(minimum_size=minimum_size, large=large)
