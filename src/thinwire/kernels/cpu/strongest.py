"""The largest of a few, which lie in pieces."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_pieces
from thinwire.kernels.loops import select as loops
from thinwire.kernels.memory import empty

Array = np.ndarray[Any, Any]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNS = {np.dtype(kind): kind(np.iinfo(kind).max) for kind in (np.int16, np.int32, np.int64)}


def as_integers(x: Tensor) -> tuple[Array, Any]:
    """Return `x` as integers, and the mask that takes their sign off."""
    bits = x.view(INTEGERS[x.element_size()]).numpy()
    return bits, _SIGNS[bits.dtype]


def strongest(indices: Sequence[Array], bits: Sequence[Array], k: int) -> Tensor:
    """Return the indices (int32) of the k largest magnitudes, or all if those are fewer, in their order."""
    k = min(k, sum(map(len, bits)))
    sign = _SIGNS[bits[0].dtype]
    out = empty(k, torch.int32, torch.device("cpu"))
    if not k:
        return out
    if len(bits) == 1:
        bar, ties = loops.kth(bits[0], sign, k)
        loops.take(indices[0], bits[0], sign, bar, ties, out.numpy())
        return out
    bar, ties = _kth(bits, sign, k)
    above, equal = zip(*map_pieces(lambda piece: loops.tally(bits[piece], sign, bar), bits), strict=True)
    allowed = [
        max(0, min(here, ties - before)) for here, before in zip(equal, accumulate(equal, initial=0), strict=False)
    ]
    ends = list(accumulate((a + b for a, b in zip(above, allowed, strict=True)), initial=0))

    def take(piece: int) -> None:
        place = out.numpy()[ends[piece] : ends[piece + 1]]
        loops.take(indices[piece], bits[piece], sign, bar, allowed[piece], place)

    map_pieces(take, bits)
    return out


def _kth(bits: Sequence[Array], sign: Any, k: int) -> tuple[Any, int]:
    """Return the k-th largest magnitude's bits, and how many that equal it are among the k: by digits of 11 bits."""
    kind, known, mask = type(sign), 0, 0
    for shift in _shifts(8 * bits[0].itemsize - 1):
        counts = _counts(bits, sign, kind(shift), kind(known), kind(mask))
        above = np.cumsum(counts[::-1])
        digit = 2047 - int(np.searchsorted(above, k))
        k -= int(above[2047 - digit] - counts[digit])
        known, mask = known | digit << shift, (mask | 2047 << shift) & int(sign)
    return kind(known), k


def _shifts(width: int) -> list[int]:
    return [max(0, width - done) for done in range(11, width + 11, 11)]


def _counts(bits: Sequence[Array], sign: Any, shift: Any, known: Any, mask: Any) -> Array:
    def run(piece: int) -> Array:
        counts = np.zeros(1 << 11, np.int64)
        loops.digits(bits[piece], sign, shift, known, mask, counts)
        return counts

    return np.asarray(np.sum(map_pieces(run, bits), axis=0))
