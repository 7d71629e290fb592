"""The orthogonal factor of a matrix, roughly: polynomials that bring its singular values close to 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import waits


class Stage(NamedTuple):
    """σ ← σ · Σ wᵢ · hⁱ with h = 2σ²/largest² − 1, for singular values σ up to `largest`."""

    largest: float
    weights: tuple[float, float, float, float, float]


SMALLEST = 0.014
STAGES = (
    Stage(1.0, (2.1402994, 3.0205351, -8.9537821, -8.8377091, 14.4427539)),
    Stage(1.8120973, (0.8811779, 0.3476748, -1.2106796, -2.1566996, 2.8279848)),
)
"""The best two, one after the other: of all odd polynomials of degree 9, each leaves the least distance from 1.

The first for singular values from `SMALLEST` to 1, which come to lie within 1 ± 0.8121; the second from
there, within 1 ± 0.25. That the best of each stage, in turn, are the best of all is shown by Amsel et al. (2025, "The
Polar Express").
"""
_WIDE = 1.5


def orthogonal(x: Tensor) -> Tensor:
    """Return U·Vᵀ of x = U·S·Vᵀ, roughly, as in Newton–Schulz's iteration: two polynomials of degree 9.

    x: (rows, columns), float32 or float64. Singular values s come to lie within 1 ± 0.25 if they are at least 0.014 of
    (Σs⁴)^¼, which is no less than the largest. Smaller ones are multiplied by at most 58. Their signs are kept, and
    zeros stay. Muon's five polynomials of degree 5 (Jordan et al. 2024) bring them between 0.68 and 1.16, and take two
    to three times as many multiplications.

    A matrix is multiplied with its longer side twice where that is 1.5 times the shorter one: the rest are products of
    symmetric matrices. That wants all digits, so it is done in main memory, unless torch may round products further.
    """
    y = x.mT if x.shape[0] > x.shape[1] else x
    y = y / y.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)  # squares could overflow, or vanish
    gram = y @ y.mT
    size = torch.linalg.vector_norm(gram).clamp_min(torch.finfo(x.dtype).tiny)
    exact = x.device.type in waits.HOST and torch.get_float32_matmul_precision() == "highest"
    apply = _by_gram if exact and y.shape[1] >= _WIDE * y.shape[0] else _in_turn
    y = apply(y.mul_(size.rsqrt()), gram.div_(size))
    return y.mT if x.shape[0] > x.shape[1] else y


def _in_turn(y: Tensor, gram: Tensor) -> Tensor:
    """Apply stage after stage to y (rows, columns), whose y·yᵀ is `gram`."""
    first, *more = STAGES
    y = _factor(gram, first) @ y
    for stage in more:
        y = _factor(y @ y.mT, stage) @ y
    return y


def _by_gram(y: Tensor, gram: Tensor) -> Tensor:
    """Apply all stages at once. All matrices here are polynomials of `gram`, so they commute."""
    first, *more = STAGES
    factor = _factor(gram, first)
    for stage in more:
        factor = _factor(gram @ factor @ factor, stage) @ factor
    return factor @ y


def _factor(gram: Tensor, stage: Stage) -> Tensor:
    """Return Σ wᵢ·Hⁱ with H = 2·gram/largest² − 1, in two products. Powers of `gram` itself would cancel more."""
    w = stage.weights
    h = gram * (2 / stage.largest**2)
    h.diagonal().sub_(1)
    square = h @ h
    low = (w[1] * h).add_(square, alpha=w[2])
    low.diagonal().add_(w[0])
    return low.addmm_(square, h.mul_(w[3]).add_(square, alpha=w[4]))
