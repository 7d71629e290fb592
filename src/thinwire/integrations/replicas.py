"""Are all replicas bit-identical? Sixteen bytes per parameter tell."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.collectives import Group, all_gather

_COLUMNS = 4096
# 64-bit elements as two halves: weights are odd, so differences of 2⁶³ would cancel.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def differing(tensors: Mapping[str, Tensor], group: Group) -> list[str]:
    """Return the names of tensors whose bits are not the same on every rank; the same list on every rank."""
    if not tensors:
        return []
    mine = torch.stack([digest(tensor) for tensor in tensors.values()]).view(torch.uint8).view(-1)
    rows = mine.new_empty(group.size(), mine.numel())
    all_gather(rows.view(-1), mine, group).wait()
    same = (rows == rows[0]).view(group.size(), len(tensors), -1).all(dim=2).all(dim=0)
    return [name for name, equal in zip(tensors, same.tolist(), strict=True) if not equal]


def digest(x: Tensor) -> Tensor:
    """Return two int64 sums over the bits of `x`, one weighted by row and one by column of 4096; no copy is made."""
    real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat = real.contiguous().view(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    whole = bits.numel() // _COLUMNS * _COLUMNS
    table, rest = bits[:whole].view(-1, _COLUMNS), bits[whole:].to(torch.int64)
    by_row = _weighted(table.sum(dim=1, dtype=torch.int64))
    by_column = _weighted(table.sum(dim=0, dtype=torch.int64))
    return torch.stack([by_row + _weighted(rest), by_column + rest.sum()])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * (2 * torch.arange(sums.numel(), device=sums.device) + 1)).sum()
