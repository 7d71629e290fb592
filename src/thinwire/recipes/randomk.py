"""Random-k with error feedback: the same elements on every rank, summed on the way."""

from thinwire.checked import Size, checked
from thinwire.codecs import RandomK
from thinwire.exchanges import AllReduce
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def randomk(*, density: Density = 0.01, minimum_size: Size = 1024) -> Reducer:
    """Send random elements of each tensor, new ones in each step, with error feedback (Stich et al. 2018).

    Args:
        density: The share of elements to send.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=ErrorFeedback(), codec=RandomK(density=density), exchange=AllReduce())
    return MinimumSize(minimum_size=minimum_size, large=large)
