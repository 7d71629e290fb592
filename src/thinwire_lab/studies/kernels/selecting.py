"""Kernels that pick: by threshold, exactly, into slots, by block."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.thresholding import draw
from thinwire.kernels import Draw, Kernel
from thinwire_lab.studies.kernels.work import Case, Place, Work

_SCALE, _MOMENTUM = 0.25, 0.5  # powers of two: a fused multiply-add rounds like two steps
_BLOCK = 32
_WIDTH = 512  # of a row of activations


def _capacity(place: Place) -> int:
    return min(place.numel, 2 * place.picks + 80)


def _select(place: Place) -> Work:
    x, threshold = place.gradient(), place.threshold()
    return Work(
        run=lambda: kernels.select(x, threshold, _capacity(place)),
        floor=x.sum,
        moved=x.nbytes + 4 * place.picks,
    )


def _accumulate_select(place: Place) -> Work:
    gradient, residual, threshold = place.gradient(), place.gradient(1), place.threshold() * 1.03
    out = torch.empty_like(gradient)

    def run() -> tuple[object, Tensor]:
        return kernels.accumulate_select(out, residual, gradient, _SCALE, threshold, _capacity(place)), out

    return Work(
        run=run,
        floor=lambda: torch.add(residual, gradient, out=out),
        reset=lambda: out.fill_(torch.nan),
        moved=3 * out.nbytes + 4 * place.picks,
    )


def _accumulate_fading(place: Place, *, select: bool = False) -> Work:
    gradient, residual, threshold = place.gradient(), place.gradient(1), place.threshold() * 1.03
    out = torch.empty_like(gradient)
    arguments = (out, residual, gradient, _SCALE, _MOMENTUM)

    def run() -> tuple[object, Tensor]:
        if select:
            return kernels.accumulate_fading_select(*arguments, threshold, _capacity(place)), out
        return kernels.accumulate_fading(*arguments), out

    return Work(
        run=run,
        floor=lambda: torch.add(residual, gradient, out=out),
        reset=lambda: out.fill_(torch.nan),
        moved=3 * out.nbytes + (4 * place.picks if select else 0),
    )


def _accumulate_rounded(place: Place, *, select: bool = False) -> Work:
    gradient, residual = place.gradient(), place.gradient(1).to(torch.bfloat16)
    out, spare = torch.empty_like(residual), torch.empty_like(gradient)
    arguments = (out, residual, gradient, _SCALE, 1)

    def run() -> tuple[object, Tensor]:
        if select:
            return kernels.accumulate_rounded_select(*arguments, place.threshold() * 1.03, _capacity(place)), out
        return kernels.accumulate_rounded(*arguments), out

    return Work(
        run=run,
        floor=lambda: spare.copy_(gradient),
        reset=lambda: out.fill_(torch.nan),
        moved=2 * gradient.nbytes + (4 * place.picks if select else 0),
    )


def _accumulate_momentum_select(place: Place) -> Work:
    inputs = tuple(place.gradient(number) for number in (1, 2, 0))
    outs = (torch.empty_like(inputs[0]), torch.empty_like(inputs[0]))
    rest = (_SCALE, _MOMENTUM, False, place.threshold() * 1.15, _capacity(place))

    def run() -> tuple[object, ...]:
        return kernels.accumulate_momentum_select(outs[0], outs[1], inputs[0], inputs[1], inputs[2], *rest), *outs

    def floor() -> None:
        outs[1].copy_(inputs[1])
        torch.add(inputs[0], inputs[2], out=outs[0])

    return Work(
        run=run,
        floor=floor,
        reset=lambda: [out.fill_(torch.nan) for out in outs],
        moved=5 * outs[0].nbytes + 4 * place.picks,
    )


def _largest(place: Place) -> Work:
    x = place.gradient()
    return Work(
        run=lambda: kernels.largest(x, place.picks),
        floor=x.sum,
        moved=x.nbytes + 4 * place.picks,
        others={"torch": lambda: x.abs().topk(place.picks, sorted=False).indices},
    )


def _largest_in_rows(place: Place) -> Work:
    rows = place.numel // _WIDTH
    x, count = place.gradient()[: rows * _WIDTH], max(1, place.picks // max(1, rows))
    return Work(
        run=lambda: kernels.largest_in_rows(x, _WIDTH, count),
        floor=x.sum,
        moved=x.nbytes + 4 * rows * count,
        others={"torch": lambda: x.view(-1, _WIDTH).abs().topk(count, dim=1, sorted=False).indices},
    )


def _hashed_slots(place: Place) -> Work:
    x = place.gradient()
    indices = kernels.largest(x, min(place.numel, 2 * place.picks))
    priorities = x.index_select(0, indices).abs().view(torch.int32)
    spare = (torch.empty_like(indices), torch.empty_like(priorities))
    return Work(
        run=lambda: kernels.hashed_slots(indices, priorities, place.picks, place.numel, 1),
        floor=lambda: (spare[0].copy_(indices), spare[1].copy_(priorities)),
        moved=indices.nbytes + priorities.nbytes + 4 * place.picks,
    )


def _block_energies(place: Place) -> Work:
    x = place.gradient()
    return Work(run=lambda: kernels.block_energies(x, _BLOCK), floor=x.sum, moved=x.nbytes + x.nbytes // _BLOCK)


def _largest_blocks(place: Place) -> Work:
    x, count = place.gradient(), max(1, place.picks // _BLOCK)

    def alike(found: Tensor, expected: Tensor) -> bool:
        """Whether the blocks' norms match the reference's. Sums in another order may swap the last blocks."""
        energies = kernels.block_energies.reference(x, _BLOCK)
        mine, others = (energies.index_select(0, picks).sort().values for picks in (found, expected))
        ascending = bool((found[1:] > found[:-1]).all())
        return ascending and found.dtype == expected.dtype and torch.allclose(mine, others, rtol=1e-5)

    return Work(
        run=lambda: kernels.largest_blocks(x, _BLOCK, count),
        floor=x.sum,
        alike=alike,
        moved=x.nbytes + 4 * count,
    )


def _pieces(x: Tensor) -> list[Tensor]:
    """Return a vector as ten, as a bucket has several parameters."""
    return list(x.tensor_split(10))


def _draws(place: Place) -> list[Draw]:
    sizes = [x.numel() for x in _pieces(place.gradient())]
    counts = [max(1, place.picks * size // place.numel) for size in sizes]
    return [draw(size, -(-5 * count // 4), count, 0) for size, count in zip(sizes, counts, strict=True)]


def _sampled_select(place: Place, *, momentum: bool = False) -> Work:
    outs = [torch.empty_like(place.gradient()) for _ in range(1 + momentum)]
    inputs = [place.gradient(number) for number in ((1, 2, 0) if momentum else (1, 0))]
    columns, draws = [_pieces(x) for x in (*outs, *inputs)], _draws(place)
    scales, rest = [_SCALE] * len(draws), (_MOMENTUM, False) if momentum else ()
    kernel: Kernel[..., Any] = (
        kernels.accumulate_momentum_sampled_select if momentum else kernels.accumulate_sampled_select
    )

    def floor() -> None:
        torch.add(inputs[0], inputs[-1], out=outs[0])
        if momentum:
            outs[1].copy_(inputs[1])

    return Work(
        run=lambda: (*kernel(*columns, scales, *rest, draws), *outs),
        floor=floor,
        reset=lambda: [out.fill_(torch.nan) for out in outs],
        moved=(len(outs) + len(inputs)) * outs[0].nbytes + 8 * place.picks,
    )


def _largest_of_each(place: Place) -> Work:
    x, counts = place.gradient(), [draw.capacity for draw in _draws(place)]
    return Work(run=lambda: kernels.largest_of_each(_pieces(x), counts), floor=x.sum, moved=x.nbytes + 8 * place.picks)


def _peak_of_each(place: Place) -> Work:
    x = place.gradient()
    return Work(run=lambda: kernels.peak_of_each(_pieces(x)), floor=x.sum, moved=x.nbytes)


def _hashed_slots_of_each(place: Place) -> Work:
    pieces, slots = _pieces(place.gradient()), [draw.capacity for draw in _draws(place)]
    runs = [min(x.numel(), 2 * count) for x, count in zip(pieces, slots, strict=True)]
    indices, values = kernels.largest_of_each.reference(pieces, runs)
    priorities, spare = values.abs().view(torch.int32), torch.empty_like(indices)
    return Work(
        run=lambda: kernels.hashed_slots_of_each(pieces, indices, priorities, runs, slots, range(len(pieces))),
        floor=lambda: (spare.copy_(indices), spare.copy_(priorities)),
        moved=indices.nbytes + priorities.nbytes + 8 * sum(slots),
    )


CASES = {
    "select": Case(make=_select, group="select", floor="x.sum()", sweep=True),
    "accumulate_select": Case(make=_accumulate_select, group="select", floor="add(r, g, out=)", sweep=True),
    "accumulate_fading": Case(make=_accumulate_fading, group="select", floor="add(r, g, out=)", most=1 << 24),
    "accumulate_fading_select": Case(
        make=partial(_accumulate_fading, select=True), group="select", floor="add(r, g, out=)", sweep=True
    ),
    "accumulate_rounded": Case(make=_accumulate_rounded, group="select", floor="copy_(g)", most=1 << 24),
    "accumulate_rounded_select": Case(
        make=partial(_accumulate_rounded, select=True), group="select", floor="copy_(g)", sweep=True, most=1 << 24
    ),
    "accumulate_momentum_select": Case(
        make=_accumulate_momentum_select, group="select", floor="add(r, g, out=) and copy_(u)", sweep=True
    ),
    "largest": Case(make=_largest, group="select", floor="x.sum()", baseline="abs, topk", sweep=True, most=1 << 22),
    "largest_in_rows": Case(
        make=_largest_in_rows, group="select", floor="x.sum()", baseline="abs, topk", sweep=True, most=1 << 22
    ),
    "accumulate_sampled_select": Case(make=_sampled_select, group="select", floor="add(r, g, out=)", sweep=True),
    "accumulate_momentum_sampled_select": Case(
        make=partial(_sampled_select, momentum=True), group="select", floor="add(r, g, out=) and copy_(u)", sweep=True
    ),
    "largest_of_each": Case(make=_largest_of_each, group="select", floor="x.sum()", sweep=True, most=1 << 22),
    "peak_of_each": Case(make=_peak_of_each, group="select", floor="x.sum()"),
    "hashed_slots_of_each": Case(
        make=_hashed_slots_of_each, group="index", floor="copy_ of the picks", sweep=True, most=1 << 22
    ),
    "hashed_slots": Case(make=_hashed_slots, group="index", floor="copy_ of the picks", sweep=True),
    "largest_blocks": Case(make=_largest_blocks, group="select", floor="x.sum()", sweep=True, most=1 << 24),
    "block_energies": Case(make=_block_energies, group="select", floor="x.sum()"),
}
