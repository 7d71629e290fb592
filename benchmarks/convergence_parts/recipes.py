"""Recipes that are searched among: fading momentum, of whose chunks the largest coefficients travel."""

import torch

from thinwire.codecs import Cast, ChunkTopK
from thinwire.exchanges import AllGather, AllReduce
from thinwire.formats import Sign
from thinwire.kernels.chunks import Transform
from thinwire.memories import FadingMomentum, NoMemory
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
    small: torch.dtype | None = None,
) -> Reducer:
    """The optimizer's first moment is the memory, unless `decay` is given.

    Tensors below `minimum_size` elements go whole, their values in the dtype `small` if that is given.
    """
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=FadingMomentum(decay=decay), codec=codec, exchange=AllGather())
    whole = dense() if small is None else Compressed(memory=NoMemory(), codec=Cast(values=small), exchange=AllReduce())
    return MinimumSize(minimum_size=minimum_size, small=whole, large=large)
