"""S2 Reducer (Ge et al. 2021): sketches of block-sparse gradients, summed on the way.

Its equations, where each part of it is, and its claims: papers/s2/README.md.
"""

from thinwire.checked import Size, Width, checked
from thinwire.codecs import BlockTopK, Codec, CountSketch
from thinwire.exchanges import UnionAllReduce
from thinwire.memories import ErrorFeedback
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer, WithRows
from thinwire.schedules import Density

_SKETCH = CountSketch(rows=3, ratio=0.5)


@checked
def s2_reducer(
    *,
    density: Density = 1 / 32,
    block: Width = 32,
    packed: Codec | None = _SKETCH,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send the blocks of largest norm, and the rows of sparse embeddings: a bitmap by OR, then a sketch of the union.

    `packed=None` sends the union's values exactly. `packed=Cast(values=torch.bfloat16)` sends them in as many bytes as
    the sketch. The residual has the blocks that were not sent. It does not have the sketch's own error: that would
    diverge. Tensors below `minimum_size` elements go uncompressed.
    """
    exchange = UnionAllReduce(packed=packed)
    codec = BlockTopK(density=density, block=block)
    large = Compressed(memory=ErrorFeedback(), codec=codec, exchange=exchange)
    return WithRows(rows=exchange, dense=MinimumSize(minimum_size=minimum_size, small=dense(), large=large))
