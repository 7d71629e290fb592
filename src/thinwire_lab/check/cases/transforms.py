"""Kernels that transform: chunks by a DCT, Fourier, and the products of matrices. What they are tried on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Arrived, Chunking, Groups, Packed
from thinwire.kernels.parts import wide
from thinwire_lab.check.cases.picking import sums
from thinwire_lab.check.material import FINITE, Case, Kit, Near, Trial, Trials, difference, framed

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


def _cuts(n: int) -> list[Chunking]:
    """Return how three vectors of about n elements in all are cut: two alike, and one in another way."""
    return [_cut(n // 4), _cut(n // 4), _cut(n // 2)]


def _pieces(kit: Kit, n: int, seed: int = 0) -> list[Tensor]:
    cuts = _cuts(n)
    return [framed(kit.vector(cut.numel, seed + 10 * i)) for i, cut in enumerate(cuts)]


def _summed(kit: Kit, n: int) -> Trials:
    """Yield sums that fade and that are rounded: in one pass on a CPU, and in two."""
    cuts = _cuts(n)
    for each in sums(kit, lambda make, seed: [framed(make(cut.numel, seed + 10 * i)) for i, cut in enumerate(cuts)]):
        if each.how in ("fading", "rounded"):
            yield Trial((each, cuts), (0,))


def _same_coefficients(trial: Trial, found: list[Any], expected: list[Any]) -> str:
    """Compare what was written, each coefficient with the transform at its place, and magnitudes with the reference's.

    Places may differ, because sums in another order may swap the last of a chunk.
    """
    cuts: list[Chunking] = trial.args[-1]
    xs = [wide(x) for x in (expected[: len(cuts)] if len(found) > 2 else trial.args[0])]
    parts = [zip(*(x.split([cut.count for cut in cuts]) for x in each[-2:]), strict=True) for each in (found, expected)]
    wrong = [difference(found[:-2], expected[:-2], Near())]
    wrong += [_same_of_one(*each) for each in zip(xs, cuts, *parts, strict=True)]
    return next(filter(None, wrong), "")


def _same_of_one(x: Tensor, cut: Chunking, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
    places, values = found
    at = places.view(-1, cut.kept).long()
    if not bool((at.diff(dim=1) > 0).all()) or not bool(((at >= 0) & (at < cut.size)).all()):
        return "positions do not ascend within a chunk"
    _, spectrum = kernels.chunk_topk.reference([x.to(values.device)], [replace(cut, kept=cut.size)])
    there = spectrum.view(-1, cut.size).gather(1, at).view(-1)
    mine, others = (each.abs().view(-1, cut.kept).sort().values for each in (values, expected[1].to(values.device)))
    return difference([values], [there], _LIBRARY) or difference([mine], [others], _LIBRARY)


def _putting(kit: Kit, n: int) -> Trials:
    cuts = _cuts(n)
    count = sum(cut.count for cut in cuts)
    one = [torch.arange(cut.kept, dtype=torch.int16, device=kit.device).repeat(cut.chunks) for cut in cuts]
    positions, values = torch.cat(one).repeat(2, 1), kit.vector(2 * count).view(2, count)
    for subtract in (False, True):
        yield Trial((_pieces(kit, n, 1), framed(positions), values, cuts, subtract), (0,))


def _settling(kit: Kit, n: int) -> Trials:
    """Two ranks' numbers, plain and as codes of four bits: sound ones, and ones of which a check found fault."""
    (outs, positions, values, cuts, _), own = next(iter(_putting(kit, n))).args, kit.vector(2 * n, 5)
    count, runs = positions.shape[1], tuple(cut.count for cut in cuts)
    mine, fault = (framed(positions[:1].flip(0)), own[:count].view(1, -1)), kit.whole(2000, 0, 1).bool()
    plain = torch.nn.functional.pad(values.view(torch.uint8), (8, 16 - count * values.element_size() % 8))
    none, table = kit.whole(0, 0, 1).view(3, 0), kit.vector(16).float()
    for groups in (Groups(runs), Groups(runs, 5), Groups((count,))):  # the last one's scales are not the vectors' own
        scales = kit.vector(2 * sum(groups.counts), 3).float().view(2, -1).view(torch.uint8)
        codes = kit.whole(2 * -(-count // 2), 0, 256, torch.uint8).view(2, -1)
        rows = torch.cat([scales, codes], 1)
        rows = torch.nn.functional.pad(rows, (8, -rows.shape[1] % 8))
        coded = Arrived(rows, Packed(8, 8 + scales.shape[1], 4), table, groups, values.dtype, [], none)
        for arrived in (coded, coded._replace(wrong=[fault[:7], ~fault])):
            yield _settled(outs, framed(positions), arrived, [framed(x) for x in _pieces(kit, n, 7)], mine, cuts)
    whole = Arrived(plain, Packed(0, 8, 0), table[:0], Groups((count,)), values.dtype, [fault], none)
    other = whole._replace(fixed=kit.seeds([0, 1, 255]).int().view(3, 1))  # bytes that are not there
    for dtype, arrived in ((values.dtype, whole), (torch.float64, whole), (torch.float64, other)):
        parts = [framed(x.to(dtype)) for x in _pieces(kit, n, 7)]
        yield _settled(outs, framed(positions), arrived, parts, mine, cuts)


def _settled(outs: Any, positions: Tensor, arrived: Arrived, parts: Any, mine: Any, cuts: Any) -> Trial:
    flags = positions.new_zeros(1 + sum(map(len, arrived.wrong)), dtype=torch.uint8)
    return Trial((outs, positions, arrived, flags, parts, *mine, cuts), (0, 3, 4))


_CHUNKS: dict[str, Any] = {"contents": ("normal",), "alike": _same_coefficients, "nbytes": 100}
CASES: Mapping[str, Case] = {
    "accumulate_chunk_topk": Case(make=_summed, **_CHUNKS),
    "chunk_settle": Case(make=_settling, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=200),
    "chunk_put": Case(make=_putting, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "chunk_topk": Case(make=lambda kit, n: [Trial((_pieces(kit, n), _cuts(n)))], **_CHUNKS),
    "inverse_fourier": Case(make=_inverse_fourier, contents=FINITE, near_on_gpu=_LIBRARY, nbytes=100),
    "orthonormal": Case(make=_orthonormal, contents=("normal",), near_on_gpu=_LIBRARY, nbytes=150),
    "outer_sums": Case(make=_outer_sums, contents=FINITE),
}
