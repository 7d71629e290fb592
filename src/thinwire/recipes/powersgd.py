"""PowerSGD: low-rank gradients with error feedback."""

from thinwire.checked import Count, Size, checked
from thinwire.codecs import Cast, Identity
from thinwire.exchanges import AllGather, AllReduce
from thinwire.formats import Format
from thinwire.memories import ErrorFeedback, Noted
from thinwire.payloads import Narrow
from thinwire.recipes.dense import dense
from thinwire.reducer import PowerSGD, Reducer, WarmUp


@checked
def powersgd(*, rank: Count = 4, values: Narrow = None, start: Size = 10, minimum_size: Size = 0) -> Reducer:
    """Send each matrix as two thin factors, and everything else uncompressed (PowerSGD, Vogels et al. 2019).

    Args:
        rank: Columns of each factor.
        values: Narrows the factors. In a dtype they are summed; in a format, gathered.
        start: How many first steps are sent uncompressed.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    codec = Identity() if values is None else Cast(values=values)
    exchange = AllGather() if isinstance(values, Format) else AllReduce()
    memory = Noted(memory=ErrorFeedback())
    low_rank = PowerSGD(
        rank=rank, memory=memory, small=dense(), codec=codec, exchange=exchange, minimum_size=minimum_size
    )
    return WarmUp(steps=start, first=dense(), then=low_rank)
