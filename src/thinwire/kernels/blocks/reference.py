"""Blocks of adjacent elements: their energies and norms, the largest blocks, and the largest elements of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.parts import Groups
from thinwire.kernels.select.reference import largest, magnitude_bits


class Norm(NamedTuple):
    """Which norm the scale of a group follows from, and how: arguments of `group_scales`."""

    order: float
    widths: Tensor | None
    zero: float
    clip: float | None = None


def block_energies(x: Tensor, width: int) -> Tensor:
    """Return Σ x² over each block of `width` elements, the last one padded with zeros: ⌈d/width⌉ of x's dtype."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)
    return blocks.square().sum(dim=1)


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    """Return the numbers (int32, ascending) of the k blocks of `width` elements with the largest Σ x²."""
    return largest(block_energies(x, width), k)


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes of every `width` elements.

    Lower indices win ties. The number of elements is a multiple of `width`, and k is at most `width`.
    """
    ranks = magnitude_bits(x).view(-1, width)
    columns = ranks.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    starts = torch.arange(0, x.numel(), width, device=x.device)
    return (columns + starts[:, None]).view(-1).to(torch.int32)


def group_norms(x: Tensor, groups: Groups, order: float) -> Tensor:
    """Return the norm of order 1, 2 or ∞ of each of the groups of float32 `x`, float64.

    A group with NaN or infinity has a norm that is not finite. Backends sum in different orders, so their results
    differ by rounding (1e-12 of the norm).
    """
    rows = [row for part, width in groups.parts(x) for row in _rows(part, width) if row.numel()]
    parts = [torch.linalg.vector_norm(row, order, dim=1, dtype=torch.float64) for row in rows]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.float64)


def group_scales(
    x: Tensor, groups: Groups, order: float, widths: Tensor | None, zero: float, clip: float | None = None
) -> Tensor:
    """Return `group_norms` as float32, each divided by its group's width (float64) if there are widths.

    One that is not finite in float32 becomes NaN, and 0 becomes `zero`. With `clip`, none is divided, and none is more
    than clip · σ, where σ is taken about zero.
    """
    norms = group_norms(x, groups, order)
    scales = (norms if widths is None or clip else norms / widths).to(torch.float32)
    scales = scales + (scales - scales)
    return clipped(scales.masked_fill_(scales == 0, zero), lambda: group_norms(x, groups, 2.0), widths, clip)


def clipped(scales: Tensor, norms: Callable[[], Tensor], widths: Tensor | None, clip: float | None) -> Tensor:
    """Return scales of which none is more than clip · σ. `norms` returns those of order 2."""
    if clip is None or widths is None:
        return scales
    return torch.minimum(scales, (clip * (norms() / widths.sqrt())).to(torch.float32))


def _rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return groups of `width` elements, and what is left, as matrices."""
    full = x.numel() // width
    return x[: full * width].view(full, width), x[None, full * width :]
