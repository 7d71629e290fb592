"""No compression: what plain DDP does."""

from thinwire.checked import checked
from thinwire.codecs import Identity
from thinwire.exchanges import AllReduce
from thinwire.memories import Memory, NoMemory
from thinwire.reducer import Compressed, Reducer


@checked
def dense(*, memory: Memory | None = None) -> Reducer:
    """Return the uncompressed all-reduce, with the same bits as DDP's own.

    Where gradients accumulate over several reductions, sums round otherwise than DDP's.

    Args:
        memory: What gradients pass through; None is nothing.
    """
    return Compressed(memory=memory or NoMemory(), codec=Identity(), exchange=AllReduce())
