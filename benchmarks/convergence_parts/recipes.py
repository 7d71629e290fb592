"""Recipes that are searched among: fading momentum, of whose chunks the largest coefficients travel."""

from thinwire.codecs import ChunkTopK
from thinwire.exchanges import AllGather
from thinwire.formats import Sign
from thinwire.kernels.chunks import Transform
from thinwire.memories import FadingMomentum
from thinwire.payloads import Narrow
from thinwire.recipes import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer

_SIGN = Sign()


def chunked(
    *,
    density: float = 0.025,
    decay: float | None = None,
    chunk: int = 16,
    transform: Transform = "dct",
    values: Narrow = _SIGN,
    minimum_size: int = 1024,
) -> Reducer:
    """The optimizer's first moment is the memory, unless `decay` is given; tensors below `minimum_size` go whole."""
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=FadingMomentum(decay=decay), codec=codec, exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(), large=large)
