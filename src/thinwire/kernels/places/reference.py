"""Indices on their way: moved to where their vectors lie, and checked when they arrive."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.memory import constant


def placed(indices: Tensor, regions: Sequence[tuple[int, int]], runs: Sequence[int]) -> Tensor:
    """Return indices (int32) that count from the beginning of the regions' space.

    Given are runs[i] of the i-th region ((offset, length), …), n ≥ 1, which count from its beginning. −1 becomes the
    region's last index: with value 0, that is padding.
    """
    edges = [(offset, offset + length - 1) for offset, length in regions]
    columns = tuple(edge for column in zip(*edges, strict=True) for edge in column)
    counts = constant(tuple(runs), torch.int64, indices.device)
    each = constant(columns, torch.int32, indices.device).view(2, -1)
    first, last = each.repeat_interleave(counts, dim=1, output_size=sum(runs)).unbind()
    return torch.where(indices < 0, last, indices + first)


def misplaced(keys: Tensor, edges: Tensor, least: int | None, inside: Tensor | None = None) -> Tensor:
    """Return bools of which any is set where keys are not what they must be.

    Args:
        keys: Integers (rows, n).
        edges: Of the same dtype, ascending. Each key lies in [edges[0], edges[1]), or [edges[2], edges[3]), and so on.
        least: By how much each key of a row is more than the one before it, at least: 0 or 1. None if in any order.
        inside: Where the keys are written, like `keys`: those below 0, or not below the last edge, as the nearest
            number that is not.
    """
    if inside is not None:
        inside.copy_(torch.minimum(keys, edges[-1] - 1).clamp(min=0))
    wrong = (torch.searchsorted(edges, keys.contiguous(), right=True) % 2 == 0).any()
    if least is None:
        return wrong
    before, after = keys[:, :-1], keys[:, 1:]
    return wrong | (after <= before if least else after < before).any()


class Checks(NamedTuple):
    """What uint8 `rows` (ranks, bytes) must be, or else nothing counts that is read from them.

    They do not `differ` from what is fixed, and none of the `wrong` (bools) is set.
    """

    rows: Tensor
    fixed: Tensor
    wrong: Sequence[Tensor]

    def failed(self, flags: Tensor) -> Tensor:
        """Write whether the rows differ, and the wrong behind that. Return whether any is set."""
        return torch.cat([differ(self.rows, self.fixed).view(1), *self.wrong], out=flags).bool().any()


def differ(rows: Tensor, fixed: Tensor) -> Tensor:
    """Return bools of which any is set if uint8 `rows` (n, bytes) do not all have the `fixed` bytes.

    These are int32 (3, m): places in a row; what is there; and the bits of that which count.
    """
    places, bytes_, bits = fixed
    return (rows.index_select(1, places) & bits).ne(bytes_).any()
