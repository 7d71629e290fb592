"""Sums of rows, and thin products: a library may round factors to ten bits first (TF32). The rest is the library's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import TILE, launch, tiles_of, wide

_BLOCK = 1024


def row_sums(rows: Tensor) -> Tensor:
    out = torch.empty_like(rows[0])
    launch(_add, tiles_of(out.numel(), _BLOCK), out, rows, out.numel(), rows.shape[0], BLOCK=_BLOCK)
    return out


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    """See `reference.outer_sums`: the same bits."""
    sizes = (out.numel(), max(1, out.shape[1]), a.shape[1])
    launch(_multiply, tiles_of(out.numel()), out, a, b, *sizes, TILE=TILE, num_warps=8)


def orthonormal(x: Tensor) -> Tensor:
    """See `reference.orthonormal`; by the GPU's library, in the dtype of x."""
    return torch.linalg.qr(x).Q.contiguous()


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    """See `reference.inverse_fourier`; by the GPU's library.

    It expects 0 where the spectrum of a real vector has no imaginary part. Encoders send 0 there, and the others
    overwrite what is there.
    """
    spectra = torch.view_as_complex(pairs.view(-1, width // 2 + 1, 2))
    return torch.fft.irfft(spectra, n=width, norm="ortho").view(-1)[:numel]


@triton.jit(do_not_specialize=["n", "columns", "rank"])
def _multiply(out, a, b, n, columns, rank, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    within = (start % columns).to(tl.int32) + tl.arange(0, TILE)
    left = a + (start // columns + within // columns) * rank
    right = b + (within % columns).to(tl.int64) * rank
    there = tl.arange(0, TILE) < n - start
    total = tl.load(left, mask=there) * tl.load(right, mask=there)
    for j in range(1, rank):
        total += tl.load(left + j, mask=there) * tl.load(right + j, mask=there)
    tl.store(out + start + tl.arange(0, TILE), total, mask=there)


@triton.jit(do_not_specialize=["ranks"])
def _add(out, rows, n, ranks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = wide(tl.load(rows + at, mask=at < n, other=0.0))
    for rank in range(1, ranks):
        total += wide(tl.load(rows + tl.cast(rank, tl.int64) * n + at, mask=at < n, other=0.0))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)
