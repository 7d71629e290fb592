"""Kernels that put values in their places: scattered, merged, hashed into slots, sketched, summed by rows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Checks, Slotted
from thinwire_lab.check.material import FINITE, SEED, WHOLE, Case, Kit, Trial, Trials, as_read, framed, several


def _runs(kit: Kit, n: int, ranks: int = 3) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return indices and values that some ranks sent, rank after rank, and how many each did."""
    parts = [kit.picks(n, rank) for rank in range(ranks)]
    indices = torch.cat(parts)
    return framed(indices), kit.vector(indices.numel()), tuple(part.numel() for part in parts)


def _scatter(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    for known in (False, True):
        yield Trial((kit.vector(n, 1), ((0, n),), indices, values, runs, known), (0,))
    downwards = torch.cat([run.flip(0) for run in indices.split(list(runs))])  # as slots are: in no order
    yield Trial((kit.vector(n, 1), ((0, n),), framed(downwards), values, runs), (0,))
    if third := n // 3:
        ends = [torch.cat([kit.picks(third, rank), kit.picks(third, rank + 3) + (n - third)]) for rank in range(3)]
        regions, apart = ((0, third), (n - third, third)), framed(torch.cat(ends))
        runs = tuple(run.numel() for run in ends)
        for known in (False, True):
            yield Trial((kit.vector(n, 1), regions, apart, kit.vector(apart.numel()), runs, known), (0,))
    if half := n // 2:
        yield from _arrived(kit, n, half)


def _arrived(kit: Kit, n: int, half: int) -> Trials:
    """Yield values of three ranks' two regions where they arrived: sound, or found fault with."""
    picks = [[kit.picks(half, rank) for rank in range(3)], [kit.picks(n - half, rank) + half for rank in range(3)]]
    runs = tuple(min(map(len, part)) for part in picks)
    found = torch.cat([torch.stack([x[:run] for x in part]) for part, run in zip(picks, runs, strict=True)], dim=1)
    plain = torch.stack([kit.vector(sum(runs), rank) for rank in range(3)])
    rows = torch.nn.functional.pad(plain.view(torch.uint8), (16, 16 - plain.shape[1] * plain.element_size() % 8))
    values = rows[:, 16 : 16 + plain.shape[1] * plain.element_size()].view(plain.dtype)
    fault, none, regions = kit.whole(2000, 0, 1).bool(), kit.whole(0, 0, 1).view(3, 0), ((0, half), (half, n - half))
    other = kit.seeds([0, 1, 255]).int().view(3, 1)  # bytes that are not there
    for wrong, fixed in (([], none), ([fault], none), ([fault, ~fault], none), ([], other)):
        flags = kit.room(1 + sum(map(len, wrong)), dtype=torch.uint8)
        for known in (False, True):
            args = found, values, runs * 3, known, Checks(rows, fixed, wrong), flags
            yield Trial((kit.vector(n, 1), regions, *args), (0, 7))


def _scatter_add(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    yield Trial(([kit.vector(n, 1)], [0], indices, values, runs, -1.0), (0,))
    yield Trial((*_in_pieces(kit, n), -1.0), (0,))
    yield Trial((*_in_pieces(kit, n), -1.0, _in_pieces(kit, n)[0]), (0, 6))
    yield Trial(((), [0], indices, values, runs, 1.0, [kit.vector(n, 1)]), (6,))
    yield Trial(((), *_in_pieces(kit, n)[1:], 1.0, _in_pieces(kit, n)[0]), (6,))


def _settle(kit: Kit, n: int) -> Trials:
    picks = framed(kit.picks(n))
    alone = [kit.vector(n, 1)], [0], picks, kit.vector(picks.numel()), [picks.numel()]
    *pieces, values, runs = _in_pieces(kit, n)
    halves = *pieces, framed(values.bfloat16()), runs
    for own, masked in ((alone, []), (halves, _in_pieces(kit, n)[0])):
        for trial in _scatter(kit, n):
            rest = (False, None, None)[len(trial.args) - 5 :]
            yield Trial((*trial.args, *rest, *own, masked), (*trial.writes, 8, 13))


def _subtract_rounded(kit: Kit, n: int) -> Trials:
    indices, room = kit.picks(n), framed(kit.vector(n, 1).bfloat16())
    yield Trial((room, indices, framed(kit.vector(indices.numel()).round()), SEED), (0,))


def _in_pieces(kit: Kit, n: int) -> tuple[list[Tensor], list[int], Tensor, Tensor, list[int]]:
    """Return vectors, offsets, and a run of indices and values for each."""
    pieces, offsets = several(kit.vector(n, 1)), [7, 0, 0, 1 << 20]
    picks = [kit.picks(x.numel()) if x.numel() else kit.whole(0, 0, 1) for x in pieces]
    indices = framed(torch.cat([found + offset for found, offset in zip(picks, offsets, strict=True)]))
    values = framed(kit.vector(indices.numel()).round())  # some are 0
    return pieces, offsets, indices, values, [each.numel() for each in picks]


def _joined(kit: Kit, n: int) -> Trials:
    x = kit.vector(n)
    for factor, bound in ((1.0, None), (0.25, None), (0.25, 0.125), (1.0, 0.5)):
        yield Trial(([framed(x[: n // 3]), framed(x[n // 3 :])], torch.float16, factor, bound))


def _clamped(kit: Kit, n: int) -> Trials:
    for factor in (1.0, 1e5):
        wide = [framed(x * factor) for x in several(kit.vector(n))]
        yield Trial(([framed(x.half()) for x in wide], wide, 0.25, 65472.0), (0,))


def _gather_each(kit: Kit, n: int) -> Trials:
    pieces, offsets, indices, _, runs = _in_pieces(kit, n)
    starts = kit.seeds(offsets).repeat_interleave(kit.seeds(runs))
    yield Trial((pieces, framed(indices.to(torch.int64) - starts), runs))


def _peak_of_each(kit: Kit, n: int) -> Trials:
    yield Trial((several(kit.vector(n)),))
    yield Trial(([x for x in several(kit.vector(n)) if x.numel()],))


def _merge(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    yield Trial((list(indices.split(runs)), [part[:, None] for part in values.split(runs)]))


def _placed(kit: Kit, n: int) -> Trials:
    picks = [kit.picks(n), kit.whole(0, 0, 1), kit.picks(n, 1)]
    regions, runs = ((3, n), (n + 3, 5), (n + 8, n)), tuple(each.numel() for each in picks)
    indices = torch.cat(picks)
    indices[kit.whole(indices.numel(), 0, 2).bool()] = -1
    yield Trial((framed(indices), regions, runs))
    yield Trial((framed(picks[0]), ((0, n),), runs[:1]))


def _misplaced(kit: Kit, n: int) -> Trials:
    """Yield keys that are right, and for each fault some that are wrong in one place."""
    picks = kit.picks(n)
    edges, right = kit.seeds([3, 3 + n // 2, n + 3, 2 * n + 3]).int(), picks + 3 + (picks >= n // 2) * (n - n // 2)
    for least in (None, 0, 1):
        rows = torch.stack([right, right])
        yield Trial((framed(rows.view(-1)).view_as(rows), edges, least))
        for fault in (2, 3 + n // 2, 2 * n + 3, -1, int(right[0]) if right.numel() else 0):
            if right.numel():
                rows = torch.stack([right, right])
                rows[1, -1] = fault
                yield Trial((framed(rows.view(-1)).view_as(rows), edges, least, torch.empty_like(rows)), (3,))


def _differ(kit: Kit, n: int) -> Trials:
    """Yield rows that agree, and some of which one does not."""
    row = kit.whole(n + 8, 0, 256, torch.uint8)
    places = [*range(8), *range(n + 8)[-min(n, 150) :]]
    bits = kit.whole(len(places), 0, 256)
    fixed = torch.stack([kit.seeds(places).int(), row[places].int() & bits, bits])
    for flip in (0, 1, 128):
        rows = torch.stack([row] * 3)
        rows[2, places[-1]] ^= flip
        yield Trial((framed(rows.view(-1)).view_as(rows), framed(fixed.view(-1)).view_as(fixed)))


def _as_wrong(_: Trial, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    wrong, said = (bool(flags[0].any()) for flags in (found, expected))
    return "" if wrong == said else f"is {wrong}, expected {said}"


def _hashed_slots_of_each(kit: Kit, n: int) -> Trials:
    pieces = several(kit.vector(n))
    picks = [kit.picks(x.numel()) if x.numel() else kit.whole(0, 0, 1) for x in pieces]
    runs, slots = [each.numel() for each in picks], [-(-x.numel() // 40) for x in pieces]
    regions = [(9 * i, x.numel()) for i, x in enumerate(pieces)]
    for priorities in (kit.whole(sum(runs), 0, 2**31 - 1), kit.vector(sum(runs))):
        yield Trial((pieces, framed(torch.cat(picks)), priorities, runs, slots, [SEED, 1, 2, 3], regions))


def _slotted(kit: Kit, n: int) -> tuple[Tensor, list[Slotted], Tensor]:
    """Return indices in the slots of several regions, of which some have none, the regions and their seeds."""
    slots, within = _in_slots(kit, n).numel(), _in_slots(kit, n)
    parts = [Slotted(3, n, slots), Slotted(n + 3, 5, 0), Slotted(n + 8, n, slots)]
    return framed(torch.cat([within + 3, within + n + 8])), parts, kit.seeds([SEED, 9, SEED])


def _as_encoded(_: Trial, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    misplaced, wanted = int(found[1].sum()), int(expected[1])
    if misplaced != wanted:
        return f"finds {misplaced} in no slot, expected {wanted}"
    return "" if torch.equal(found[0], expected[0]) else "differs"


def _slots_encode(kit: Kit, n: int) -> Trials:
    indices, parts, seeds = _slotted(kit, n)
    yield Trial((indices, parts, seeds))
    yield Trial((indices.roll(1), parts, seeds))


def _slots_decode(kit: Kit, n: int) -> Trials:
    indices, parts, seeds = _slotted(kit, n)
    packed, _ = kernels.slots_encode.reference(indices, parts, seeds)
    rows = torch.stack([packed, kit.whole(packed.numel(), 0, 256, torch.uint8)])
    yield Trial((rows, parts, seeds.expand(2, -1)))


def _slots_read(kit: Kit, n: int) -> Trials:
    """Yield sections that are sound, and some of which a seed, a code or their beginning is another."""
    indices, parts, seeds = _slotted(kit, n)
    packed, _ = kernels.slots_encode.reference(indices, parts, seeds)
    section = torch.cat([kit.seeds([3]).view(torch.uint8), seeds.view(torch.uint8), packed])
    rows = torch.stack([torch.nn.functional.pad(section, (0, -section.numel() % 8))] * 2)
    fixed = kit.seeds([*range(8), 3, *[0] * 7, *[255] * 8]).int().view(3, -1)
    for place in (None, 1, 10, 31, section.numel() - 1):
        some = rows.clone()
        if place is not None:
            some[1, place] = 255
        yield Trial((some[:, : section.numel()], fixed, parts))


def _in_slots(kit: Kit, n: int) -> Tensor:
    picks = kit.picks(n)
    table = kernels.hashed_slots(picks, kit.whole(picks.numel(), 0, 3), n // 40 + 1, n, SEED)
    return framed(table.masked_fill(table < 0, n - 1))


CASES: Mapping[str, Case] = {
    "differ": Case(make=_differ, **WHOLE, alike=_as_wrong),
    "joined": Case(make=_joined),
    "clamped": Case(make=_clamped),
    "gather_each": Case(make=_gather_each),
    "hashed_slots_of_each": Case(make=_hashed_slots_of_each),
    "merge": Case(make=_merge),
    "misplaced": Case(make=_misplaced, **WHOLE, alike=_as_wrong),
    "peak_of_each": Case(make=_peak_of_each),
    "placed": Case(make=_placed, **WHOLE),
    "row_sums": Case(make=lambda kit, n: [Trial((framed(torch.stack([kit.vector(n, rank) for rank in range(3)])),))]),
    "scatter": Case(make=_scatter),
    "scatter_add": Case(make=_scatter_add),
    "settle": Case(make=_settle),
    # sums of whole numbers have no rounding
    "sketch_insert": Case(
        make=lambda kit, n: [Trial((framed(kit.vector(n).round()), 3, n // 30 + 1, SEED))], contents=FINITE, nbytes=150
    ),
    "sketch_query": Case(
        make=lambda kit, n: [Trial((framed(kit.vector(3 * (n // 30 + 1)).view(3, -1)), n, SEED))],
        contents=FINITE,
        nbytes=150,
    ),
    "slots_decode": Case(make=_slots_decode, **WHOLE),
    "slots_read": Case(make=_slots_read, **WHOLE, alike=as_read),
    "slots_encode": Case(make=_slots_encode, **WHOLE, alike=_as_encoded),
    "subtract_rounded": Case(make=_subtract_rounded),
}
