"""Every value in a few bits: QSGD and TernGrad without a memory, signs with error feedback."""

from typing import Literal

from thinwire.checked import Positive, Size, checked
from thinwire.codecs import Cast
from thinwire.formats import Levels, Sign, Ternary
from thinwire.formats.base import Bits, GroupSize
from thinwire.memories import ErrorFeedback, NoMemory
from thinwire.reducer import Compressed, MinimumSize, Reducer


@checked
def qsgd(
    *, bits: Bits = 4, group_size: GroupSize = 512, norm: Literal["l2", "max"] = "max", minimum_size: Size = 1024
) -> Reducer:
    """Send every value in a few bits, and a norm for each group; unbiased, so no memory (QSGD, Alistarh et al. 2017).

    Args:
        bits: Bits of each value, sign included.
        group_size: Values that share a norm.
        norm: The paper's analysis scales by the ℓ2 norm; its experiments by the largest magnitude.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    codec = Cast(values=Levels(bits=bits, group_size=group_size, norm=norm))
    large = Compressed(memory=NoMemory(), codec=codec)
    return MinimumSize(minimum_size=minimum_size, large=large)


@checked
def terngrad(*, clip: Positive | None = 2.5, minimum_size: Size = 1024) -> Reducer:
    """Send every value in 2 bits, without a residual (TernGrad, Wen et al. 2017).

    Args:
        clip: Standard deviations at which each tensor is clipped first.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=NoMemory(), codec=Cast(values=Ternary(clip=clip)))
    return MinimumSize(minimum_size=minimum_size, large=large)


@checked
def signsgd(*, group_size: GroupSize = 512, minimum_size: Size = 1024) -> Reducer:
    """Send every sign, and the mean magnitude of each group of values (EF-SGD, Karimireddy et al. 2019).

    Args:
        group_size: Values that share a mean. The paper's whole tensor (None) is unstable where magnitudes within a
            tensor differ a lot, as in an output layer over rare words (docs/measurements/recipes.md).
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=ErrorFeedback(), codec=Cast(values=Sign(group_size=group_size)))
    return MinimumSize(minimum_size=minimum_size, large=large)
