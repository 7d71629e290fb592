"""Sums of rows, products with thin factors and orthonormal columns, with the same bits on every processor.

A library's product adds in the order that suits the processor's vectors, with fused operations if it has them. On a
GPU the last one is a library's: its order of additions is the same on all GPUs of one kind.
"""

import torch
from torch import Tensor


def row_sums(rows: Tensor) -> Tensor:
    """Return Σ rows[k] of `rows` (ranks, n), added rank after rank in float32 or wider: (n), of the same dtype."""
    total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a·bᵀ of a (n, r) and b (m, r), r ≥ 1, to `out` (n, m): Σ a[i, j] · b[k, j], added in the order of j."""
    torch.mul(a[:, :1], b[:, 0], out=out)
    for j in range(1, a.shape[1]):
        out += a[:, j, None] * b[:, j]


def orthonormal(x: Tensor) -> Tensor:
    """Return Q (n, r) of x = QR for finite x (n, r), n ≥ r: Householder's reflections in float64.

    The columns of Q are orthonormal even if columns of x are zeros or depend on others. Sums are taken by halves.
    """
    a = x.to(torch.float64)
    peak = a.abs().amax()
    a = a / torch.where(peak > 0, peak, 1.0)
    q = torch.eye(*a.shape, dtype=torch.float64, device=a.device)
    reflections = []
    for j in range(a.shape[1]):
        v, factor = _reflection(a[j:, j])
        a[j:, j:] = _reflected(a[j:, j:], v, factor)
        reflections.append((v, factor))
    for j in reversed(range(a.shape[1])):
        q[j:, j:] = _reflected(q[j:, j:], *reflections[j])
    return q.to(x.dtype)


def orthonormal_on_gpu(x: Tensor) -> Tensor:
    """Return Q by a GPU's own library, computed in the dtype of x."""
    return torch.linalg.qr(x).Q.contiguous()


def _reflection(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return v and f with (1 − f·v·vᵀ)·x = β·e₁, |β| = ‖x‖; f is 0 for a vector of zeros."""
    norm = _sum(x * x).sqrt()
    beta = torch.where(x[0] < 0, norm, -norm)
    squares = beta * beta - x[0] * beta
    v = x.clone()
    v[0] -= beta
    return v, torch.where(squares > 0, 1 / squares, 0.0)


def _reflected(y: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return y - v[:, None] * (factor * _sum(v[:, None] * y))


def _sum(x: Tensor) -> Tensor:
    """Return the sum over the first dimension: add the second half to the first until one is left."""
    while x.shape[0] > 1:
        half = (x.shape[0] + 1) // 2
        x = torch.cat((x[: x.shape[0] - half] + x[half:], x[x.shape[0] - half : half]))
    return x[0]
