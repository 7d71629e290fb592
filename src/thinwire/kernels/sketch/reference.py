"""Count sketches."""

import torch
from torch import Tensor

from thinwire.kernels.hashing.reference import mix

SKETCH_ROWS = 64
"""How far apart the hash seeds of two sketches are."""


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """Return the count sketch S[j, h_j(i)] = Σ s_j(i) · x[i] as a (rows, buckets) table of x's dtype."""
    table = x.new_zeros(rows, buckets)
    for j in range(rows):
        bucket, sign = _sketch_hash(x, buckets, seed, j)
        table[j].index_add_(0, bucket, sign * x)
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    """Return the median over j of s_j(i) · S[j, h_j(i)], of two middle ones the mean, for each of `numel` elements."""
    rows, buckets = table.shape
    estimates = table.new_empty(rows, numel)
    for j in range(rows):
        bucket, sign = _sketch_hash(estimates[j], buckets, seed, j)
        torch.mul(sign, table[j].index_select(0, bucket), out=estimates[j])
    ordered = estimates.sort(dim=0).values
    return (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2


def _sketch_hash(like: Tensor, buckets: int, seed: int, j: int) -> tuple[Tensor, Tensor]:
    """Return bucket and sign of each element in row j: the sign is the lowest bit of its hash."""
    mixed = mix(torch.arange(like.numel(), dtype=torch.int32, device=like.device), SKETCH_ROWS * seed + j)
    return ((mixed >> 1) * buckets) >> 31, (1 - 2 * (mixed & 1)).to(like.dtype)
