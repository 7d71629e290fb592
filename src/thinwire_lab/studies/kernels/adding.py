"""Kernels that add in a fixed order: every processor gets the same bits."""

import torch

from thinwire import kernels
from thinwire_lab.studies.kernels.work import Case, Place, Work

_RANK = 4
_BLOCK = 4096  # of the FFT recipe


def _row_sums(place: Place) -> Work:
    rows = torch.stack([place.gradient(number) for number in range(place.workers)])
    return Work(
        run=lambda: kernels.row_sums(rows),
        floor=lambda: rows.sum(dim=0),
        moved=rows.nbytes + rows[0].nbytes,
        others={"torch": lambda: rows.sum(dim=0)},
    )


def _outer_sums(place: Place) -> Work:
    a, b = _factors(place)
    out = a.new_empty(a.shape[0], b.shape[0])

    def run() -> torch.Tensor:
        kernels.outer_sums(out, a, b)
        return out

    return Work(run=run, floor=out.zero_, moved=out.nbytes, others={"torch": lambda: torch.mm(a, b.T, out=out)})


def _orthonormal(place: Place) -> Work:
    a, _ = _factors(place)
    spare = torch.empty_like(a)
    return Work(
        run=lambda: kernels.orthonormal(a),
        floor=lambda: spare.copy_(a),
        moved=2 * a.nbytes,
        others={"torch": lambda: torch.linalg.qr(a).Q},
    )


def _inverse_fourier(place: Place) -> Work:
    width = min(_BLOCK, place.numel)
    blocks = -(-place.numel // width)
    vectors = torch.randn(blocks, width, generator=torch.Generator().manual_seed(0)).to(place.device)
    spectra = torch.fft.rfft(vectors, norm="ortho")
    pairs, out = torch.view_as_real(spectra).view(-1, 2), place.gradient().clone()
    return Work(
        run=lambda: kernels.inverse_fourier(pairs, place.numel, width),
        floor=out.zero_,
        moved=pairs.nbytes + out.nbytes,
        others={"torch": lambda: torch.fft.irfft(spectra, n=width, norm="ortho")},
    )


def _factors(place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a matrix with 1,024 columns, or of a roughly square one."""
    columns = min(1024, max(_RANK, int(place.numel**0.5)))
    shapes = (max(_RANK, place.numel // columns), columns)
    x = place.gradient().repeat(_RANK)[: _RANK * sum(shapes)]
    a, b = x.split([_RANK * length for length in shapes])
    return a.view(-1, _RANK).contiguous(), b.view(-1, _RANK).contiguous()


_MOST = 1 << 22
CASES = {
    "row_sums": Case(make=_row_sums, group="sums", floor="rows.sum(dim=0)", workers=True, most=_MOST),
    "outer_sums": Case(make=_outer_sums, group="sums", floor="zero_()", most=_MOST),
    "orthonormal": Case(make=_orthonormal, group="sums", floor="copy_(x)", most=_MOST),
    "inverse_fourier": Case(make=_inverse_fourier, group="sums", floor="zero_()", most=_MOST),
}
