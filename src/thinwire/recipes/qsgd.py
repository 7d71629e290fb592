"""QSGD: stochastic rounding to a few levels."""

from typing import Literal

from thinwire.checked import Size, checked
from thinwire.codecs import Cast
from thinwire.formats import Levels
from thinwire.formats.base import Bits, GroupSize
from thinwire.memories import NoMemory
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
