"""Kernels on codes and sketches."""

import torch

from thinwire import kernels
from thinwire_lab.studies.kernels.work import Case, Place, Work

_BITS = 10  # as the FFT recipe's values
_ROWS = 3


def _codes(place: Place) -> torch.Tensor:
    return (place.gradient().view(torch.int32) & (1 << _BITS) - 1).to(torch.int16)


def _pack_bits(place: Place) -> Work:
    codes = _codes(place)
    spare = torch.empty_like(codes)
    return Work(
        run=lambda: kernels.pack_bits(codes, _BITS),
        floor=lambda: spare.copy_(codes),
        moved=codes.nbytes + codes.numel() * _BITS // 8,
    )


def _unpack_bits(place: Place) -> Work:
    codes = _codes(place)
    buffer = kernels.pack_bits(codes, _BITS)
    spare = torch.empty_like(codes)
    return Work(
        run=lambda: kernels.unpack_bits(buffer, place.numel, _BITS),
        floor=lambda: spare.copy_(codes),
        moved=codes.nbytes + buffer.nbytes,
    )


def _sketch_insert(place: Place) -> Work:
    x, buckets = place.gradient(), max(1, place.picks // _ROWS)
    return Work(
        run=lambda: kernels.sketch_insert(x, _ROWS, buckets, 1),
        floor=x.sum,
        moved=x.nbytes + 4 * _ROWS * buckets,
    )


def _sketch_query(place: Place) -> Work:
    x, buckets = place.gradient(), max(1, place.picks // _ROWS)
    table, spare = kernels.sketch_insert(x, _ROWS, buckets, 1), torch.empty_like(x)
    return Work(
        run=lambda: kernels.sketch_query(table, place.numel, 1),
        floor=spare.zero_,
        moved=x.nbytes + table.nbytes,
    )


CASES = {
    "pack_bits": Case(make=_pack_bits, group="codes", floor="copy_ of the codes", most=1 << 22),
    "unpack_bits": Case(make=_unpack_bits, group="codes", floor="copy_ of the codes", most=1 << 22),
    "sketch_insert": Case(make=_sketch_insert, group="sketch", floor="x.sum()", density=0.1, most=1 << 22),
    "sketch_query": Case(make=_sketch_query, group="sketch", floor="zero_()", density=0.1, most=1 << 22),
}
