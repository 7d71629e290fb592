"""Blocks of adjacent elements."""

import torch
from torch import Tensor

from thinwire.kernels.reference.select import largest


def block_energies(x: Tensor, width: int) -> Tensor:
    """Return Σ x² over each block of `width` elements, the last one filled up with zeros: ⌈d/width⌉ of x's dtype."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)
    return blocks.square().sum(dim=1)


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    """Return the numbers (int32, ascending) of the k blocks of `width` elements with the largest Σ x²."""
    return largest(block_energies(x, width), k)
