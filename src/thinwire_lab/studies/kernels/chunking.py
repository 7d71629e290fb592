"""Kernels on chunks of a matrix of 1,024 columns."""

from functools import partial

import torch

from thinwire import kernels
from thinwire.kernels import Chunking, Numbering
from thinwire_lab.studies.kernels.work import Case, Place, Work

_COLUMNS, _CHUNK = 1024, 16
_DENSITY = 6 / 256
_PAYLOADS = 4
_SCALE, _DECAY = 0.25, 0.95


def _cut(place: Place) -> Chunking:
    return _cut_of(place.numel)


def _cut_of(numel: int) -> Chunking:
    rows = max(1, numel // _COLUMNS)
    shape = (rows, _COLUMNS) if numel >= _COLUMNS and numel % _COLUMNS == 0 else (numel,)
    return Chunking.of(shape, _CHUNK, "dct", lambda size: max(1, round(_DENSITY * size)))


def _spaced(place: Place, cut: Chunking, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return coefficients of `count` ranks at evenly spaced positions."""
    positions = torch.arange(cut.kept, dtype=torch.int16, device=place.device) * (cut.size // cut.kept)
    values = place.gradient().repeat(-(-count * cut.count // place.numel))[: count * cut.count]
    return positions.repeat(count * cut.chunks), values


def _chunk_topk(place: Place, *, fading: bool = False) -> Work:
    cut = _cut(place)
    x, residual = place.gradient()[: cut.numel], place.gradient(1)[: cut.numel].clone()
    out = torch.empty_like(x)

    def alike(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
        """Whether the magnitudes match the reference's. Sums in another order may swap the last ones."""
        mine, others = (values.abs().view(-1, cut.kept).sort().values for _, values in (found, expected))
        places = found[0].view(-1, cut.kept)
        ascending = bool((places.diff(dim=1) > 0).all()) and 0 <= int(places.min()) <= int(places.max()) < cut.size
        return ascending and torch.allclose(mine, others, rtol=1e-4, atol=1e-5)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if fading:
            return kernels.accumulate_fading_chunk_topk(out, residual, x, _SCALE, _DECAY, cut)
        return kernels.chunk_topk(x, cut)

    return Work(
        run=run,
        floor=(lambda: torch.add(residual, x, out=out)) if fading else lambda: residual.add_(x),
        alike=alike,
        moved=(3 if fading else 1) * x.nbytes + 6 * cut.count,
    )


def _decoding(place: Place, *, subtract: bool) -> Work:
    cut = _cut(place)
    coefficients = _spaced(place, cut, 1 if subtract else _PAYLOADS)
    x = place.gradient(1)[: cut.numel]
    out, change = x.clone(), kernels.chunk_subtract if subtract else kernels.chunk_write

    def run() -> torch.Tensor:
        change(out, *coefficients, cut)
        return out

    return Work(
        run=run,
        floor=(lambda: out.add_(x)) if subtract else out.zero_,
        reset=lambda: out.copy_(x),
        moved=(1 + subtract) * out.nbytes + 6 * coefficients[1].numel(),
    )


_SMALL = 1 << 12


def _small(place: Place) -> list[Chunking]:
    return [_cut_of(min(_SMALL, place.numel - start)) for start in range(0, place.numel, _SMALL)]


def _small_topk(place: Place, *, fading: bool = False) -> Work:
    cuts = _small(place)
    x, residual, out = (x.clone() for x in (place.gradient(), place.gradient(1), place.gradient()))
    xs, residuals, outs = (each.split(_SMALL) for each in (x, residual, out))
    factors = [_SCALE] * len(cuts), [_DECAY] * len(cuts)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if fading:
            return kernels.accumulate_fading_chunk_topk_each(outs, residuals, xs, *factors, cuts)
        return kernels.chunk_topk_each(xs, cuts)

    def alike(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
        """Whether all magnitudes of all chunks together match the reference's."""
        mine, others = (values.abs().sort().values for _, values in (found, expected))
        return torch.allclose(mine, others, rtol=1e-4, atol=1e-5)

    count = sum(cut.count for cut in cuts)
    floor = (lambda: torch.add(residual, x, out=out)) if fading else lambda: residual.add_(x)
    return Work(run=run, floor=floor, alike=alike, moved=(3 if fading else 1) * x.nbytes + 6 * count)


def _small_decoding(place: Place) -> Work:
    cuts = _small(place)
    parts = [_spaced(place, cut, 1) for cut in cuts]
    positions, values = (torch.cat(each)[None] for each in zip(*parts, strict=True))
    x = place.gradient(1)
    out = x.clone()

    def run() -> torch.Tensor:
        kernels.chunk_put_each(out.split(_SMALL), positions, values, cuts, True)
        return out

    return Work(
        run=run, floor=lambda: out.add_(x), reset=lambda: out.copy_(x), moved=2 * out.nbytes + 6 * values.numel()
    )


def _subsets(place: Place, *, decode: bool) -> Work:
    cut = _cut(place)
    positions, _ = _spaced(place, cut, 1)
    numbering = Numbering.of(cut.size, cut.kept)
    assert numbering, "few of 256 can be numbered"
    buffer, spare = kernels.subsets_encode(positions, numbering), torch.empty_like(positions)
    return Work(
        run=(lambda: kernels.subsets_decode(buffer[None], cut.chunks, numbering))
        if decode
        else lambda: kernels.subsets_encode(positions, numbering),
        floor=lambda: spare.copy_(positions),
        moved=positions.nbytes + buffer.nbytes,
        bits=8 * buffer.numel() / max(1, cut.count),
    )


_MOST = 1 << 22
CASES = {
    "chunk_topk": Case(make=_chunk_topk, group="chunks", floor="r.add_(g)", density=_DENSITY, most=_MOST),
    "accumulate_fading_chunk_topk": Case(
        make=partial(_chunk_topk, fading=True), group="chunks", floor="add(r, g, out=)", density=_DENSITY, most=_MOST
    ),
    "chunk_topk_each": Case(make=_small_topk, group="chunks", floor="r.add_(g)", density=_DENSITY, most=_MOST),
    "accumulate_fading_chunk_topk_each": Case(
        make=partial(_small_topk, fading=True), group="chunks", floor="add(r, g, out=)", density=_DENSITY, most=_MOST
    ),
    "chunk_put_each": Case(make=_small_decoding, group="chunks", floor="r.add_(g)", density=_DENSITY, most=_MOST),
    "chunk_subtract": Case(
        make=partial(_decoding, subtract=True), group="chunks", floor="r.add_(g)", density=_DENSITY, most=_MOST
    ),
    "chunk_write": Case(
        make=partial(_decoding, subtract=False), group="chunks", floor="zero_()", density=_DENSITY, most=_MOST
    ),
    "subsets_encode": Case(
        make=partial(_subsets, decode=False), group="chunks", floor="copy_ of positions", density=_DENSITY, most=_MOST
    ),
    "subsets_decode": Case(
        make=partial(_subsets, decode=True), group="chunks", floor="copy_ of positions", density=_DENSITY, most=_MOST
    ),
}
