"""Ascending indices in little more than the bits they hold."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.loops import indices as loops
from thinwire.kernels.reference.indices import EliasFano

_WORD = np.dtype("<u8")


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    """See `reference.elias_fano_encode`."""
    layout = EliasFano.of(indices.numel(), space)
    words = np.zeros(layout.nbytes // 8, _WORD)
    loops.elias_fano_encode(indices.numpy(), layout.low_bits, words, words[layout.low_nbytes // 8 :])
    return torch.from_numpy(words.view(np.uint8))


def elias_fano_decode(buffer: Tensor, count: int, space: int) -> Tensor:
    """See `reference.elias_fano_decode`."""
    layout = EliasFano.of(count, space)
    indices = np.empty(count, np.int32)
    if not loops.elias_fano_decode(_words(buffer), layout.low_nbytes // 8, layout.low_bits, space, indices):
        indices.fill(-1)
    return torch.from_numpy(indices)


def _words(buffer: Tensor) -> np.ndarray[Any, Any]:
    """View bytes as words, copied where they begin between two."""
    return (buffer.clone() if buffer.data_ptr() % 8 else buffer).numpy().view(_WORD)
