"""MSTopK: approximate Top-k with error feedback, by bisection of a threshold."""

from thinwire.checked import Count, Size, checked
from thinwire.codecs import MSTopK
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def mstopk(*, density: Density = 0.01, rounds: Count = 25, minimum_size: Size = 1024) -> Reducer:
    """Send nearly the largest elements of each tensor, with error feedback (MSTopK, Shi et al. 2021).

    Args:
        density: The share of elements to send.
        rounds: Bisections of the threshold.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=ErrorFeedback(), codec=MSTopK(density=density, rounds=rounds))
    return MinimumSize(minimum_size=minimum_size, large=large)
