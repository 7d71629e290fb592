"""S2 Reducer: sketches of block-sparse gradients, summed on the way."""

from thinwire.checked import Size, Width, checked
from thinwire.codecs import BlockTopK, Codec, CountSketch
from thinwire.exchanges import UnionAllReduce
from thinwire.memories import ErrorFeedback
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
    """Send the blocks of largest norm: a bitmap by OR, then a sketch of the union (S2 Reducer, Ge et al. 2021).

    It also sends the rows of sparse embeddings. The residual has the blocks that were not sent, but not the sketch's
    own error: that would diverge. See papers/s2/README.md for the equations, the code and the paper's claims.

    Args:
        density: The share of blocks to send.
        block: Elements of a block.
        packed: Encodes the union's values. None sends them exactly; `Cast(values=torch.bfloat16)` takes as many bytes
            as the sketch.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    exchange = UnionAllReduce(packed=packed)
    codec = BlockTopK(density=density, block=block)
    large = Compressed(memory=ErrorFeedback(), codec=codec, exchange=exchange)
    return WithRows(rows=exchange, dense=MinimumSize(minimum_size=minimum_size, large=large))
