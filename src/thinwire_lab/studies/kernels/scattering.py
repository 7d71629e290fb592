"""Kernels that add, overwrite and clear at indices, and kernels that merge and number indices."""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire_lab.studies.kernels.work import Case, Place, Work

_FLOOR = "copy_ of indices and values"


def runs_of(place: Place) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the picks of all workers, run after run: indices, values, lengths of the runs."""
    parts = [place.material.picks(place.numel, place.picks, worker, place.workers) for worker in range(place.workers)]
    indices, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return indices, values, (place.picks,) * place.workers


def _copies(*tensors: Tensor) -> Work:
    """Return work whose floor is a copy of these tensors. The caller replaces what runs."""
    spare = [torch.empty_like(tensor) for tensor in tensors]

    def floor() -> None:
        for place, tensor in zip(spare, tensors, strict=True):
            place.copy_(tensor)

    return Work(run=floor, floor=floor, moved=sum(tensor.nbytes for tensor in tensors))


def _scatter(place: Place) -> Work:
    indices, values, runs = runs_of(place)
    out = torch.empty(place.numel, device=place.device)

    def run() -> Tensor:
        kernels.scatter(out, [(0, place.numel)], indices, values, runs)
        return out

    return Work(
        run=run,
        floor=out.zero_,
        reset=lambda: out.fill_(torch.nan),
        moved=out.nbytes + indices.nbytes + values.nbytes,
    )


def _scatter_add(place: Place) -> Work:
    indices, values, runs = runs_of(place)
    out, copy = torch.zeros(place.numel, device=place.device), _copies(indices, values)

    def run() -> Tensor:
        kernels.scatter_add(out, indices, values, runs, -1.0)
        return out

    moved = copy.moved + 2 * out.element_size() * indices.numel()
    return Work(run=run, floor=copy.floor, reset=out.zero_, moved=moved)


def _mask(place: Place) -> Work:
    indices, values = place.material.picks(place.numel, place.picks, 0, 1)
    x, copy = place.gradient().clone(), _copies(indices, values)

    def run() -> Tensor:
        kernels.mask(x, indices, values)
        return x

    moved = copy.moved + x.element_size() * indices.numel()
    return Work(run=run, floor=copy.floor, reset=lambda: x.copy_(place.gradient()), moved=moved)


def _merge(place: Place) -> Work:
    keys, values, runs = runs_of(place)
    tables = (keys.split(runs), [part[:, None] for part in values.split(runs)])
    copy = _copies(keys, values)
    return Work(run=lambda: kernels.merge(*tables), floor=copy.floor, moved=2 * copy.moved)


def _in_ten(place: Place) -> tuple[list[Tensor], list[int], Tensor, Tensor, list[int]]:
    """Return a gradient as ten vectors, as a bucket has several parameters, their offsets, and picks, run after run."""
    pieces = [x.clone() for x in place.gradient().tensor_split(10)]
    indices, values = place.material.picks(place.numel, place.picks, 0, 1)
    ends = torch.tensor([x.numel() for x in pieces], device=place.device).cumsum(0)
    offsets = [0, *ends[:-1].tolist()]
    firsts = torch.searchsorted(indices.long(), ends)
    return pieces, offsets, indices, values, torch.diff(firsts, prepend=firsts.new_zeros(1)).tolist()


def _scatter_add_each(place: Place) -> Work:
    pieces, offsets, indices, values, runs = _in_ten(place)
    copy, moved = _copies(indices, values), 2 * values.nbytes

    def run() -> list[Tensor]:
        kernels.scatter_add_each(pieces, offsets, indices, values, runs, -1.0)
        return pieces

    def reset() -> None:
        for piece in pieces:
            piece.zero_()

    return Work(run=run, floor=copy.floor, reset=reset, moved=copy.moved + moved)


def _gather_each(place: Place) -> Work:
    pieces, offsets, indices, values, runs = _in_ten(place)
    firsts = torch.tensor(offsets, device=place.device).repeat_interleave(torch.tensor(runs, device=place.device))
    within, copy = indices - firsts, _copies(indices, values)
    return Work(
        run=lambda: kernels.gather_each(pieces, within, runs), floor=copy.floor, moved=within.nbytes + 2 * values.nbytes
    )


def _mask_each(place: Place) -> Work:
    pieces, offsets, indices, values, runs = _in_ten(place)
    copy = _copies(indices, values)

    def run() -> list[Tensor]:
        kernels.mask_each(pieces, offsets, indices, values, runs)
        return pieces

    def reset() -> None:
        for piece, fresh in zip(pieces, place.gradient().tensor_split(10), strict=True):
            piece.copy_(fresh)

    return Work(run=run, floor=copy.floor, reset=reset, moved=copy.moved + values.nbytes)


def _subtract_rounded(place: Place) -> Work:
    indices, values = place.material.picks(place.numel, place.picks, 0, 1)
    fresh = place.gradient().bfloat16()
    x, copy = fresh.clone(), _copies(indices, values)

    def run() -> Tensor:
        kernels.subtract_rounded(x, indices, values, 1)
        return x

    return Work(run=run, floor=copy.floor, reset=lambda: x.copy_(fresh), moved=copy.moved + values.nbytes)


def _slot_of(place: Place) -> Work:
    indices, _ = place.material.picks(place.numel, place.picks, 0, 1)
    spare = torch.empty(2 * indices.numel(), dtype=torch.int64, device=place.device)
    return Work(
        run=lambda: kernels.slot_of(indices, place.picks, place.numel, 1),
        floor=lambda: spare.fill_(0),
        moved=indices.nbytes + spare.nbytes,
    )


def _in_slots(place: Place) -> Tensor:
    indices, _, _ = runs_of(place)
    indices, priorities = indices[: place.picks], torch.zeros(place.picks, dtype=torch.int32, device=place.device)
    table = kernels.hashed_slots(indices, priorities, place.picks, place.numel, 1)
    return table.masked_fill(table < 0, place.numel - 1)


def _slot_codes(place: Place) -> Work:
    indices = _in_slots(place)
    return Work(
        run=lambda: kernels.slot_codes(indices, place.numel, 1),
        floor=indices.clone,
        moved=2 * indices.nbytes,
    )


def _slot_indices(place: Place) -> Work:
    indices = _in_slots(place)
    codes = kernels.slot_codes(indices, place.numel, 1)
    return Work(
        run=lambda: kernels.slot_indices(codes, place.numel, 1),
        floor=codes.clone,
        moved=2 * codes.nbytes,
    )


def _slotted(place: Place) -> tuple[Tensor, list[kernels.Slotted], Tensor]:
    """Return indices in the slots of one vector, which it is, and its seed."""
    seeds = torch.ones(1, dtype=torch.int64, device=place.device)
    return _in_slots(place), [kernels.Slotted(0, place.numel, place.picks)], seeds


def _slots_encode(place: Place) -> Work:
    indices, parts, seeds = _slotted(place)
    return Work(run=lambda: kernels.slots_encode(indices, parts, seeds), floor=indices.clone, moved=2 * indices.nbytes)


def _slots_decode(place: Place) -> Work:
    indices, parts, seeds = _slotted(place)
    rows = kernels.slots_encode(indices, parts, seeds)[0][None]
    return Work(
        run=lambda: kernels.slots_decode(rows, parts, seeds[None]), floor=indices.clone, moved=2 * indices.nbytes
    )


def _index_of(place: Place) -> Work:
    indices, _ = place.material.picks(place.numel, place.picks, 0, 1)
    pair = kernels.slot_of(indices, place.picks, place.numel, 1)
    copy = _copies(pair[0])
    return Work(
        run=lambda: kernels.index_of(*pair, place.picks, place.numel, 1),
        floor=copy.floor,
        moved=3 * pair[0].nbytes,
    )


def _ones(place: Place) -> Work:
    indices, _ = place.material.picks(place.numel, place.picks, 0, 1)
    bits = torch.zeros(place.numel, dtype=torch.uint8, device=place.device)
    bits[indices.long()] = 1
    spare = torch.empty_like(bits)
    return Work(
        run=lambda: kernels.ones(bits, place.picks),
        floor=lambda: spare.copy_(bits),
        moved=bits.nbytes + 4 * place.picks,
    )


def _elias_fano_encode(place: Place) -> Work:
    indices, _ = place.material.picks(place.numel, place.picks, 0, 1)
    copy = _copies(indices)
    return Work(
        run=lambda: kernels.elias_fano_encode(indices, place.numel),
        floor=copy.floor,
        moved=2 * indices.nbytes,
    )


def _elias_fano_decode(place: Place) -> Work:
    indices, _ = place.material.picks(place.numel, place.picks, 0, 1)
    buffer, copy = kernels.elias_fano_encode(indices, place.numel), _copies(indices)
    return Work(
        run=lambda: kernels.elias_fano_decode(buffer, place.picks, place.numel),
        floor=copy.floor,
        moved=buffer.nbytes + indices.nbytes,
        bits=8 * buffer.nbytes / place.picks,
    )


def _elias_fano_decode_rows(place: Place) -> Work:
    each = [place.material.picks(place.numel, place.picks, worker, place.workers)[0] for worker in range(place.workers)]
    rows = torch.stack([kernels.elias_fano_encode(indices, place.numel) for indices in each])
    copy = _copies(torch.stack(each))
    return Work(
        run=lambda: kernels.elias_fano_decode_rows(rows, place.picks, place.numel),
        floor=copy.floor,
        moved=rows.nbytes + 4 * place.workers * place.picks,
        bits=8 * rows.nbytes / (place.workers * place.picks),
    )


CASES = {
    "scatter": Case(make=_scatter, group="scatter", floor="zero_()", sweep=True, workers=True),
    "scatter_add": Case(make=_scatter_add, group="index", floor=_FLOOR, sweep=True),
    "mask": Case(make=_mask, group="index", floor=_FLOOR, sweep=True),
    "scatter_add_each": Case(make=_scatter_add_each, group="index", floor=_FLOOR, sweep=True),
    "gather_each": Case(make=_gather_each, group="index", floor=_FLOOR, sweep=True),
    "mask_each": Case(make=_mask_each, group="index", floor=_FLOOR, sweep=True),
    "subtract_rounded": Case(make=_subtract_rounded, group="index", floor=_FLOOR, sweep=True),
    "merge": Case(make=_merge, group="index", floor=_FLOOR, sweep=True),
    "ones": Case(make=_ones, group="index", floor="copy_ of the bits", sweep=True),
    "elias_fano_encode": Case(make=_elias_fano_encode, group="index", floor="copy_ of the indices", sweep=True),
    "elias_fano_decode": Case(make=_elias_fano_decode, group="index", floor="copy_ of the indices", sweep=True),
    "elias_fano_decode_rows": Case(
        make=_elias_fano_decode_rows, group="index", floor="copy_ of the indices", sweep=True, workers=True
    ),
    "slot_codes": Case(make=_slot_codes, group="index", floor="clone of the indices", sweep=True),
    "slot_indices": Case(make=_slot_indices, group="index", floor="clone of the codes", sweep=True),
    "slots_encode": Case(make=_slots_encode, group="index", floor="clone of the indices", sweep=True),
    "slots_decode": Case(make=_slots_decode, group="index", floor="clone of the indices", sweep=True),
    "slot_of": Case(make=_slot_of, group="index", floor="fill_ of the result", sweep=True),
    "index_of": Case(make=_index_of, group="index", floor="copy_ of the slots", sweep=True),
}
