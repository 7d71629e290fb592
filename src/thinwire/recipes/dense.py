"""No compression: what plain DDP does."""

from thinwire.codecs import Identity
from thinwire.exchanges import AllReduce
from thinwire.memories import Memory, NoMemory
from thinwire.reducer import Compressed, Reducer


def dense(*, memory: Memory | None = None) -> Reducer:
    """Return the uncompressed all-reduce, bit for bit DDP's own. With a `memory`, it passes through that."""
    return Compressed(memory=memory or NoMemory(), codec=Identity(), exchange=AllReduce())
