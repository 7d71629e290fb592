"""Kernels that add to residuals, and that pick large magnitudes: what they are tried on."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from thinwire.kernels import Draw, Sum
from thinwire.kernels.parts import Fit
from thinwire_lab.check.material import DECAY, FLOATS, SCALE, SEED, Case, Kit, Near, Trial, Trials, framed, several

Pieces = Callable[[Callable[[int, int], Tensor], int], list[Tensor]]
_WIDTH = 32
_ALL_FLOATS = (*FLOATS, torch.bfloat16, torch.float16)


def sums(kit: Kit, pieces: Pieces) -> Iterator[Sum]:
    """Yield sums of every kind. `pieces` makes vectors with a seed, or room for them."""
    scales = [SCALE] * len(pieces(kit.vector, 0))
    decays = [DECAY, *scales[1:]]

    def rooms() -> list[Tensor]:
        return pieces(lambda n, _: kit.room(n), 0)

    residuals, velocities, gradients = (pieces(kit.vector, seed) for seed in (1, 2, 0))
    yield Sum(rooms(), residuals, gradients, scales)
    yield Sum(rooms(), residuals, gradients, scales, decays)
    for nesterov in (False, True):
        yield Sum(rooms(), residuals, gradients, scales, None, rooms(), velocities, DECAY, nesterov)
    room, halves = ([framed(x.bfloat16()) for x in xs] for xs in (rooms(), residuals))
    yield Sum(room, halves, gradients, scales, decays, seeds=[SEED + i for i in range(len(scales))])


def _fit(kit: Kit, number: int) -> Fit | None:
    """Return how to write values of float32. The bound lies between two numbers of its type."""
    fits = None, Fit(torch.bfloat16), Fit(torch.float16, 1.7)
    return fits[number % 3] if kit.dtype == torch.float32 else None


def _of_one(numel: int) -> Pieces:
    return lambda make, seed: [make(numel, seed)]


def _of_several(numel: int) -> Pieces:
    return lambda make, seed: several(make(numel, seed))


def _accumulate(kit: Kit, n: int) -> Trials:
    for pieces in (_of_one(n), _of_several(n)):
        for each in sums(kit, pieces):
            yield Trial((each,), (0,))


def _selecting(make: Callable[[Kit, int], Trials]) -> Callable[[Kit, int], Trials]:
    """Return the trials of a kernel that also selects: with enough capacity, and with too little."""

    def trials(kit: Kit, n: int) -> Trials:
        for trial in make(kit, n):
            yield Trial((*trial.args, kit.number(2.5), n // 16 + 8), trial.writes)
            yield Trial((*trial.args, kit.number(0.5), n // 50), trial.writes)

    return trials


def _summed(kit: Kit, n: int) -> Trials:
    return (Trial((each,), (0,)) for each in sums(kit, _of_one(n)))


def _largest_of_each(kit: Kit, n: int) -> Trials:
    pieces = several(kit.vector(n))
    for share in (100, 1):
        yield Trial((pieces, [-(-x.numel() // share) for x in pieces]))
    yield Trial((pieces, [x.numel() // 3 for x in pieces], [*range(len(pieces))]))


def _largest_sums(kit: Kit, n: int) -> Trials:
    for i, each in enumerate((*sums(kit, _of_several(n)), *sums(kit, _of_one(n)))):
        if each.how != "rounded":
            yield Trial((each, [x.numel() // 9 for x in each.outs], [*range(len(each))], _fit(kit, i)), (0,))


def _draw(numel: int, capacity: int) -> Draw:
    if numel < 10:
        return Draw(offset=0, stride=1, rank=0, capacity=min(numel, capacity))
    return Draw(offset=2, stride=3, rank=numel // 60 + 1, capacity=min(numel, capacity), first=5, last=numel)


def _sampled(kit: Kit, n: int) -> Trials:
    """Yield sums of every kind with enough capacity, or with too little; rounded ones, which are taken one by one, few.

    `accumulate_select` has more of those.
    """
    for i, each in enumerate(sums(kit, _of_several(n))):
        if each.how != "rounded" or n < 100:
            draws = [_draw(x.numel(), n // 50 if i % 2 else n // 16 + 8) for x in each.outs]
            yield Trial((each, draws, _fit(kit, i)), (0,))


def _hashed(kit: Kit, n: int) -> Trials:
    """Yield the same with slots for half as many."""
    for trial in _sampled(kit, n):
        each, draws, fit = trial.args
        slots = [-(-draw.capacity // 2) if x.numel() else 0 for x, draw in zip(each.outs, draws, strict=True)]
        draws = [draw._replace(first=0, last=-1) for draw in draws]
        regions = [(9 * i, x.numel()) for i, x in enumerate(each.outs)]
        yield Trial((each, draws, slots, [SEED + i for i in range(len(slots))], regions, fit), (0,))


def _largest_in_rows(kit: Kit, n: int) -> Trials:
    width = min(n, 500)
    for k in {1, -(-width // 100), width}:
        yield Trial((framed(kit.vector(n)[: n // width * width]), width, k))


_ADDING = Near(relative=1e-5, absolute=1e-6)

CASES: Mapping[str, Case] = {
    "accumulate": Case(make=_accumulate),
    "accumulate_largest_of_each": Case(make=_largest_sums),
    "accumulate_hashed_slots": Case(make=_hashed),
    "accumulate_sampled_select": Case(make=_sampled),
    "accumulate_select": Case(make=_selecting(_summed)),
    "block_energies": Case(
        make=lambda kit, n: [Trial((kit.vector(n), width)) for width in (_WIDTH, 3000)], near=_ADDING
    ),
    "largest": Case(make=lambda kit, n: [Trial((kit.vector(n), k)) for k in {1, n // 100, n}], dtypes=_ALL_FLOATS),
    "largest_blocks": Case(
        make=lambda kit, n: [Trial((kit.vector(n), _WIDTH, -(-n // _WIDTH) // 3))], contents=("whole", "zeros")
    ),  # sums without rounding
    "largest_in_rows": Case(make=_largest_in_rows, dtypes=_ALL_FLOATS),
    "largest_of_each": Case(make=_largest_of_each, dtypes=_ALL_FLOATS),
    "select": Case(make=_selecting(lambda kit, n: [Trial((kit.vector(n),))]), dtypes=_ALL_FLOATS),
}
