"""Kernels that add to what waits, and that pick large magnitudes: what they are tried on."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from thinwire.kernels import Draw
from thinwire_lab.check.cases.case import DECAY, FLOATS, SCALE, SEED, WIDTH, Case, Trials, several
from thinwire_lab.check.material import Kit, Near, Trial, framed

_ALL_FLOATS = (*FLOATS, torch.bfloat16, torch.float16)


def _accumulate(kit: Kit, n: int) -> Trials:
    yield Trial((kit.room(n), kit.vector(n, 1), kit.vector(n), SCALE), (0,))


def _accumulate_each(kit: Kit, n: int) -> Trials:
    rooms, *inputs = (several(x) for x in (kit.room(n), kit.vector(n, 1), kit.vector(n)))
    yield Trial((rooms, *inputs, [SCALE] * len(rooms)), (0,))


def _fading(kit: Kit, n: int) -> Trials:
    yield Trial((kit.room(n), kit.vector(n, 1), kit.vector(n), SCALE, DECAY), (0,))


def _momentum(kit: Kit, n: int) -> Trials:
    for nesterov in (False, True):
        inputs = (kit.vector(n, 1), kit.vector(n, 2), kit.vector(n))
        yield Trial((kit.room(n), kit.room(n), *inputs, SCALE, DECAY, nesterov), (0, 1))


def _rounded(kit: Kit, n: int) -> Trials:
    room = kit.room(n, dtype=torch.bfloat16)
    yield Trial((room, framed(kit.vector(n, 1).bfloat16()), kit.vector(n), SCALE, SEED), (0,))


def _selecting(make: Callable[[Kit, int], Trials], last: tuple[Any, ...] = ()) -> Callable[[Kit, int], Trials]:
    """Return the trials of a kernel that also selects: with enough capacity, and with too little."""

    def trials(kit: Kit, n: int) -> Trials:
        for trial in make(kit, n):
            yield Trial((*trial.args, kit.number(2.5), n // 16 + 8, *last), trial.writes)
            yield Trial((*trial.args, kit.number(0.5), n // 50, *last), trial.writes)

    return trials


def _largest_of_each(kit: Kit, n: int) -> Trials:
    pieces = several(kit.vector(n))
    for share in (100, 1):
        yield Trial((pieces, [-(-x.numel() // share) for x in pieces]))


def _draw(numel: int, capacity: int) -> Draw:
    if numel < 10:
        return Draw(offset=0, stride=1, rank=0, capacity=min(numel, capacity))
    return Draw(offset=2, stride=3, rank=numel // 60 + 1, capacity=min(numel, capacity))


def _sampled(kit: Kit, n: int, momentum: tuple[float | bool, ...] = ()) -> Trials:
    outs = 2 if momentum else 1
    for capacity in (n // 16 + 8, n // 50):
        rooms = [several(kit.room(n)) for _ in range(outs)]
        inputs = [several(kit.vector(n, seed)) for seed in range(outs + 1)]
        scales, draws = [SCALE] * len(rooms[0]), [_draw(x.numel(), capacity) for x in rooms[0]]
        yield Trial((*rooms, *inputs, scales, *momentum, draws), tuple(range(outs)))


def _largest_in_rows(kit: Kit, n: int) -> Trials:
    width = min(n, 500)
    for k in {1, -(-width // 100), width}:
        yield Trial((framed(kit.vector(n)[: n // width * width]), width, k))


_ADDING = Near(relative=1e-5, absolute=1e-6)

CASES: Mapping[str, Case] = {
    "accumulate": Case(make=_accumulate),
    "accumulate_each": Case(make=_accumulate_each),
    "accumulate_fading": Case(make=_fading),
    "accumulate_fading_select": Case(make=_selecting(_fading)),
    "accumulate_momentum": Case(make=_momentum),
    "accumulate_momentum_select": Case(make=_selecting(_momentum)),
    "accumulate_momentum_sampled_select": Case(
        make=lambda kit, n: chain(*(_sampled(kit, n, (DECAY, on)) for on in (False, True)))
    ),
    "accumulate_rounded": Case(make=_rounded),
    "accumulate_rounded_select": Case(make=_selecting(_rounded)),
    "accumulate_sampled_select": Case(make=_sampled),
    "accumulate_select": Case(make=_selecting(_accumulate)),
    "block_energies": Case(
        make=lambda kit, n: [Trial((kit.vector(n), width)) for width in (WIDTH, 3000)], near=_ADDING
    ),
    "largest": Case(make=lambda kit, n: [Trial((kit.vector(n), k)) for k in {1, n // 100, n}], dtypes=_ALL_FLOATS),
    "largest_blocks": Case(
        make=lambda kit, n: [Trial((kit.vector(n), WIDTH, -(-n // WIDTH) // 3))], contents=("whole", "zeros")
    ),  # sums without rounding
    "largest_in_rows": Case(make=_largest_in_rows, dtypes=_ALL_FLOATS),
    "largest_of_each": Case(make=_largest_of_each, dtypes=_ALL_FLOATS),
    "select": Case(make=_selecting(lambda kit, n: [Trial((kit.vector(n),))]), dtypes=_ALL_FLOATS),
}
