"""Ways to spend N bits on a number, beside the offset float: every one is a table of numbers, and nearest wins."""

import torch
from torch import Tensor

from thinwire.formats import OffsetFloat


def offset_error(x: Tensor, bits: int) -> float:
    """Return the squared error of the best balanced offset float, rounded to nearest."""
    form = OffsetFloat.fit(x, bits=bits, rounding="nearest")
    codes, scales = form.encode(x, seed=0)
    return _squared(x, form.decode(codes, scales))


def uniform_error(x: Tensor, bits: int) -> float:
    """Return the squared error of 2^N - 1 even steps from -max to max."""
    return _on_grid(x, torch.linspace(0, 1, 2 ** (bits - 1)) * x.abs().max())


def ieee_error(x: Tensor, bits: int, scaled: bool) -> float:
    """Return the squared error of the best split into exponent and mantissa, subnormals included.

    `scaled` brings the largest magnitude to the largest number; otherwise numbers are as IEEE 754 would have them.
    """
    return min(_ieee(x, exponent, bits - 1 - exponent, scaled) for exponent in range(2, min(bits, 9)))


def logarithmic_error(x: Tensor, bits: int) -> float:
    """Return the squared error of evenly spaced logarithms below max, over the best of several ranges."""
    top = x.abs().max()
    steps = torch.arange(2 ** (bits - 1) - 1, dtype=torch.float64).flip(0)
    decades = (0.5, 1, 1.5, 2, 3, 4, 6, 8)
    grids = (top * 10 ** (-steps * span / len(steps)) for span in decades)
    return min(_on_grid(x, torch.cat([torch.zeros(1, dtype=torch.float64), grid])) for grid in grids)


def _ieee(x: Tensor, exponent: int, mantissa: int, scaled: bool) -> float:
    bias = 2 ** (exponent - 1) - 1
    fractions = torch.arange(2**mantissa, dtype=torch.float64) / 2**mantissa
    subnormal = fractions * 2.0 ** (1 - bias)
    normal = [(1 + fractions) * 2.0 ** (e - bias) for e in range(1, 2**exponent - 1)]
    grid = torch.cat([subnormal, *normal])
    return _on_grid(x, grid * (x.abs().max().double() / grid[-1] if scaled else 1.0))


def _on_grid(x: Tensor, positives: Tensor) -> float:
    """Round magnitudes to the nearest of ascending numbers, beyond the last to that."""
    grid, size = positives.double().contiguous(), x.abs().double()
    right = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    left = (right - 1).clamp(min=0)
    nearer = torch.where(size - grid[left] <= grid[right] - size, grid[left], grid[right])
    return float((nearer - size).square().sum())


def _squared(x: Tensor, restored: Tensor) -> float:
    return float((x.double() - restored.double()).square().sum())
