"""Dynamic Communication Thresholding for data parallelism."""

from thinwire.checked import Count, Multiple, Size, checked
from thinwire.codecs import Codec, KeptThreshold, SteeredThreshold
from thinwire.memories import ErrorFeedback, Noted
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density, Every


@checked
def dct_dp(
    *,
    density: Density = 0.01,
    life: Count | None = 1000,
    bound: Multiple = 1.5,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send what reaches each tensor's threshold (DCT-DP, Gupta et al. 2021, Algorithm 1).

    See papers/dct/README.md for the equations, the code and the paper's claims.

    Args:
        density: The share of elements that the threshold aims at.
        life: Steps until the threshold is measured again; None steers it at every step instead, without sorting.
        bound: At most this many times the wanted number is sent; the others stay in the residual.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    codec: Codec = SteeredThreshold(density=density, bound=bound)
    if life is not None:
        codec = KeptThreshold(density=density, refresh=Every(steps=life), bound=bound)
    large = Compressed(memory=Noted(memory=ErrorFeedback()), codec=codec)
    return MinimumSize(minimum_size=minimum_size, large=large)
