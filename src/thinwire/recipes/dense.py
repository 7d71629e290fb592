"""No compression: what plain DDP does."""

from thinwire.checked import checked
from thinwire.codecs import Identity
from thinwire.exchanges import AllReduce
from thinwire.memories import Memory, NoMemory
from thinwire.reducer import Compressed, Reducer


@checked
def dense(*, memory: Memory | None = None) -> Reducer:
    """Return the uncompressed all-reduce, with the same bits as DDP's own.

    If gradients accumulate over several reductions, sums are rounded differently from DDP's.

    Args:
        memory: A memory that gradients pass through; None for none.
    """
    return Compressed(memory=memory or NoMemory(), codec=Identity(), exchange=AllReduce())
