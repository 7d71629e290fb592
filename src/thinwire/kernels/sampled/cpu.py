"""Several vectors in one call of a loop: each is sampled, summed and searched while it is in the cache.

In loops, `table` has the addresses of each vector's tensors, `drawn` the fields of its draw, and from `starts` on
`indices` and `found` (the bits there) take its picks. `sign` masks the sign off; so magnitudes compare as integers, NaN
highest.
"""

from collections.abc import Sequence

import numpy as np
import torch

from thinwire.kernels.accumulate.cpu import sum_at
from thinwire.kernels.compiled import compiled, element, vector
from thinwire.kernels.parts import Fit, Found, addresses, in_dtype, sizes
from thinwire.kernels.ranges import map_groups
from thinwire.kernels.sampled.reference import Draw, one_by_one, written
from thinwire.kernels.select import loops
from thinwire.kernels.select.cpu import accumulate_select, as_integers, largest
from thinwire.kernels.sums import Sum

_LANES = 64  # bytes that `peaks` holds


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw], fit: Fit | None = None) -> Found:
    """See `reference.accumulate_sampled_select`. Groups of vectors are taken in parallel."""
    if sums.seeds is not None:
        return one_by_one(sums, draws, accumulate_select, largest, fit)
    lengths, drawn = sizes(sums.outs), np.array(draws, np.int64)
    columns = [sums.outs, sums.residuals, in_dtype(sums.gradients, sums.dtype)]
    if sums.moving is not None and sums.velocities is not None:
        columns += [sums.moving, sums.velocities]
    table, starts = addresses(*columns), np.concatenate([[0], drawn[:, 3].cumsum()])
    indices, values = np.empty(starts[-1], np.int32), torch.empty(int(starts[-1]), dtype=sums.dtype, device="cpu")
    (bits, sign), like, rest = as_integers(values), values.numpy()[:0], sums.factors

    def run(first: int, last: int) -> None:
        _sums(table, lengths, drawn, starts, indices, bits, like, sign, first, last, *rest)

    map_groups(run, lengths)
    return written(torch.from_numpy(indices), values, fit)


@compiled
def _sums(table, lengths, drawn, starts, indices, found, like, sign, first, last, scales, decays, m, ahead):
    # The sample's sums come first, as the threshold must be there before the pass.
    sample, picks, bits = _scratch(lengths, drawn, found, first, last)
    peaks, numbers = np.zeros(_LANES // found.itemsize, found.dtype), sample.view(like.dtype)
    for at in range(first, last):
        size, scale, decay = lengths[at], scales[at], element(decays, at)
        out, residual = vector(table[at, 0], size, like), vector(table[at, 1], size, like)
        gradient = vector(table[at, 2], size, like)
        # Without momentum these are the residual and the gradient once more, and nothing looks at them.
        moving, velocity = vector(table[at, -2], size, like), vector(table[at, -1], size, like)
        count, offset = 0, drawn[at, 0]
        if drawn[at, 1] == 1:  # without a stride, it vectorises
            count = size - offset
            for i in range(count):
                numbers[i] = sum_at(residual, gradient, offset + i, scale, decay, velocity, m, ahead)
        for i in range(offset + count, size, drawn[at, 1]):
            numbers[count] = sum_at(residual, gradient, i, scale, decay, velocity, m, ahead)
            count += 1
        bar, room = _threshold(sample[:count], sign, drawn[at, 2], like), _room(size, drawn[at])
        each = out.view(found.dtype)
        count = loops.accumulate_select(
            each, sign, bar, 0, size, picks, bits, room, peaks, None,
            out, residual, gradient, scale, decay, moving, velocity, m, ahead,
        )  # fmt: skip
        here, there = indices[starts[at] : starts[at + 1]], found[starts[at] : starts[at + 1]]
        _keep(each, sign, picks, bits, count, room, here, there, drawn[at, 4], drawn[at, 5])


@compiled
def _room(size, draw):
    # `Draw.room`.
    promised = 3 * draw[2] * draw[1] + 80 if draw[2] else size
    return min(size, max(promised, draw[3]))


@compiled
def _scratch(lengths, drawn, found, first, last):
    # Room for the most that any of these vectors needs, made once for all of them.
    samples = room = 0
    for at in range(first, last):
        samples = max(samples, (lengths[at] - drawn[at, 0]) // drawn[at, 1] + 1)
        room = max(room, _room(lengths[at], drawn[at]))
    return np.empty(samples, found.dtype), np.empty(room + 1, np.int32), np.empty(room + 1, found.dtype)


@compiled
def _threshold(sample, sign, rank, like):
    # As bits, and at least 1, because zeros are not picked. If the sample has a NaN, it is infinity.
    one, top = sample.dtype.type(1), sample.dtype.type(0)
    if rank == 0:
        return one
    for i in range(sample.size):
        top = max(top, sample[i] & sign)
    infinity = np.full(1, np.inf, like.dtype).view(sample.dtype)[0]
    if top > infinity:
        return infinity
    bar, _ = loops.kth(sample, sign, rank)
    return max(one, sample.dtype.type(bar))


@compiled
def _keep(each, sign, picks, bits, count, room, indices, found, begin, last):
    # Keeps the largest of the picks, or of all elements if there were more picks than room, and fills up.
    if count > room:
        taken = loops.take_largest(np.arange(each.size).astype(np.int32), each, sign, indices, found)
    else:
        taken = loops.take_largest(picks[:count], bits[:count], sign, indices, found)
    for i in range(taken):
        indices[i] += begin
    indices[taken:] = last
    found[taken:] = 0
