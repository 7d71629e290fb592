"""Kernels between numbers and codes of a few bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.formats import OffsetFloat
from thinwire.kernels import Groups, OffsetGrid
from thinwire_lab.studies.kernels.work import Case, Place, Work

_GROUP, _SEED, _LEVELS = 512, 1, 7
_FORMAT = OffsetFloat.balanced(bits=8)
_GRID = OffsetGrid(_FORMAT.grid.shift, _FORMAT.grid.base, _FORMAT.positives, _FORMAT.negatives)


def _encode(kernel: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[Place], Work]:
    """Return a function that measures a kernel: codes (uint8) of x, with a scale per group."""

    def make(place: Place) -> Work:
        x, codes = place.gradient(), torch.empty(place.numel, dtype=torch.uint8, device=place.device)
        scales = torch.full((-(-place.numel // _GROUP),), 4.0, device=place.device)
        spare = torch.empty_like(x)

        def run() -> Tensor:
            kernel(codes, x, scales)
            return codes

        return Work(
            run=run,
            floor=lambda: spare.copy_(x),
            reset=lambda: codes.fill_(255),
            moved=x.nbytes + codes.nbytes + scales.nbytes,
        )

    return make


def _table_decode(place: Place) -> Work:
    x, table = place.gradient(), _FORMAT.table().to(place.device)
    codes = (x.view(torch.int32) & 127).to(torch.uint8)
    scales, out = torch.ones(-(-place.numel // _GROUP), device=place.device), torch.empty_like(x)

    def run() -> Tensor:
        kernels.table_decode(out, codes, table, scales, _groups(x))
        return out

    return Work(
        run=run, floor=lambda: out.copy_(x), reset=lambda: out.fill_(torch.nan), moved=out.nbytes + codes.nbytes
    )


def _group_norms(place: Place) -> Work:
    x = place.gradient()
    return Work(
        run=lambda: kernels.group_norms(x, _groups(x), 2.0),
        floor=x.sum,
        moved=x.nbytes + 8 * x.numel() // _GROUP,
    )


def _groups(x: Tensor) -> Groups:
    return Groups((x.numel(),), _GROUP)


def _offset(codes: Tensor, x: Tensor, scales: Tensor) -> Any:
    return kernels.offset_encode(codes, x, scales, _groups(x), _GRID, "nearest", [_SEED])


def _levels(codes: Tensor, x: Tensor, scales: Tensor) -> Any:
    return kernels.levels_encode(codes, x, scales, _groups(x), _LEVELS, [_SEED])


def _ternary(codes: Tensor, x: Tensor, scales: Tensor) -> Any:
    return kernels.ternary_encode(codes, x, scales, _groups(x), [_SEED])


def _sign(codes: Tensor, x: Tensor, scales: Tensor) -> Any:
    return kernels.sign_encode(codes, x)


_MOST = 1 << 22
CASES = {
    "group_norms": Case(make=_group_norms, group="codes", floor="x.sum()", most=_MOST),
    "offset_encode": Case(make=_encode(_offset), group="codes", floor="copy_(x)", most=_MOST),
    "levels_encode": Case(make=_encode(_levels), group="codes", floor="copy_(x)", most=_MOST),
    "ternary_encode": Case(make=_encode(_ternary), group="codes", floor="copy_(x)", most=_MOST),
    "sign_encode": Case(make=_encode(_sign), group="codes", floor="copy_(x)", most=_MOST),
    "table_decode": Case(make=_table_decode, group="codes", floor="copy_(x)", most=_MOST),
}
