"""Kernels whose sums have one order: every backend gives the very bits of the reference, and what they should be."""

import math

import pytest
import torch
from cases import vector

from thinwire import kernels
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.exact.reference import radices, turns
from thinwire.payloads.spectral import forward

pytestmark = pytest.mark.usefixtures("two_threads")

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
LENGTHS = [(1, 1), (2, 2), (8, 7), (12, 4), (437, 63), (1500, 1500), (211, 211), (4096 * 9 + 10, 4096), (600_000, 512)]


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize(("numel", "width"), LENGTHS)
def test_inverse_fourier(numel: int, width: int, dtype: torch.dtype) -> None:
    x = vector(numel, dtype=dtype)
    pairs = forward(x, width)
    found = kernels.inverse_fourier.cpu(pairs, numel, width)
    assert torch.equal(found, kernels.inverse_fourier.reference(pairs, numel, width))
    torch.testing.assert_close(found, x, rtol=0, atol=50 * torch.finfo(dtype).eps * float(x.abs().max()))


def test_ends_of_a_spectrum_are_real() -> None:
    pairs = forward(vector(128), 64)
    noisy = pairs.view(2, 33, 2).clone()
    noisy[:, [0, 32], 1] = 7.0
    for backend in BACKENDS:
        found, expected = (kernels.inverse_fourier.on(backend)(each.view(-1, 2), 128, 64) for each in (noisy, pairs))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [0, 100, -1])
def test_what_is_not_finite_stays_in_its_block_and_is_not_hidden(place: int) -> None:
    pairs = forward(vector(40 * 256), 256)
    pairs[place] = torch.nan
    for backend in BACKENDS:
        finite = kernels.inverse_fourier.on(backend)(pairs, 40 * 256, 256).view(40, 256).isfinite()
        assert not bool(finite[place].any() if place != 100 else finite[0].any())


def test_turns_are_rounded_once() -> None:
    for size in (1, 3, 8, 1000, 4096):
        cos, sin = turns(size, torch.float64)
        angles = [2 * math.pi * k / size for k in range(size)]
        torch.testing.assert_close(cos, torch.tensor([math.cos(a) for a in angles]).double(), rtol=0, atol=1e-6)
        assert float((cos * cos + sin * sin - 1).abs().max()) < 4e-16
    assert [radices(size) for size in (1, 2, 4096, 96, 1009)] == [(), (2,), (4,) * 6, (4, 4, 2, 3), (1009,)]


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize("kind", ["any", "dependent", "zeros", "one column of zeros", "tiny", "huge"])
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (5, 4), (64, 1), (1001, 7)])
def test_orthonormal(rows: int, rank: int, kind: str, dtype: torch.dtype) -> None:
    x = vector(rows * rank, dtype=dtype).view(rows, rank)
    if kind == "dependent":
        x[:, -1] = x[:, 0]
    if "zeros" in kind:
        x[:, -1 if "one" in kind else slice(None)] = 0
    x *= {"tiny": torch.finfo(dtype).tiny * 1000, "huge": torch.finfo(dtype).max / 8}.get(kind, 1.0)
    q = kernels.orthonormal.cpu(x)
    assert torch.equal(q, kernels.orthonormal.reference(x))
    scaled = x / x.abs().max().clamp(min=torch.finfo(dtype).tiny)
    torch.testing.assert_close(q.T @ q, torch.eye(rank, dtype=dtype), rtol=0, atol=1e-5)
    torch.testing.assert_close(q @ (q.T @ scaled), scaled, rtol=0, atol=1e-4)


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (3, 5000, 2), (700, 900, 4), (40, 7, 16)])
def test_outer_sums(rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    a, b = (vector(n * rank, seed=n, dtype=dtype).view(n, rank) for n in (rows, columns))
    found, expected = (torch.full((rows, columns), torch.nan, dtype=dtype) for _ in range(2))
    kernels.outer_sums.cpu(found, a, b)
    kernels.outer_sums.reference(expected, a, b)
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, a @ b.T)


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize(("ranks", "numel"), [(1, 0), (1, 5), (5, 3), (9, 5003), (3, 600_001)])
def test_row_sums(ranks: int, numel: int, dtype: torch.dtype) -> None:
    rows = vector(ranks * numel, dtype=dtype).view(ranks, numel)
    found = kernels.row_sums.cpu(rows)
    assert torch.equal(found, kernels.row_sums.reference(rows))
    torch.testing.assert_close(found, rows.sum(dim=0))


def test_sums_of_16_bits_are_rounded_once() -> None:
    rows = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    assert kernels.row_sums.reference(rows).tolist() == [2050.0]
