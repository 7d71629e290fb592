"""The four methods that the FFT paper compares, and how far each lets an element stray."""

from functools import lru_cache

import torch
from torch import Tensor

from fidelity_parts.material import Run
from fidelity_parts.methods import offset
from thinwire.codecs import FFT, Cast, Codec, TopK
from thinwire.formats import Levels, Ternary

THETA = 0.85
FOUR: dict[str, Codec] = {
    "fft": FFT(density=1 - THETA, values=offset(10, 5)),
    "topk": TopK(density=1 - THETA),
    "qsgd 3 bits": Cast(values=Levels(bits=3, norm="max", group=None)),
    "terngrad": Cast(values=Ternary()),
}
RANGE = torch.logspace(-5, -2, 61)


@lru_cache(maxsize=2)
def four_restored(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the late gradient and what each method makes of it, tensor by tensor."""
    tensors = list(run.late.mean.values())
    whole = torch.cat([x.reshape(-1) for x in tensors])
    return {name: (whole, torch.cat([codec.encode(x).dense() for x in tensors])) for name, codec in FOUR.items()}


def absolute_errors(run: Run) -> dict[str, Tensor]:
    """Return |g - ĝ| of every element by method."""
    return {name: (x - restored).abs() for name, (x, restored) in four_restored(run).items()}


def distribution(errors: Tensor) -> Tensor:
    """Return the share of errors below each number of RANGE."""
    return torch.searchsorted(errors.sort().values, RANGE, right=True) / errors.numel()
