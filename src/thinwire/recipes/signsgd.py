"""Sign SGD with error feedback: one bit per value."""

from thinwire.checked import Size, checked
from thinwire.codecs import Cast
from thinwire.formats import Sign
from thinwire.formats.base import GroupSize
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Compressed, MinimumSize, Reducer


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
