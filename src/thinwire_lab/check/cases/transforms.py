"""Kernels that transform: chunks by a DCT, Fourier, and the products of matrices. What they are tried on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Chunking
from thinwire_lab.check.cases.case import DECAY, FINITE, SCALE, Case, Trials
from thinwire_lab.check.material import Kit, Near, Trial, difference, framed

_LIBRARY = Near(relative=1e-4, absolute=1e-5)  # a GPU's own libraries choose their order of additions


def _factors(kit: Kit, n: int) -> tuple[Tensor, Tensor]:
    """Return factors of rank 4 of a matrix of about n elements."""
    rows = max(4, int(n**0.5))
    columns = max(4, n // rows)
    return framed(kit.vector(4 * rows).view(-1, 4)), framed(kit.vector(4 * columns, 1).view(-1, 4))


def _outer_sums(kit: Kit, n: int) -> Trials:
    a, b = _factors(kit, n)
    yield Trial((kit.room(len(a), len(b)), a, b), (0,))


def _orthonormal(kit: Kit, n: int) -> Trials:
    rows = max(5, n // 4)  # of a square matrix, a GPU's library gives the last column the other sign
    yield Trial((framed(kit.vector(4 * rows).view(-1, 4)),))


def _inverse_fourier(kit: Kit, n: int) -> Trials:
    width = min(4096, n)
    vectors = kit.vector(-(-n // width) * width).view(-1, width)
    spectra = torch.view_as_real(torch.fft.rfft(vectors, norm="ortho"))  # real where a real vector's must be
    yield Trial((framed(spectra.view(-1, 2)), n, width))


def _cut(n: int) -> Chunking:
    shape = (n // 256, 256) if n >= 512 else (n,)
    return Chunking.of(shape, 16, "dct", lambda size: max(1, size // 40))


def _chunk_topk(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    yield Trial((framed(kit.vector(n)[: cut.numel]), cut))


def _fading_chunk_topk(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    before, new = (framed(kit.vector(n, seed)[: cut.numel]) for seed in (1, 2))
    yield Trial((kit.room(cut.numel), before, new, SCALE, DECAY, cut), (0,))


def _cuts(n: int) -> list[Chunking]:
    """Return how three vectors of about n elements in all are cut: two alike, and one in another way."""
    return [_cut(n // 4), _cut(n // 4), _cut(n // 2)]


def _pieces(kit: Kit, n: int, seed: int = 0) -> list[Tensor]:
    cuts = _cuts(n)
    return [framed(kit.vector(cut.numel, seed + 10 * i)) for i, cut in enumerate(cuts)]


def _fading_chunk_topk_each(kit: Kit, n: int) -> Trials:
    rooms, factors = [kit.room(cut.numel) for cut in _cuts(n)], ([SCALE] * 3, [DECAY, DECAY, DECAY / 2])
    yield Trial((rooms, _pieces(kit, n, 1), _pieces(kit, n, 2), *factors, _cuts(n)), (0,))


def _same_coefficients_of_each(trial: Trial, found: list[Any], expected: list[Any]) -> str:
    """Do `_same_coefficients` of each vector."""
    cuts: list[Chunking] = trial.args[-1]
    counts, written = [cut.count for cut in cuts], len(found) > 2
    parts = [[x.split(counts) for x in each[-2:]] for each in (found, expected)]
    for i, cut in enumerate(cuts):
        args = ((trial.args[0][i], cut) if not written else (cut,),)
        outs = [[each[i]] if written else [] for each in (found, expected)]
        pairs = [[*out, *(part[i] for part in both)] for out, both in zip(outs, parts, strict=True)]
        if wrong := _same_coefficients(Trial(*args), *pairs):
            return wrong
    return ""


def _putting_each(kit: Kit, n: int) -> Trials:
    cuts = _cuts(n)
    count = sum(cut.count for cut in cuts)
    one = [torch.arange(cut.kept, dtype=torch.int16, device=kit.device).repeat(cut.chunks) for cut in cuts]
    positions, values = torch.cat(one).repeat(2, 1), kit.vector(2 * count).view(2, count)
    for subtract in (False, True):
        yield Trial((_pieces(kit, n, 1), framed(positions), values, cuts, subtract), (0,))


def _same_coefficients(trial: Trial, found: list[Any], expected: list[Any]) -> str:
    """Compare what was written, each coefficient with the transform at its place, and magnitudes with the reference's.

    Places may differ, because sums in another order may swap the last of a chunk.
    """
    *written, places, values = found
    cut: Chunking = trial.args[-1]
    at = places.view(-1, cut.kept).long()
    if not bool((at.diff(dim=1) > 0).all()) or not bool(((at >= 0) & (at < cut.size)).all()):
        return "positions do not ascend within a chunk"
    x = (expected[0] if written else trial.args[0]).to(values.device)
    _, spectrum = kernels.chunk_topk.reference(x, replace(cut, kept=cut.size))
    there = spectrum.view(-1, cut.size).gather(1, at).view(-1)
    mine, others = (each.abs().view(-1, cut.kept).sort().values for each in (values, expected[-1].to(values.device)))
    return (
        difference(written, expected[:-2], Near())
        or difference([values], [there], _LIBRARY)
        or difference([mine], [others], _LIBRARY)
    )


def _decoding_chunks(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    positions = torch.arange(cut.kept, dtype=torch.int16, device=kit.device).repeat(2 * cut.chunks)
    yield Trial((kit.vector(cut.numel, 1), framed(positions), kit.vector(2 * cut.count), cut), (0,))


CASES: Mapping[str, Case] = {
    "accumulate_fading_chunk_topk": Case(
        make=_fading_chunk_topk, contents=("normal",), alike=_same_coefficients, nbytes=100
    ),
    "accumulate_fading_chunk_topk_each": Case(
        make=_fading_chunk_topk_each, contents=("normal",), alike=_same_coefficients_of_each, nbytes=100
    ),
    "chunk_put_each": Case(make=_putting_each, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "chunk_subtract": Case(make=_decoding_chunks, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "chunk_topk_each": Case(
        make=lambda kit, n: [Trial((_pieces(kit, n), _cuts(n)))],
        contents=("normal",),
        alike=_same_coefficients_of_each,
        nbytes=100,
    ),
    "chunk_topk": Case(make=_chunk_topk, contents=("normal",), alike=_same_coefficients, nbytes=100),
    "chunk_write": Case(make=_decoding_chunks, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "inverse_fourier": Case(make=_inverse_fourier, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "orthonormal": Case(make=_orthonormal, contents=("normal",), near_on_gpu=_LIBRARY, nbytes=150),
    "outer_sums": Case(make=_outer_sums, contents=FINITE, near_on_gpu=_LIBRARY),
}
